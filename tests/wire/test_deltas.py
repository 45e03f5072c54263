"""Two ends of a link that remember, by sample, what has crossed it.

sender --encode--> bytes --decode--> receiver
cache                                cache
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpipe.errors import ConfigError, RunError
from dpipe.wire.codec import codec
from dpipe.wire.deltas import Deltas, SampleCache, cache_bytes
from dpipe.wire.format import FORMATS, INT_BLOCK, OPTIONS, wire_bytes
from dpipe.wire.spec import TensorSpec

SHAPE = (5, 2 * INT_BLOCK)  # of a sample's activation
NUM_SAMPLES = 6
FORMATS_WITH_DELTA = ["int8+delta", "int4+delta", "int3+delta", "top16+delta"]


class Link:
    """Both ends, with the bytes of the last message."""

    def __init__(self, name: str, folder: Path, shape: tuple[int, ...] = SHAPE) -> None:
        self.codec = codec(name)
        assert isinstance(self.codec, Deltas)
        self.sender = SampleCache(NUM_SAMPLES, shape, folder)
        self.receiver = SampleCache(NUM_SAMPLES, shape, folder)
        self.num_bytes = 0

    def send(self, samples: list[int], tensor: Tensor) -> Tensor:
        """What arrives."""
        assert isinstance(self.codec, Deltas)
        like = TensorSpec.of(tensor)
        receives = self.codec.visit(samples, self.receiver)
        expected = receives.wire_spec(like)
        wire = self.codec.visit(samples, self.sender).encode(tensor)
        assert TensorSpec.of(wire) == expected
        self.num_bytes = wire.nbytes
        return receives.decode(wire, like)

    def kept(self, cache: SampleCache) -> Tensor:
        rows = torch.empty(NUM_SAMPLES, *SHAPE)
        for sample, row in enumerate(rows):
            cache.read(sample, row)
        return rows


def seeded(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS_WITH_DELTA)
def test_both_ends_keep_the_same_bits_over_many_visits(name: str, tmp_path: Path) -> None:
    link = Link(name, tmp_path)
    activations = seeded(NUM_SAMPLES, *SHAPE)
    for epoch in range(4):
        activations += 0.1 * seeded(NUM_SAMPLES, *SHAPE, seed=epoch)
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for samples in order.view(3, 2).tolist():
            arrived = link.send(samples, activations[samples])
            assert torch.equal(arrived, link.kept(link.sender)[samples])
    assert torch.equal(link.kept(link.sender), link.kept(link.receiver))


def test_first_visit_is_in_bf16_and_later_ones_in_the_format(tmp_path: Path) -> None:
    link = Link("int4+delta", tmp_path)
    tensor = seeded(2, *SHAPE)
    num_values = tensor[0].numel()
    assert torch.equal(link.send([0, 3], tensor), tensor.bfloat16().float())
    assert link.num_bytes == 2 * num_values * 2
    link.send([3, 4], tensor)
    assert link.num_bytes == wire_bytes("int4+delta", num_values) + num_values * 2
    link.send([4, 0], tensor)
    assert link.num_bytes == 2 * wire_bytes("int4", num_values)


@pytest.mark.parametrize(("name", "steps"), [("int8+delta", 254), ("int4+delta", 30)])
def test_error_is_that_of_the_change_and_of_bf16(name: str, steps: int, tmp_path: Path) -> None:
    """A hundredth of what the format alone would do to the whole value."""
    link = Link(name, tmp_path)
    before = link.send([2], seeded(1, *SHAPE))
    now = before + 0.01 * seeded(1, *SHAPE, seed=2)
    arrived = link.send([2], now)
    change = (now - before).view(-1, INT_BLOCK)
    largest = change.abs().amax(dim=1, keepdim=True)
    spread = change.amax(dim=1, keepdim=True) - change.amin(dim=1, keepdim=True)
    of_format = (1.01 * torch.maximum(spread, 2 * largest) / steps).expand_as(change)
    bound = of_format.reshape(now.shape) + arrived.abs() / 256 + 1e-6
    assert ((now - arrived).abs() <= bound).all()
    directly = codec(name.partition("+")[0])
    like = TensorSpec.of(now)
    error = (directly.decode(directly.encode(now), like) - now).norm()
    assert (now - arrived).norm() < (0.4 if steps == 254 else 0.05) * error


def test_sample_that_is_there_twice_changes_twice(tmp_path: Path) -> None:
    link = Link("int8+delta", tmp_path)
    tensor = seeded(2, *SHAPE)
    link.send([1, 1], tensor)
    assert link.num_bytes == wire_bytes("int8", SHAPE[0] * SHAPE[1]) + 2 * SHAPE[0] * SHAPE[1]
    torch.testing.assert_close(link.kept(link.receiver)[1], tensor[1], rtol=0.02, atol=0.02)


def test_value_that_is_not_finite_arrives_and_is_not_kept(tmp_path: Path) -> None:
    link = Link("int4+delta", tmp_path)
    tensor = seeded(1, *SHAPE)
    broken = tensor.clone()
    broken[0, 0, 0] = torch.inf
    assert link.send([0], broken).isinf().any()
    assert link.kept(link.receiver).isfinite().all()
    for _ in range(3):
        arrived = link.send([0], tensor)
    torch.testing.assert_close(arrived, tensor, rtol=0.02, atol=0.05)


def test_half_precision_arrives_as_it_was(tmp_path: Path) -> None:
    link = Link("int4+delta", tmp_path)
    tensor = seeded(1, *SHAPE).bfloat16()
    assert torch.equal(link.send([0], tensor), tensor)


def test_evaluation_sends_bf16_and_keeps_nothing() -> None:
    coder = codec("int3+delta", remembers=False)
    tensor = seeded(2, *SHAPE)
    like = TensorSpec.of(tensor)
    assert coder.wire_spec(like).dtype == torch.bfloat16
    assert torch.equal(coder.decode(coder.encode(tensor), like), tensor.bfloat16().float())
    tokens = torch.arange(10)
    assert torch.equal(coder.encode(tokens), tokens)


def test_file_has_no_name_and_begins_with_zeros(tmp_path: Path) -> None:
    cache = SampleCache(NUM_SAMPLES, SHAPE, tmp_path)
    assert not list(tmp_path.iterdir())
    row = torch.ones(SHAPE)
    cache.read(0, row)
    assert not row.any()
    assert cache_bytes(NUM_SAMPLES, SHAPE) == NUM_SAMPLES * row.numel() * 2


def test_disk_without_room_is_said_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RunError, match="has no room for the 7.68e-06 GB .*No space left on device"):
        SampleCache(NUM_SAMPLES, SHAPE, tmp_path)
    assert not list(tmp_path.iterdir())


def test_option_goes_with_what_packs_values_and_with_no_other_option() -> None:
    delta = OPTIONS.named("delta")
    taken = {form.name for form in FORMATS.values() if delta.goes_with(form)}
    assert taken == {"int8", "int6", "int4", "int3", "int2", "top16"}
    assert FORMATS.named("int4+delta").by_sample and FORMATS.named("int4+delta").remembers
    with pytest.raises(ConfigError, match='leave all options but "delta" out'):
        FORMATS.named("int4+hadamard+delta")
