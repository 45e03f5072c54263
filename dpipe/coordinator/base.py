"""What a run asks of its coordinator: the contract of `client.Coordinator` and `alone.Alone`."""

import json
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from dpipe.errors import RunAborted, RunError
from dpipe.wire.schema import Schema, T

_ANSWER_S = 2.0  # for the coordinator to say who is missing, once a gather has timed out


class Gathered:
    """A gather under way: every rank's part of one key, once all ranks have given theirs."""

    def __init__(self, key: str, ask: Callable[[], None]) -> None:
        self.key = key
        self.parts: Future[tuple[bytes, ...]] = Future()
        self.missing: Future[tuple[int, ...]] = Future()
        self._ask = ask

    def done(self) -> bool:
        return self.parts.done()

    def wait(self, timeout_s: float) -> tuple[bytes, ...]:
        """All parts, by rank. Raises `RunAborted`, or after `timeout_s` `RunError` naming the ranks
        that are missing.
        """
        try:
            return self.parts.result(timeout_s)
        except TimeoutError:
            raise RunError(
                f"waited {timeout_s:g} s for {self.key!r}: {self._who_is_missing()}"
            ) from None

    def _who_is_missing(self) -> str:
        self.missing = Future()  # a fresh question each time
        self._ask()
        try:
            return f"no word from {name_ranks(self.missing.result(_ANSWER_S))}"
        except (TimeoutError, RunAborted):
            return "and the coordinator does not say who is missing"


def name_ranks(ranks: tuple[int, ...]) -> str:
    names = ", ".join(map(str, ranks))
    return f"ranks {names}" if len(ranks) > 1 else f"rank {names}"


def relayed_links(links: Iterable[str], pairs: Iterable[tuple[int, int]]) -> list[str]:
    """Those of `links`, named as "0->1", that the coordinator's machine passes on."""
    named = set()
    for lower, higher in pairs:
        named |= {f"{lower}->{higher}", f"{higher}->{lower}"}
    return sorted(named.intersection(links))


class Coordination(Protocol):
    """One rank's connection to the coordinator. Safe to use from any thread."""

    rank: int
    world_size: int
    addresses: dict[int, str | None]
    # By rank: what this rank and that one know, besides the coordinator, and no other rank.
    link_secrets: dict[int, bytes]
    relayed: tuple[tuple[int, int], ...]  # links that the coordinator's machine passes on, of all

    @property
    def clock_offset_ns(self) -> int:
        """What to add to this process's `time.perf_counter_ns()` for the coordinator's clock."""

    def gather(self, key: str, payload: bytes) -> Gathered:
        """Give this rank's part of `key` and return at once. Each rank uses a key once."""

    def share(self, key: str, value: Any, timeout_s: float, schema: Schema[T]) -> list[T]:
        """Every rank's JSON value of `key`, by rank, once all have given theirs.

        Raises as `Gathered.wait` does, and `TransferError` naming a rank whose value is not of
        `schema`. All values went through JSON, this rank's own too.
        """
        payloads = self.gather(key, json.dumps(value).encode()).wait(timeout_s)
        return [schema.parse(payload, repr(key), rank) for rank, payload in enumerate(payloads)]

    def routes(self, here: str, peers: Collection[int], timeout_s: float) -> dict[int, str | None]:
        """Where this rank, which listens at `here`, dials each of `peers`; None for one that dials
        it. Either may be through the relay of the coordinator's machine. Those that are left
        out are dialled at their addresses. All ranks call it at about the same time; raises as
        `share` does.
        """

    def barrier(self, name: str, timeout_s: float) -> None:
        """Wait until all ranks have called it; raises as `Gathered.wait` does."""
        self.gather(f"barrier/{name}", b"").wait(timeout_s)

    def abort(self, reason: str, *, symptom: bool = False) -> RunAborted:
        """End the run for all ranks. Returns the error that all of them get; it names the first
        cause.

        `symptom` marks a consequence of another rank's failure (`PeerLost`, `TransferTimeout`): the
        coordinator waits a moment for the cause, a lost process or its own report, and prefers
        that.
        """

    def on_abort(self, callback: Callable[[RunAborted], None]) -> None:
        """Call `callback` once, from some thread, when the run aborts; at once if it has."""

    def give_up(self, error: RunAborted) -> None:
        """End the run for this rank alone, at once and without a word: every wait here raises
        `error`, and the `on_abort` callbacks get it. From any thread, also while it joins.
        """

    def upload(self, kind: str, payload: bytes) -> None:
        """Queue `payload` for the server's `on_upload`, which gets it before `leave` returns."""

    def leave(self) -> None:
        """Say that this rank is done, so that it is not taken for lost; then close."""

    def close(self) -> None:
        """Stop all threads. Without `leave` the coordinator takes this rank for lost. Safe to call
        twice.
        """
