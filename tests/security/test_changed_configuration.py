"""A run is not silently resumed as a different one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dpipe
from dpipe.cli.main import main
from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.report.metrics import read_rows
from dpipe.run.start import launch_ranks
from dpipe.store.run_folder import refuse_changes

Make = Callable[..., Config]
Losses = Callable[..., list[float]]

ANOTHER_RUN = [
    ("train.seed", 1),
    ("train.batch_size", 16),
    ("train.learning_rate", 0.5),
    ("train.decay", "none"),
    ("data.held_out", 0.2),
    ("model.num_layers", 3),
]


@pytest.fixture
def run(tiny: Make, losses: Losses, tmp_path: Path) -> Path:
    losses(tiny())
    return tmp_path / "run"


def override(key: str, value: Any) -> dict[str, Any]:
    return {key.replace(".", "__"): value}


@pytest.mark.parametrize(("key", "value"), ANOTHER_RUN)
def test_resume_with_keys_of_another_run_is_refused(
    tiny: Make, run: Path, key: str, value: Any
) -> None:
    """It was resumed silently."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    config = tiny(train__steps=5, **override(key, value))
    with pytest.raises(ConfigError, match=rf"run is a run of another configuration: {key} was "):
        dpipe.train(config, resume=run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_change_that_is_named_is_made_and_logged(tiny: Make, run: Path) -> None:
    config = tiny(train__steps=5, train__seed=1, train__learning_rate=0.5)
    with pytest.raises(ConfigError, match=r"another configuration: train\.seed was 0 and is 1; le"):
        dpipe.train(config, resume=run, change=["train.learning_rate"])
    dpipe.train(config, resume=run, change=["train.learning_rate", "train.seed"])
    assert len(read_rows(run)) == 5
    log = (run / "logs/rank-0.log").read_text()
    assert "resumed with another configuration: train.seed was 0 and is 1" in log
    assert "train.steps was 3 and is 5" in log
    # from now on it is the run's configuration
    dpipe.train(config.with_(train__steps=6), resume=run)


@pytest.mark.parametrize(
    "change",
    [
        {"train__steps": 9, "pipeline__stages": 2},
        {"data_parallel__replicas": 2, "data_parallel__kind": "all-reduce"},
        {"transport__kind": "tcp", "run__keep": 5, "run__log_every": 2, "timeouts__join": 9.0},
        {"data__cache": "elsewhere", "node__threads": 2},
    ],
    ids=["cut", "replicas", "transport", "places"],
)
def test_keys_without_effect_on_training_may_differ(
    tiny: Make, run: Path, change: dict[str, Any]
) -> None:
    refuse_changes(tiny(**change), ())


def test_unknown_key_is_named(tiny: Make, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"--change train\.sead: there is no such key"):
        dpipe.train(tiny(train__steps=5), resume=run, change=["train.sead"])


def test_launcher_refuses_before_it_starts_a_rank(tiny: Make, run: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    table = tiny(train__seed=1).model_dump(mode="json", exclude_unset=True)
    job.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"train\.seed was 0 and is 1"):
        launch_ranks(str(job), (), num_ranks=None, resume=str(run), fallback=False, say=print)


@pytest.mark.usefixtures("warm_ranks")
def test_command_line_passes_it_to_every_rank(tiny: Make, run: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    table = tiny(train__seed=1, train__steps=5).model_dump(mode="json", exclude_unset=True)
    job.write_text(json.dumps(table))
    arguments = ["launch", str(job), "--resume", str(run)]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert "--change KEY" in refused.output
    done = CliRunner().invoke(main, [*arguments, "--change", "train.seed"])
    assert done.exit_code == 0, done.output
    assert len(read_rows(run)) == 5


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"train": 1}', ""])
def test_configuration_that_cannot_be_compared_is_named(tiny: Make, run: Path, text: str) -> None:
    (run / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="delete it to resume without comparing"):
        dpipe.train(tiny(train__steps=5), resume=run)


def test_keys_of_an_earlier_version_are_not_compared(tiny: Make, run: Path) -> None:
    table = json.loads((run / "config.json").read_text())
    del table["train"]["seed"]
    table["train"]["sead"] = 7
    (run / "config.json").write_text(json.dumps(table))
    refuse_changes(tiny(train__seed=1), ())
