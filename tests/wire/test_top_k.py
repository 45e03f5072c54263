import torch

from dpipe.wire.codec import codec
from dpipe.wire.format import KEPT_VALUES, TOP_BLOCK, wire_bytes
from dpipe.wire.spec import TensorSpec


def over_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    coder = codec("top16")
    return coder.decode(coder.encode(tensor), TensorSpec.of(tensor))


def test_largest_of_each_block_arrive_and_the_others_are_zero() -> None:
    blocks = torch.arange(1.0, TOP_BLOCK + 1).repeat(2, 1)
    blocks[1] = -blocks[1].flip(0)
    arrived = over_the_wire(blocks)
    assert (arrived != 0).sum(dim=1).tolist() == [KEPT_VALUES, KEPT_VALUES]
    assert torch.equal(arrived[0, -KEPT_VALUES:], blocks[0, -KEPT_VALUES:])
    assert torch.equal(arrived[1, :KEPT_VALUES], blocks[1, :KEPT_VALUES])


def test_it_takes_one_and_a_half_bits_a_value() -> None:
    assert wire_bytes("top16", 1 << 20) * 8 / (1 << 20) == 1.5


def test_nan_arrives() -> None:
    tensor = torch.ones(2 * TOP_BLOCK)
    tensor[5] = float("nan")
    assert over_the_wire(tensor)[:TOP_BLOCK].isnan().any()
    assert not over_the_wire(tensor)[TOP_BLOCK:].isnan().any()
