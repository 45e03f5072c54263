"""A wire format that is declared outside dpipe is a value of `pipeline.wire`, and trains."""

from collections.abc import Callable, Iterator

import pytest
import torch
import toy_format

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import draft
from dpipe.wire.codec import codec
from dpipe.wire.format import FORMATS, wire_bytes
from dpipe.wire.spec import TensorSpec


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    toy_format.declare()
    yield
    FORMATS.remove("float8")


def test_format_declared_in_one_file_trains_two_stages(
    tiny: Callable[..., Config], losses: Callable[..., list[float]], tmp_path: object
) -> None:
    exact = losses(tiny(pipeline__stages=2, run__folder=f"{tmp_path}/exact"))
    rounded = losses(tiny(pipeline__stages=2, pipeline__wire="float8"))
    assert rounded != exact  # so it was used
    assert rounded == pytest.approx(exact, rel=0.02)


def test_prediction_counts_the_bytes_of_a_declared_format(tiny: Callable[..., Config]) -> None:
    like = TensorSpec((3, 5), torch.float32)
    assert codec("float8").wire_spec(like).num_bytes == wire_bytes("float8", 15) == 15
    plain = draft(tiny(pipeline__stages=2)).forecast.cost.activation_bytes
    rounded = draft(tiny(pipeline__stages=2, pipeline__wire="float8")).forecast.cost
    assert rounded.activation_bytes == tuple(size // 4 for size in plain)


def test_format_is_offered_only_where_it_says_so(tiny: Callable[..., Config]) -> None:
    offered = '"none", "bf16", "int8", "int6", "int4", "int3", "int2", "e3m0", "top64", got'
    with pytest.raises(ConfigError, match=f"data_parallel.wire must be one of {offered}"):
        tiny(data_parallel__wire="float8")
