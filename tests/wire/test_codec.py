import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpipe.errors import ConfigError
from dpipe.wire.codec import codec
from dpipe.wire.format import FORMATS, INT8_BLOCK, MessageSize, wire_bytes
from dpipe.wire.spec import TensorSpec

NAMES = [
    *("none", "bf16", "fp16", "int8", "int6", "int4", "int3", "int2"),
    *("top16", "rank32", "rank8", "e3m0", "top64"),
]
SHAPES = [(), (0,), (3, 0), (1,), (INT8_BLOCK,), (INT8_BLOCK + 1,), (3, 5, 100)]
INF, NAN = float("inf"), float("nan")


def over_the_wire(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return codec(name).decode(codec(name).encode(tensor), TensorSpec.of(tensor))


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codec_keeps_shape_and_dtype_and_says_what_is_on_the_wire(name, shape, dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    like = TensorSpec.of(tensor)
    wire = codec(name).encode(tensor)
    assert TensorSpec.of(wire) == codec(name).wire_spec(like)
    assert wire.is_contiguous()
    assert TensorSpec.of(codec(name).decode(wire, like)) == like


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_size_on_the_wire_is_what_the_simulator_counts(name, shape) -> None:
    like = TensorSpec(shape, torch.float32)
    size = MessageSize(((shape, 4),))
    assert codec(name).wire_spec(like).num_bytes == size.gradient_bytes(name)
    if FORMATS[name].matrix_bytes is None:
        assert size.gradient_bytes(name) == wire_bytes(name, like.num_bytes // 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integer_tensor_is_sent_unchanged(name, dtype) -> None:
    tensor = torch.tensor([[0, 1], [2, 300]]).to(dtype)
    assert torch.equal(codec(name).encode(tensor), tensor)
    assert torch.equal(over_the_wire(name, tensor), tensor)


@pytest.mark.parametrize("name", NAMES)
def test_encode_makes_a_transposed_tensor_contiguous(name) -> None:
    tensor = torch.arange(6.0).view(2, 3).t().requires_grad_()
    wire = codec(name).encode(tensor)
    assert wire.is_contiguous()
    assert not wire.requires_grad
    expected = tensor.detach()
    atol = {"int6": 1.0, "int4": 1.0, "int3": 1.0, "int2": 1.0, "e3m0": 1.0, "top64": 5.0}
    torch.testing.assert_close(
        over_the_wire(name, tensor), expected, atol=atol.get(name, 0.02), rtol=0
    )


def test_none_changes_no_bit() -> None:
    tensor = values(1e-45, 3.4e38, INF, -0.0)
    assert torch.equal(over_the_wire("none", tensor), tensor)


@pytest.mark.parametrize(
    ("name", "relative", "absolute"),
    [("bf16", 2**-8, 2**-134), ("fp16", 2**-11, 2**-25)],
    ids=["bf16", "fp16"],
)
@given(x=st.floats(-60000, 60000, width=32))
def test_rounding_keeps_its_bound(name, relative, absolute, x) -> None:
    error = abs(over_the_wire(name, values(x)).double().item() - values(x).double().item())
    assert error <= max(abs(x) * relative, absolute)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=2 * INT8_BLOCK + 3)
)
def test_int8_keeps_its_bound_in_every_block(numbers) -> None:
    tensor = values(*numbers)
    error = (over_the_wire("int8", tensor).double() - tensor.double()).abs()
    for start in range(0, len(numbers), INT8_BLOCK):
        block = slice(start, start + INT8_BLOCK)
        bound = tensor[block].abs().max().item() / 254 * (1 + 2**-14)  # computed in fp32
        assert error[block].max().item() <= max(bound, 1.5e-36)


def test_int8_scales_each_block_by_itself() -> None:
    tensor = torch.cat([torch.full((INT8_BLOCK,), 1000.0), torch.full((INT8_BLOCK,), 0.001)])
    torch.testing.assert_close(over_the_wire("int8", tensor), tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "sent", "arrives"),
    [
        ("int8", (0.0, 0.0, -0.0), (0.0, 0.0, 0.0)),
        ("int8", (1e-45, -1e-40, 0.0), (0.0, 0.0, 0.0)),
        ("int8", (1.0, INF, 2.0), (NAN, NAN, NAN)),
        ("int8", (1.0, NAN, 2.0), (NAN, NAN, NAN)),
        ("int8", (127.0, -127.0, 1.0), (127.0, -127.0, 1.0)),
        ("fp16", (70000.0, -INF, NAN), (INF, -INF, NAN)),
        ("bf16", (1.0, INF, NAN), (1.0, INF, NAN)),
    ],
)
def test_edge_cases_are_defined(name, sent, arrives) -> None:
    torch.testing.assert_close(
        over_the_wire(name, values(*sent)), values(*arrives), rtol=0, atol=0, equal_nan=True
    )


def test_int8_not_finite_block_leaves_the_others_alone() -> None:
    tensor = torch.ones(3 * INT8_BLOCK)
    tensor[INT8_BLOCK] = INF
    finite = over_the_wire("int8", tensor).view(3, -1).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]


def test_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'int5'; did you mean \"int"):
        codec("int5")
