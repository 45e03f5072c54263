"""A foreign folder of a run: nothing is written through its links."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.report.trace import write_chrome
from dpipe.store.run_folder import open_folder

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
RunRanks = Callable[..., list[BaseException | None]]

NAMES = ["config.json", "config.tmp", "metrics.jsonl", "metrics.tmp", "run.json.tmp"]
NAMES += ["logs/rank-0.log", "logs/rank-1.log", "trace/plan.json", "trace/rank-0.json"]
FOLDERS = ["logs", "trace", "tensorboard"]


@pytest.fixture
def run(tiny: Make, losses: Losses, tmp_path: Path) -> Path:
    losses(tiny(train__decay="none", run__trace_steps=1))
    return tmp_path / "run"


@pytest.mark.parametrize("name", NAMES)
def test_file_that_is_a_link_is_not_written_through(
    tiny: Make, run: Path, run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    (error,) = run_ranks(tiny(train__decay="none", train__steps=5, run__trace_steps=1), resume=True)
    assert isinstance(error, ConfigError)
    assert f"{run / name} is a link" in str(error)
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_that_is_a_link_is_not_written_into(
    tiny: Make, run: Path, run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    if (run / name).exists():
        (run / name).rename(tmp_path / "aside")
    (run / name).symlink_to(tmp_path / "elsewhere")
    (error,) = run_ranks(tiny(train__decay="none", train__steps=5, run__trace_steps=1), resume=True)
    assert isinstance(error, ConfigError)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_log_that_is_a_pipe_is_not_waited_for(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "run/logs").mkdir(parents=True)
    os.mkfifo(tmp_path / "run/logs/rank-0.log")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_folder(tiny(), resume=False)


def test_trace_is_not_written_through_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (run / "trace.json").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"trace\.json is a link"):
        write_chrome(run)
    assert (tmp_path / "precious").read_text() == "mine"


def test_run_is_resumed_where_its_folder_is_reached_by_a_link(
    tiny: Make, run: Path, losses: Losses, tmp_path: Path
) -> None:
    (tmp_path / "alias").symlink_to(run)
    keys = {"run__folder": str(tmp_path / "alias"), "run__trace_steps": 1}
    losses(tiny(train__decay="none", train__steps=5, **keys), resume=True)
    assert write_chrome(tmp_path / "alias").exists()
