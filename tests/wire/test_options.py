import pytest
import torch

from dpipe.errors import ConfigError
from dpipe.wire.codec import codec
from dpipe.wire.format import FORMATS, INT_BLOCK, wire_bytes
from dpipe.wire.options import hadamard_matrix
from dpipe.wire.spec import TensorSpec

BITS_MORE = {
    "int4+hadamard": 0,
    "int4+feedback": 0,
    "int8+feedback": 0,
    "int3+hadamard+feedback": 0,
    "int8+outlier": 0.375,
    "int4+hadamard+outlier": 0.375,
}
NAMES = list(BITS_MORE)


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def over_the_wire(name: str, tensor: torch.Tensor) -> torch.Tensor:
    coder = codec(name)
    return coder.decode(coder.encode(tensor), TensorSpec.of(tensor))


def error_of(name: str, tensor: torch.Tensor) -> float:
    return float((over_the_wire(name, tensor) - tensor).norm() / tensor.norm())


def bits_a_value(name: str) -> float:
    return wire_bytes(name, 1 << 20) * 8 / (1 << 20)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (3, INT_BLOCK + 1)], ids=str)
def test_option_changes_no_shape_and_has_the_size_that_is_said(
    name: str, shape: tuple[int, ...]
) -> None:
    tensor = seeded(*shape)
    like = TensorSpec.of(tensor)
    wire = codec(name).encode(tensor)
    assert TensorSpec.of(wire) == codec(name).wire_spec(like)
    assert wire.nbytes == wire_bytes(name, tensor.numel())
    assert TensorSpec.of(codec(name).decode(wire, like)) == like


@pytest.mark.parametrize(("name", "bits"), BITS_MORE.items())
def test_option_takes_so_many_bits_a_value(name: str, bits: float) -> None:
    plain = name.partition("+")[0]
    assert bits_a_value(name) == bits_a_value(plain) + bits


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


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("place", [0, 7, INT_BLOCK - 1])
def test_outlier_leaves_the_others_the_range_that_they_have_without_it(
    name: str, place: int
) -> None:
    plain = seeded(4, INT_BLOCK)
    tensor = plain.clone()
    tensor[:, place] = torch.tensor([1000.0, -1000.0, 30.0, -30.0])
    arrived = over_the_wire(f"{name}+outlier", tensor)
    torch.testing.assert_close(arrived[:, place], tensor[:, place], rtol=2**-8, atol=0)
    others = torch.arange(INT_BLOCK) != place
    errors = (arrived - tensor)[:, others].norm()
    assert errors < 1.2 * (over_the_wire(name, plain) - plain).norm()


def test_block_whose_values_are_alike_keeps_their_small_range_with_an_outlier() -> None:
    """A 0 in the outlier's place would widen it to 100."""
    tensor = 100 + seeded(INT_BLOCK)
    arrived = over_the_wire("int4+outlier", tensor)
    torch.testing.assert_close(arrived, tensor, rtol=0, atol=0.5)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_value_that_is_not_finite_is_an_outlier(value: float) -> None:
    tensor = seeded(INT_BLOCK)
    tensor[9] = value
    arrived = over_the_wire("int4+outlier", tensor)
    torch.testing.assert_close(arrived[9], tensor[9], equal_nan=True)
    assert int(arrived.isfinite().sum()) == INT_BLOCK - 1


def test_two_values_that_are_not_finite_do_not_arrive_as_numbers() -> None:
    tensor = seeded(INT_BLOCK)
    tensor[[9, 40]] = float("inf")
    assert not over_the_wire("int4+outlier", tensor)[[9, 40]].isfinite().any()


def test_any_bytes_from_another_machine_are_decoded_as_outliers() -> None:
    like = TensorSpec((3, INT_BLOCK), torch.float32)
    coder = codec("int4+outlier")
    wire = torch.full(coder.wire_spec(like).shape, 255, dtype=torch.uint8)
    assert TensorSpec.of(coder.decode(wire, like)) == like


@pytest.mark.parametrize("name", NAMES)
def test_encoding_changes_nothing_at_home(name: str) -> None:
    tensor = seeded(2, INT_BLOCK)
    before = tensor.clone()
    codec(name).encode(tensor)
    assert torch.equal(tensor, before)


def test_order_in_which_options_are_named_does_not_matter() -> None:
    tensor = seeded(8, INT_BLOCK)
    one = codec("int4+hadamard+outlier").encode(tensor)
    assert torch.equal(codec("int4+outlier+hadamard").encode(tensor), one)


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
        ("bf16+outlier", 'option "outlier" does not go with "bf16"'),
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
