"""`base.Directory` for ranks that are threads, without a coordinator."""

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dpipe.transport.base import Transport
from dpipe.wire.schema import Schema

T = TypeVar("T")


class Shared:
    """What all ranks have shared, by key and rank."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.changed = threading.Condition()
        self.texts: dict[str, dict[int, str]] = {}


class ThreadDirectory:
    def __init__(self, shared: Shared, rank: int, addresses: Mapping[int, str | None]) -> None:
        self.addresses = addresses
        self._shared = shared
        self._rank = rank

    def routes(
        self, here: str, peers: Collection[int], timeout_s: float
    ) -> Mapping[int, str | None]:
        return {}

    def share(self, key: str, value: Any, timeout_s: float, schema: Schema[T]) -> list[T]:
        shared = self._shared
        with shared.changed:
            texts = shared.texts.setdefault(key, {})
            texts[self._rank] = json.dumps(value)
            shared.changed.notify_all()
            assert shared.changed.wait_for(lambda: len(texts) == shared.num_ranks, timeout_s)
            return [schema.parse(texts[rank].encode(), key, rank) for rank in sorted(texts)]


def prepare(ends: Sequence[Transport]) -> None:
    """Connect all pairs, with a thread per rank; raises the first error."""
    shared = Shared(len(ends))
    addresses = {end.rank: f"127.0.0.1:{end.port}" for end in ends}

    def prepare_rank(end: Transport) -> None:
        peers = addresses.keys() - {end.rank}
        end.prepare(ThreadDirectory(shared, end.rank, addresses), peers)

    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(prepare_rank, ends))
