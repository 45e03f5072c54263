import threading

import pytest
import torch
import torch.distributed as dist

from dpipe.errors import PeerLost
from dpipe.wire.collective import open_group, open_store

HOST = "127.0.0.1"


def test_group_is_opened_beside_the_default_one() -> None:
    master = open_store(HOST, 0, 20, master=True)
    sums: list[list[float]] = []

    def rank_main(rank: int) -> None:
        store = open_store(HOST, master.port, 20, master=False)
        group = open_group(store, rank, 2, host=HOST, device=torch.device("cpu"), timeout_s=20)
        numbers = torch.tensor([1.0, 10.0 * rank])
        group.allreduce([numbers]).wait()
        sums.append(numbers.tolist())

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sums == [[2.0, 10.0]] * 2
    assert not dist.is_initialized()


def test_group_whose_other_rank_never_comes_is_given_up() -> None:
    store = open_store(HOST, 0, 20, master=True)
    with pytest.raises(PeerLost, match="number 0 of the 2 ranks of a torch.distributed group"):
        open_group(store, 0, 2, host=HOST, device=torch.device("cpu"), timeout_s=0.5)


def test_store_that_nobody_has_opened_is_named() -> None:
    with pytest.raises(PeerLost, match=r"no store of a torch.distributed group at 127\.0\.0\.1:1:"):
        open_store(HOST, 1, 0.5, master=False)
