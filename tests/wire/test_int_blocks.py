import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpipe.wire.codec import codec
from dpipe.wire.format import INT_BLOCK, wire_bytes
from dpipe.wire.spec import TensorSpec

BITS = (6, 4, 3, 2)


def over_the_wire(name: str, tensor: torch.Tensor) -> torch.Tensor:
    coder = codec(name)
    return coder.decode(coder.encode(tensor), TensorSpec.of(tensor))


def bound(block: torch.Tensor, bits: int) -> float:
    """What the table of `codec.py` says of a block, with what fp32 adds."""
    lowest = block.min().item()
    highest = block.max().item()
    value_range = highest - lowest + 0.01 * max(abs(lowest), abs(highest))
    return max(1.01 * value_range / (2 * (2**bits - 1)), 1e-36)


@pytest.mark.parametrize("bits", BITS)
@given(
    numbers=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=2 * INT_BLOCK + 3
    )
)
def test_block_keeps_its_bound(bits: int, numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    error = (over_the_wire(f"int{bits}", tensor).double() - tensor.double()).abs()
    for start in range(0, len(numbers), INT_BLOCK):
        block = slice(start, start + INT_BLOCK)
        assert error[block].max().item() <= bound(tensor[block].double(), bits)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_is_used_and_arrives_where_it_was(bits: int) -> None:
    """Two blocks in which codes stand in another order."""
    codes = torch.arange(INT_BLOCK) * 2**bits // INT_BLOCK
    tensor = torch.cat([codes, codes.flip(0)]).float()
    arrived = over_the_wire(f"int{bits}", tensor)
    assert torch.equal(arrived.round(), tensor)


@pytest.mark.parametrize(
    ("name", "bits_a_value"), [("int6", 6.5), ("int4", 4.5), ("int3", 3.5), ("int2", 2.5)]
)
def test_overheads_are_half_a_bit_a_value(name: str, bits_a_value: float) -> None:
    assert wire_bytes(name, 1 << 20) * 8 / (1 << 20) == bits_a_value


@pytest.mark.parametrize("bits", BITS)
def test_block_that_is_not_finite_leaves_the_others_alone(bits: int) -> None:
    tensor = torch.linspace(-1, 1, 5 * INT_BLOCK)
    plain = over_the_wire(f"int{bits}", tensor).view(5, -1)
    tensor[INT_BLOCK + 3] = math.inf
    tensor[2 * INT_BLOCK] = math.nan
    tensor[3 * INT_BLOCK] = 3e38
    tensor[3 * INT_BLOCK + 1] = -3e38
    arrived = over_the_wire(f"int{bits}", tensor).view(5, -1)
    assert arrived.isnan().all(dim=1).tolist() == [False, True, True, True, False]
    assert torch.equal(arrived[[0, 4]], plain[[0, 4]])


@pytest.mark.parametrize("value", [0.0, 1e-45, 1000.0, -3.0e-30])
def test_constant_block_arrives_within_a_hundredth(value: float) -> None:
    tensor = torch.full((INT_BLOCK,), value)
    torch.testing.assert_close(over_the_wire("int2", tensor), tensor, rtol=0.01, atol=1e-36)


@pytest.mark.parametrize("name", ["int8", "int4", "int4+outlier"])
def test_what_is_done_in_parts_equals_what_is_done_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(10 * INT_BLOCK + 5, generator=torch.Generator().manual_seed(1))
    at_once = codec(name).encode(tensor)
    monkeypatch.setattr("dpipe.wire.packed._CHUNK", 2 * INT_BLOCK)
    assert torch.equal(codec(name).encode(tensor), at_once)
