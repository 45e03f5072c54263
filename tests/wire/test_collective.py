import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dpipe.errors import PeerLost
from dpipe.wire.collective import open_group, open_store

HOST = "127.0.0.1"


def of_both_ranks(act: Callable[[int, Any], object]) -> list[object]:
    """What `act(rank, group)` returns in each rank of a group of two, in no order."""
    master = open_store(HOST, 0, 20, master=True)
    returned: list[object] = []

    def rank_main(rank: int) -> None:
        store = open_store(HOST, master.port, 20, master=False)
        group = open_group(store, rank, 2, host=HOST, device=torch.device("cpu"), timeout_s=20)
        returned.append(act(rank, group))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return returned


def test_group_is_opened_beside_the_default_one() -> None:
    def summed(rank: int, group: Any) -> list[float]:
        numbers = torch.tensor([1.0, 10.0 * rank])
        group.allreduce([numbers]).wait()
        return numbers.tolist()

    assert of_both_ranks(summed) == [[2.0, 10.0]] * 2
    assert not dist.is_initialized()


@pytest.mark.skipif(sys.platform != "linux", reason="such classes are Linux's")
def test_threads_that_read_take_no_core_from_those_that_send() -> None:
    def policies(rank: int, group: Any) -> set[int]:
        group.barrier().wait()
        seen = set()
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has just ended
                if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                    seen.add(os.sched_getscheduler(int(thread.name)))
        return seen

    assert of_both_ranks(policies) == [{os.SCHED_BATCH}] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_group_whose_other_rank_never_comes_is_given_up() -> None:
    store = open_store(HOST, 0, 20, master=True)
    with pytest.raises(PeerLost, match="number 0 of the 2 ranks of a torch.distributed group"):
        open_group(store, 0, 2, host=HOST, device=torch.device("cpu"), timeout_s=0.5)


def test_store_that_nobody_has_opened_is_named() -> None:
    with pytest.raises(PeerLost, match=r"no store of a torch.distributed group at 127\.0\.0\.1:1:"):
        open_store(HOST, 1, 0.5, master=False)
