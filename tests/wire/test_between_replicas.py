"""Formats that only replicas use: powers of two, and the largest values alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpipe.wire.codec import codec
from dpipe.wire.format import EXPONENT_BLOCK, SPARSE_BLOCK, SPARSE_KEPT, wire_bytes
from dpipe.wire.spec import TensorSpec


def over_the_wire(name: str, tensor: torch.Tensor) -> torch.Tensor:
    coder = codec(name)
    return coder.decode(coder.encode(tensor), TensorSpec.of(tensor))


@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=2 * EXPONENT_BLOCK + 3
    )
)
def test_powers_of_two_keep_their_bound_in_every_block(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers)
    error = (over_the_wire("e3m0", tensor) - tensor).abs()
    for start in range(0, len(numbers), EXPONENT_BLOCK):
        block = slice(start, start + EXPONENT_BLOCK)
        sizes = tensor[block].abs()
        near_zero = sizes.max().item() / 128 * 1.01  # and the rounding of a scale to bf16
        bound = (sizes / 2.9).clamp(min=max(near_zero, 2.0**-119))
        assert (error[block] <= bound).all()


def test_powers_of_two_arrive_as_they_are() -> None:
    powers = torch.tensor([1.0, -1.0, 0.5, -0.25, 2.0**-6, 0.0])
    assert torch.equal(over_the_wire("e3m0", powers), powers)


def test_value_between_two_powers_goes_to_the_nearer() -> None:
    sent = torch.tensor([1.0, 0.74, 0.76, -0.37, -0.38])
    arrives = torch.tensor([1.0, 0.5, 1.0, -0.25, -0.5])
    assert torch.equal(over_the_wire("e3m0", sent), arrives)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["e3m0", "top64"])
def test_value_that_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    tensor = torch.ones(2 * SPARSE_BLOCK)
    tensor[5] = bad
    arrived = over_the_wire(name, tensor)
    assert not arrived[:SPARSE_BLOCK].isfinite().all()
    assert arrived[SPARSE_BLOCK:].isfinite().all()


def test_largest_values_arrive_with_their_signs_in_their_places() -> None:
    tensor = torch.randn(3 * SPARSE_BLOCK, generator=torch.Generator().manual_seed(0))
    arrived = over_the_wire("top64", tensor).view(3, -1)
    blocks = tensor.view(3, -1)
    largest = blocks.abs().topk(SPARSE_KEPT).indices
    kept = torch.zeros_like(blocks).scatter(1, largest, blocks.gather(1, largest))
    assert torch.equal(arrived.sign(), kept.sign())
    # Within a group sizes differ little: most of what is kept arrives.
    assert (arrived - kept).norm() < 0.1 * kept.norm()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_sparse_error_is_at_most_what_was_sent(scale: float) -> None:
    tensor = scale * torch.randn(SPARSE_BLOCK + 100, dtype=torch.float64)
    error = over_the_wire("top64", tensor.float()).double() - tensor
    assert error.norm() <= 1.01 * tensor.norm()


@pytest.mark.parametrize(("name", "bits"), [("e3m0", 4.125), ("top64", 0.21875)])
def test_bits_of_a_value(name: str, bits: float) -> None:
    num_values = 1 << 20
    assert wire_bytes(name, num_values) * 8 / num_values == bits
