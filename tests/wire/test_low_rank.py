import pytest
import torch

from dpipe.wire.codec import codec
from dpipe.wire.low_rank import LowRank
from dpipe.wire.spec import TensorSpec


def seeded(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error_of(coder: LowRank, tensor: torch.Tensor) -> float:
    arrived = coder.decode(coder.encode(tensor), TensorSpec.of(tensor))
    return float((arrived - tensor).norm() / tensor.norm())


def test_tensor_of_that_rank_arrives_within_bf16() -> None:
    tensor = (seeded(3, 20, 8) @ seeded(8, 64)) * 1e-6
    assert error_of(LowRank(8), tensor) < 0.01


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_error_is_never_longer_than_the_tensor(scale: float) -> None:
    assert error_of(LowRank(2), seeded(40, 64) * scale) <= 1.01


def test_warm_start_follows_directions_over_micro_batches() -> None:
    """Their spectrum falls slowly, so that one iteration from anywhere does not find them."""
    spectrum = torch.linspace(1, 0.2, 64) ** 2
    directions, _ = torch.linalg.qr(seeded(64, 64, seed=7))
    following = LowRank(8)
    errors = []
    for seed in range(10):
        tensor = (seeded(256, 64, seed=seed) * spectrum) @ directions
        errors.append(error_of(following, tensor))
    best = float(torch.linalg.svdvals(tensor)[8:].norm() / tensor.norm())
    assert errors[-1] < 1.05 * best
    assert following._directions is not None


@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf")])
def test_what_came_before_does_not_hide_what_comes(broken: float) -> None:
    coder = LowRank(4)
    coder.encode(torch.full((16, 32), broken))
    tensor = seeded(16, 4) @ seeded(4, 32)
    for _ in range(3):
        last = error_of(coder, tensor)
    assert last < 0.01


def test_tensor_that_is_not_finite_arrives_as_such() -> None:
    tensor = seeded(8, 16)
    tensor[3, 5] = float("nan")
    coder = codec("rank8")
    assert not coder.decode(coder.encode(tensor), TensorSpec.of(tensor)).isfinite().any()
