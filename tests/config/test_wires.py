"""`pipeline.wire`: a name, "auto" or a table."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpipe.config import effective
from dpipe.config.load import Config, build, load, override
from dpipe.config.parallel import PipelineConfig
from dpipe.config.wires import wire_of
from dpipe.errors import ConfigError
from dpipe.toml import parse_toml
from dpipe.wire.format import HopFormats


def job(wire: Any, stages: int = 4, **pipeline: Any) -> Config:
    return build({"pipeline": {"stages": stages, "wire": wire, **pipeline}})


def test_name_is_for_all_links_both_ways() -> None:
    formats = job("bf16").pipeline.wire_formats
    assert formats == HopFormats(("bf16",) * 3, ("bf16",) * 3)


def test_table_has_directions_and_links_that_differ() -> None:
    table = {
        "forward": "int4",
        "backward": "int8",
        "links": {"1-2": "bf16", "2-3": {"backward": "int6+hadamard"}},
    }
    formats = job(table).pipeline.wire_formats
    assert formats == HopFormats(
        forward=("int4", "bf16", "int4"),
        backward=("int8", "bf16", "int6+hadamard"),
    )


def test_override_may_be_a_table() -> None:
    table: dict[str, Any] = {"pipeline": {"stages": 2}}
    override(table, 'pipeline.wire={forward = "int8", links = {"0-1" = {backward = "bf16"}}}')
    assert build(table).pipeline.wire_formats == HopFormats(("int8",), ("bf16",))


def test_what_is_left_out_is_sent_as_it_is() -> None:
    assert job({"forward": "int8"}, 2).pipeline.wire_formats == HopFormats(("int8",), ("none",))


def test_auto_is_left_to_the_forecast() -> None:
    assert job("auto", wire_allowed=["bf16"]).pipeline.wire_formats is None


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ("int5", 'pipeline.wire must be one of "none", .*"auto", .*got \'int5\''),
        ("int8+hadamard", 'the option "hadamard" does not go with "int8"'),
        ("int4+delta+feedback", 'leave all options but "delta" out'),
        ("e3m0+feedback", "pipeline.wire must be one of"),
        (5, "pipeline.wire must be the name of a format, or a table such as .*, got 5"),
        ({"forwards": "int8"}, "unknown key 'pipeline.wire.forwards'; a wire has forward"),
        ({"forward": "int5"}, "pipeline.wire.forward must be one of .*, got 'int5'"),
        ({"forward": "auto"}, "pipeline.wire.forward must be one of .*, got 'auto'"),
        ({"forward": 5}, "pipeline.wire.forward: Input should be a valid string, got 5"),
        ({"links": 5}, "pipeline.wire.links: .*got 5"),
        ({"links": {"0-1": 5}}, "pipeline.wire.links.0-1: .*got 5"),
        ({"links": {"3-4": "int8"}}, "pipeline.wire.links must be one of .*got '3-4'"),
        ({"links": {"1-0": "int8"}}, "pipeline.wire.links must be one of \"0-1\".*got '1-0'"),
        ("auto", 'pipeline.wire "auto" chooses among pipeline.wire_allowed: list there'),
    ],
)
def test_wire_that_is_none_is_refused_by_its_key(wire: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(wire)


def test_configuration_with_a_table_can_be_written_and_read(tmp_path: Any) -> None:
    config = job({"forward": "int8", "links": {"0-1": "bf16"}})
    path = tmp_path / "job.toml"
    path.write_text(effective.text(effective.settings(_written(config, tmp_path))))
    assert load(path).digest() == config.digest()
    assert load(config).digest() == config.digest()
    assert config.with_(train__steps=5).pipeline == config.pipeline


def _written(config: Config, folder: Any) -> str:
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    return str(path)


def test_name_is_shared_as_it_was_before_there_were_tables() -> None:
    assert job("bf16").shared()["pipeline.wire"] == "bf16"


names = st.sampled_from(["none", "bf16", "int8", "int4"])


@given(st.lists(st.tuples(names, names), max_size=6))
def test_formats_are_what_their_setting_means(pairs: list[tuple[str, str]]) -> None:
    formats = HopFormats(
        tuple(forward for forward, _ in pairs), tuple(backward for _, backward in pairs)
    )
    wire: Any = wire_of(formats)
    assert PipelineConfig(stages=len(pairs) + 1, wire=wire).wire_formats == formats


def test_setting_lists_only_links_that_differ() -> None:
    formats = HopFormats(("int8", "int8", "bf16"), ("bf16", "bf16", "bf16"))
    expected = 'wire = {forward = "int8", backward = "bf16", links = {"2-3" = "bf16"}}'
    assert {"wire": wire_of(formats)} == parse_toml(expected)
