"""Values that each section refuses."""

import pytest

from dpipe.config.load import build
from dpipe.errors import ConfigError

WITH_SERVER = {"kind": "parameter-server", "replicas": 2}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"data_parallel": {"replicas": 2}},
            "replicas is 2, but data_parallel.kind does not say how they agree",
        ),
        (
            {"data_parallel": {"kind": "sharded", "group": "torch"}},
            'group "torch" goes with data_parallel.kind "all-reduce".*not \'sharded\'',
        ),
        (
            {"model": {"width": 100, "num_heads": 3}},
            "model.width 100 must be a multiple of model.num_heads 3",
        ),
        *(
            (
                {"model": {"layers": name}},
                'model.layers must be one of "gpt", "bert", "replay", "package.module:function"',
            )
            for name in ("mine", ":", "mine:", ":layers", ".mine:layers")
        ),
        ({"pipeline": {"stages": 3, "stages_per_rank": 2}}, "stages 3 is not a multiple of"),
        (
            {"pipeline": {"stages": 2, "split": [3]}},
            "split lists 1 stages, but pipeline.stages is 2",
        ),
        (
            {"pipeline": {"stages": 4, "stages_per_rank": 2}},
            'above 1 goes with pipeline.schedule "gpipe", "interleaved" or "zb-v"',
        ),
        (
            {"pipeline": {"stages": 6, "stages_per_rank": 3, "schedule": "zb-v"}},
            '"zb-v" needs pipeline.stages_per_rank 2',
        ),
        (
            {"pipeline": {"stages": 4, "schedule": "interleaved"}},
            '"interleaved" needs pipeline.stages_per_rank above 1',
        ),
        (
            {"pipeline": {"schedule": "interleave"}},
            'pipeline.schedule must be one of "gpipe", .*, "auto", got \'interleave\'; '
            'did you mean "interleaved"',
        ),
        ({"node": {"tls_cert": "a.pem"}}, "go together"),
        (
            {"tensor_parallel": {"sequence_parallel": True}},
            "sequence_parallel needs tensor_parallel.size 2",
        ),
        (
            {"data_parallel": {"fragments": 2}},
            "go with data_parallel.kind \"local-sgd\", not 'none': leave them out",
        ),
    ],
)
def test_invalid_value_is_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(table)


@pytest.mark.parametrize("wait", ["join", "connect", "transfer", "heartbeat"])
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e12, 0, -1])
def test_wait_out_of_range_is_refused(wait: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=rf"^timeouts\.{wait}: Input should be [^\n]*$"):
        build({"timeouts": {wait: seconds}})


@pytest.mark.parametrize("folder", ["", "runs/" + "x" * 300, "runs/" + "ü" * 150, "a\0b"])
def test_invalid_folder_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.folder [^\0]*$"):
        build({"run": {"folder": folder}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay": True}, '"local-sgd", which has data_parallel.overlap instead'),
        (
            {"fragments": 5, "inner_steps": 4},
            "data_parallel.fragments is 5, but at most one is averaged at each",
        ),
    ],
)
def test_local_sgd_refuses_incompatible_keys(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"data_parallel": {"kind": "local-sgd", "replicas": 2, **settings}})


def test_one_address_of_a_server_may_be_a_string() -> None:
    assert build(
        {"data_parallel": {**WITH_SERVER, "address": "10.0.0.1:7100"}}
    ).data_parallel.address == ("10.0.0.1:7100",)


def test_half_parameters_need_half_precision() -> None:
    with pytest.raises(
        ConfigError, match="train.parameters 'bf16' computes in bf16, but train.precision is 'fp32'"
    ):
        build({"train": {"parameters": "bf16"}})
