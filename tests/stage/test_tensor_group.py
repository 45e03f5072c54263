import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from ranks import on_ranks

from dpipe.errors import PeerLost, RunAborted
from dpipe.stage.tensor_group import TensorGroup


def rows(group: TensorGroup) -> torch.Tensor:
    """[2, 6]: 10 * rank + the column, twice."""
    return (10.0 * group.rank + torch.arange(6)).expand(2, 6)


def test_all_reduce_adds_and_leaves_what_was_given() -> None:
    def on_rank(group: TensorGroup) -> tuple[list[float], list[float]]:
        tensor = rows(group).clone()
        return group.all_reduce(tensor)[0].tolist(), tensor[0].tolist()

    results = on_ranks(3, on_rank)
    assert [total for total, _ in results] == [[30 + 3 * column for column in range(6)]] * 3
    assert results[2][1] == [20 + column for column in range(6)]


def test_all_gather_puts_parts_in_the_order_of_ranks() -> None:
    expected = [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    for whole in on_ranks(2, lambda group: group.all_gather(rows(group), 1)):
        assert whole.tolist() == [expected] * 2


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum() -> None:
    first, second = on_ranks(2, lambda group: group.reduce_scatter(rows(group), 1))
    assert (first.tolist(), second.tolist()) == ([[10, 12, 14]] * 2, [[16, 18, 20]] * 2)


def test_sent_bytes_of_a_rank_are_counted() -> None:
    def on_rank(group: TensorGroup) -> list[int]:
        sent: list[int] = []
        group.watch = lambda num_bytes: nullcontext(sent.append(num_bytes))
        for exchange in (
            group.all_reduce,
            lambda x: group.all_gather(x, 1),
            lambda x: group.reduce_scatter(x, 1),
        ):
            exchange(rows(group))
        return sent

    assert on_ranks(3, on_rank) == [[48 * 2 * 2 // 3, 48 * 2, 48 * 2 // 3]] * 3


class Overtaken:
    """An exchange that ends just after a poll has timed out: with `error`, or successfully."""

    def __init__(self, error: str | None) -> None:
        self.error = error

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> "Overtaken":
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self, look: timedelta | None = None) -> bool:
        if look is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def test_exchange_that_ends_as_a_poll_times_out_succeeds() -> None:
    (group,) = on_ranks(1, lambda group: group)
    group._group = Overtaken(None)
    assert group.all_reduce(torch.ones(2)).tolist() == [1, 1]


def test_exchange_that_fails_as_a_poll_times_out_raises_its_reason() -> None:
    (group,) = on_ranks(1, lambda group: group)
    group._group = Overtaken("Connection closed by peer")
    with pytest.raises(PeerLost, match="Connection closed by peer"):
        group.all_reduce(torch.ones(2))


def test_failure_elsewhere_ends_a_wait() -> None:
    """The other ranks are alive but will not take part; a rank learns of it from the
    coordinator.
    """
    over = threading.Event()

    def on_rank(group: TensorGroup) -> None:
        if group.rank == 1:
            over.wait(8)
            return
        threading.Timer(0.1, group.fail, [RunAborted("rank 7 failed")]).start()
        with pytest.raises(RunAborted, match="rank 7 failed"):
            group.all_reduce(rows(group))
        over.set()

    on_ranks(2, on_rank)
    assert over.is_set()


def test_rank_that_is_silent_is_lost_after_the_timeout() -> None:
    over = threading.Event()

    def on_rank(group: TensorGroup) -> None:
        if group.rank == 1:
            over.wait(8)
            return
        with pytest.raises(PeerLost, match="lost the tensor-parallel group of ranks 0 to 1"):
            group.all_reduce(rows(group))
        over.set()

    on_ranks(2, on_rank, timeout_s=1)
    assert over.is_set()


def test_rank_that_leaves_is_a_lost_peer_to_the_others() -> None:
    opened = threading.Barrier(3)

    def on_rank(group: TensorGroup) -> None:
        opened.wait(20)
        if group.rank == 1:
            group.fail(SystemError("killed"))
            return
        with pytest.raises(
            PeerLost, match=r"rank \d lost the tensor-parallel group of ranks 0 to 2"
        ):
            group.all_reduce(rows(group))

    on_ranks(3, on_rank)
