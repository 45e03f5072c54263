import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer


class Run:
    """A server and its ranks as threads; whatever is left of them is closed at the end."""

    def __init__(self) -> None:
        self.servers: list[CoordinatorServer] = []
        self.ranks: list[Coordinator] = []

    def serve(self, world_size: int, **settings) -> CoordinatorServer:
        self.servers.append(CoordinatorServer(world_size, **settings))
        return self.servers[-1]

    def join(self, rank: int, world_size: int, **settings) -> Coordinator:
        settings = {"shared": {}, "join_s": 20.0, **settings}
        address = settings.pop("address", None) or f"127.0.0.1:{self.servers[-1].port}"
        coordinator = Coordinator.join(address, rank, world_size, **settings)
        self.ranks.append(coordinator)
        return coordinator

    def meet(
        self, world_size: int, *, server: dict[str, object] | None = None, **settings
    ) -> list[Coordinator]:
        self.serve(world_size, **(server or {}))
        joins = [
            lambda rank=rank: self.join(rank, world_size, **settings) for rank in range(world_size)
        ]
        ranks = self.at_once(*joins)
        for error in ranks:
            if isinstance(error, Exception):
                raise error
        return ranks

    @staticmethod
    def at_once(*calls: Callable[[], object]) -> list:
        """What each call returns or raises, called in threads of their own."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            return [future.exception(60) or future.result() for future in futures]

    def close(self) -> None:
        for coordinator in self.ranks:
            coordinator.close()
        for server in self.servers:
            server.close(wait_s=0.0)


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("coordinat")] == []
