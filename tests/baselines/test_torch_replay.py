"""Two ranks as processes: a step of torch's engine takes the time of its schedule on replay
stages.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from dpipe.baselines.torch_replay import check_config, main
from dpipe.config.load import Config, build
from dpipe.errors import ConfigError
from dpipe.plan.forecast import forecast
from dpipe.processes.launch import launch
from dpipe.report.metrics import read_rows
from dpipe.schedule.generate import zb_v

TABLE = {
    "model": {"layers": "replay"},
    "replay": {"forward_ms": 10, "backward_ms": 20, "message_bytes": 4000},
    "train": {"steps": 2, "batch_size": 6, "num_microbatches": 6},
    "pipeline": {"stages": 2, "schedule": "gpipe"},
}
FILE = """
    model.layers = "replay"
    replay = { forward_ms = 10, backward_ms = 20, message_bytes = 4000 }
    train = { steps = 2, batch_size = 6, num_microbatches = 6 }
    pipeline = { stages = 2 }
"""


def a_config(**overrides: object) -> Config:
    return build(TABLE).with_(**overrides)


def launched_rows(overrides: Sequence[str], python: str, tmp_path: Path) -> list[dict[str, float]]:
    """Of a run that is started as a user starts it."""
    (tmp_path / "job.toml").write_text(FILE)
    given = [word for override in overrides for word in ("-o", override)]
    argv = [
        python,
        "-m",
        "dpipe.baselines.torch_replay",
        str(tmp_path / "job.toml"),
        *given,
    ]
    said: list[str] = []
    assert (
        launch(lambda rank: argv, 2, logs=tmp_path / "logs", on_line=said.append, timeout_s=90) == 0
    ), said
    return read_rows(tmp_path / "run")


@pytest.mark.waits
@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("gpipe", 1), ("zero-bubble", 1), ("zb-v", 2)],  # of torch, and by CSV
)
def test_step_takes_the_time_of_its_waits(
    schedule: str, per_rank: int, warm_python: str, tmp_path: Path
) -> None:
    changes: dict[str, object] = {
        "pipeline.stages": 2 * per_rank,
        "pipeline.stages_per_rank": per_rank,
        "pipeline.schedule": schedule,
        "run.folder": str(tmp_path / "run"),
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    rows = launched_rows(overrides, warm_python, tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    config = a_config(**{key.replace(".", "__"): value for key, value in changes.items()})
    predicted_s = forecast(config).step_us / 1e6
    assert predicted_s - 0.005 <= rows[1]["step_s"] < 2 * predicted_s


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__layers": "gpt"}, 'model.layers must be "replay"'),
        ({"pipeline__wire": "bf16"}, 'pipeline.wire must be "none"'),
        ({"pipeline__sequence_slices": 2}, "pipeline.sequence_slices must be 1"),
        ({"pipeline__stages": 1}, "pipeline.ranks must be above 1"),
        (
            {
                "data_parallel__replicas": 2,
                "data_parallel__kind": "all-reduce",
                "train__batch_size": 12,
            },
            "data_parallel.replicas must be 1",
        ),
        (
            {"transport__shape": "slow.toml"},
            "transport.shape must be left out, its network is gloo's",
        ),
    ],
)
def test_unsupported_configuration_is_refused_for_torch_replay(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(a_config(**overrides))


def test_refusal_ends_with_2_and_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(FILE)
    overrides = ["-o", f"run.folder={tmp_path / 'run'}", "-o", "pipeline.wire=bf16"]
    place = {"DPIPE_RANK": "0", "DPIPE_WORLD_SIZE": "2", "DPIPE_COORDINATOR": "127.0.0.1:7000"}
    result = CliRunner(env=place).invoke(main, [str(tmp_path / "job.toml"), *overrides])
    assert result.exit_code == 2
    assert "pipeline.wire must be" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 12])
def test_zb_v_is_torch_s(ranks: int, microbatches: int) -> None:
    theirs = ScheduleZBVZeroBubble.__new__(ScheduleZBVZeroBubble)
    theirs.pp_group_size = ranks
    theirs.num_stages = 2 * ranks
    theirs._n_microbatches = microbatches
    for rank, program in enumerate(zb_v(2 * ranks, microbatches).programs):
        actions = theirs._calculate_single_rank_operations(rank)
        assert [str(action) for action in actions if action] == [*map(str, program)]
