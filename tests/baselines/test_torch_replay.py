"""Two ranks as processes: a step of torch's engine takes the time of its schedule on replay
stages.
"""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpipe.baselines.torch_replay import check_config, main
from dpipe.config.load import Config, build
from dpipe.errors import ConfigError
from dpipe.plan.forecast import forecast
from dpipe.processes.launch import launch
from dpipe.report.metrics import read_rows

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


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])  # of torch itself, and by CSV
def test_step_takes_the_time_of_its_waits(schedule: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(FILE)
    overrides = [f"run.folder={tmp_path / 'run'}", f"pipeline.schedule={schedule}"]
    given = [word for override in overrides for word in ("-o", override)]
    argv = [
        sys.executable,
        "-m",
        "dpipe.baselines.torch_replay",
        str(tmp_path / "job.toml"),
        *given,
    ]
    said: list[str] = []
    assert (
        launch(lambda rank: argv, 2, logs=tmp_path / "logs", on_line=said.append, timeout_s=90) == 0
    ), said
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1]
    predicted_s = forecast(a_config(pipeline__schedule=schedule)).step_us / 1e6
    assert predicted_s - 0.005 <= rows[1]["step_s"] < 2 * predicted_s


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__layers": "gpt"}, 'model.layers must be "replay"'),
        ({"pipeline__wire": "bf16"}, 'pipeline.wire must be "none"'),
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
