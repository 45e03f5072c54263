import pytest
import torch

from dpipe.errors import ConfigError
from dpipe.wire.codec import codec
from dpipe.wire.format import FORMATS, INT_BLOCK, wire_bytes
from dpipe.wire.options import hadamard_matrix
from dpipe.wire.spec import TensorSpec

NAMES = ["int4+hadamard", "int4+feedback", "int8+feedback", "int3+hadamard+feedback"]


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def error_of(name: str, tensor: torch.Tensor) -> float:
    coder = codec(name)
    arrived = coder.decode(coder.encode(tensor), TensorSpec.of(tensor))
    return float((arrived - tensor).norm() / tensor.norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (3, INT_BLOCK + 1)], ids=str)
def test_option_changes_neither_shape_nor_size(name: str, shape: tuple[int, ...]) -> None:
    tensor = seeded(*shape)
    like = TensorSpec.of(tensor)
    wire = codec(name).encode(tensor)
    assert TensorSpec.of(wire) == codec(name).wire_spec(like)
    assert wire.nbytes == wire_bytes(name, tensor.numel())
    assert wire_bytes(name, 1000) == wire_bytes(name.partition("+")[0], 1000)
    assert TensorSpec.of(codec(name).decode(wire, like)) == like


@pytest.mark.parametrize("name", NAMES)
def test_integers_pass_as_they_are(name: str) -> None:
    tokens = torch.arange(10)
    assert torch.equal(codec(name).encode(tokens), tokens)
    assert torch.equal(codec(name).decode(tokens, TensorSpec.of(tokens)), tokens)
    assert codec(name).wire_spec(TensorSpec.of(tokens)) == TensorSpec.of(tokens)


def test_hadamard_matrix_is_its_own_inverse() -> None:
    matrix = hadamard_matrix(torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(INT_BLOCK))


def test_rotation_spreads_outliers_and_gains_nothing_without() -> None:
    plain = seeded(64, INT_BLOCK)
    outliers = plain.clone()
    outliers[:, 7] *= 100
    assert error_of("int4+hadamard", outliers) < 0.5 * error_of("int4", outliers)
    assert error_of("int4+hadamard", plain) == pytest.approx(error_of("int4", plain), rel=0.1)


def test_feedback_makes_the_mean_of_what_arrives_exact() -> None:
    """What is always rounded away without it: 0.1 between codes at 0 and 1 of a block."""
    tensor = torch.full((INT_BLOCK,), 0.1)
    tensor[0] = 0.0
    tensor[1] = 3.0
    like = TensorSpec.of(tensor)
    means = {}
    for name in ("int2", "int2+feedback"):
        coder = codec(name)
        arrived = [coder.decode(coder.encode(tensor), like) for _ in range(100)]
        means[name] = torch.stack(arrived).mean(dim=0)
    assert (means["int2"] - tensor).abs().max() > 0.09
    assert (means["int2+feedback"] - tensor).abs().max() < 0.02


def test_feedback_forgets_what_is_not_finite() -> None:
    coder = codec("int4+feedback")
    coder.encode(torch.full((INT_BLOCK,), float("nan")))
    ones = torch.ones(INT_BLOCK)
    arrived = coder.decode(coder.encode(ones), TensorSpec.of(ones))
    torch.testing.assert_close(arrived, ones, rtol=0.01, atol=0)


def test_evaluation_is_the_same_for_every_tensor() -> None:
    coder = codec("int2+feedback", remembers=False)
    tensor = seeded(INT_BLOCK)
    assert torch.equal(coder.encode(tensor), coder.encode(tensor))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4+hadamrd", "got 'hadamrd'; did you mean \"hadamard\""),
        ("int8+hadamard", 'option "hadamard" does not go with "int8"'),
        ("none+feedback", 'option "feedback" does not go with "none"'),
        ("int4+feedback+feedback", "names an option twice"),
        ("zip+feedback", "got 'zip'"),
    ],
)
def test_option_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec(name)
    assert name not in FORMATS


def test_name_with_options_is_no_format_between_replicas() -> None:
    assert FORMATS["int8"].between_replicas
    assert not FORMATS["int8+feedback"].between_replicas
