"""The mean is summed in replica order, in whatever order chunks arrive."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpipe.errors import TransferError
from dpipe.paramserver.gradient_sum import GradientSum
from dpipe.paramserver.spec import FlatSpec, ParameterSpec

REPLICAS = 3
SPEC = FlatSpec(
    (ParameterSpec("layers.0.a", 0, 5, True), ParameterSpec("layers.0.b", 0, 4, False)),
    chunk_values=4,
)
PIECES = [(replica, chunk) for replica in range(REPLICAS) for chunk in range(SPEC.num_chunks)]


def gradients() -> list[torch.Tensor]:
    """Their magnitudes differ so much that another order of summation gives other bits."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(SPEC.length, generator=draw) * scale for scale in (1e4, 1.0, -1e4)]


def in_order() -> torch.Tensor:
    first, second, third = gradients()
    return (first + second + third) / REPLICAS


def filled(order: list[tuple[int, int]]) -> GradientSum:
    gradient, pushed = GradientSum(REPLICAS, SPEC.num_chunks, torch.zeros(SPEC.length)), gradients()
    for replica, chunk in order:
        gradient.add(replica, chunk, SPEC.chunk(chunk), pushed[replica][SPEC.chunk(chunk)].clone())
    return gradient


def test_another_order_of_summation_would_be_detected() -> None:
    first, second, third = gradients()
    assert not torch.equal((third + first + second) / REPLICAS, in_order())


@given(st.permutations(PIECES), st.lists(st.sampled_from(PIECES)))
def test_mean_is_the_same_whatever_the_order_and_however_often(
    order: list[tuple[int, int]], again: list[tuple[int, int]]
) -> None:
    gradient = filled([*order[:5], *again, *order[5:], *again])
    assert gradient.final
    assert torch.equal(gradient.average, in_order())


@given(st.sampled_from(PIECES))
def test_chunk_is_final_only_when_every_replica_has_pushed_it(missing: tuple[int, int]) -> None:
    gradient = filled([piece for piece in PIECES if piece != missing] * 2)
    assert [gradient.is_final(chunk) for chunk in range(SPEC.num_chunks)] == [
        c != missing[1] for c in range(3)
    ]
    assert not gradient.final


def test_gradient_whose_average_was_read_takes_no_more_chunks() -> None:
    gradient = filled([])
    gradient.set_average(torch.ones(SPEC.length))
    gradient.add(0, 0, SPEC.chunk(0), torch.zeros(4))
    assert gradient.final
    assert torch.equal(gradient.average, torch.ones(SPEC.length))


@pytest.mark.parametrize(
    ("replica", "chunk", "size"),
    [(3, 0, 4), (-1, 0, 4), (0, 3, 4), (0, -1, 4), (0, 0, 3), (0, 2, 4)],
)
def test_piece_that_does_not_fit_is_refused(replica: int, chunk: int, size: int) -> None:
    with pytest.raises(
        TransferError, match=f"replica {replica} pushed {size} values as chunk {chunk}"
    ):
        filled([]).add(replica, chunk, SPEC.chunk(chunk), torch.zeros(size))


def test_mean_so_far_is_of_the_pieces_that_are_in() -> None:
    """Both waiting and summed pieces count, and all of them once the chunk is final."""
    here, pushed, order = SPEC.chunk(1), gradients(), (2, 0, 1)
    for count in (1, 2, 3):
        gradient = filled([(replica, 1) for replica in order[:count]])
        assert [gradient.has(replica, 1) for replica in order] == [
            turn < count for turn in range(3)
        ]
        expected = torch.stack([pushed[replica][here] for replica in order[:count]]).mean(0)
        torch.testing.assert_close(gradient.so_far(1, here), expected, rtol=1e-5, atol=1e-2)
