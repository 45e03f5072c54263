"""Ranks of a tensor-parallel group as threads, over gloo."""

import threading
from collections.abc import Callable
from typing import Any

from dpipe.stage.tensor_group import TensorGroup
from dpipe.wire.collective import open_store

HOST = "127.0.0.1"


def on_ranks(
    size: int, work: Callable[[TensorGroup], Any], *, sequence: bool = False, timeout_s: float = 10
) -> list[Any]:
    """Run `work` on each rank; returns the results, or raises the first error."""
    master = open_store(HOST, 0, 20, master=True)
    results: list[Any] = [None] * size

    def main(rank: int) -> None:
        try:
            store = open_store(HOST, master.port, 20, master=False)
            group = TensorGroup(
                store, range(size), rank, host=HOST, sequence=sequence, timeout_s=timeout_s
            )
            results[rank] = work(group)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 20)
    assert not any(thread.is_alive() for thread in threads)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
