"""`dpipe.train` and `dpipe.launch`: small real runs from Python."""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import dpipe
from dpipe.config.load import Config
from dpipe.errors import CheckpointError, ConfigError, InputError, RunError
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.toml import to_toml

Make = Callable[..., Config]


def as_file(config: Config, path: Path) -> Path:
    sections = config.model_dump(mode="json", exclude_defaults=True)
    path.write_text("\n".join(f"{name} = {to_toml(keys)}" for name, keys in sections.items()))
    return path


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder) if "loss" in row]


def test_train_runs_one_rank_and_passes_each_row(
    tiny: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows: list[Mapping[str, Any]] = []
    folder = dpipe.train(tiny(train__eval_every=2), on_row=rows.append)
    assert folder == tmp_path / "run"
    assert rows == read_rows(folder)
    assert [row["step"] for row in rows] == [0, 0, 1, 2, 2, 3]
    assert capfd.readouterr().out == ""


def test_train_shows_what_the_command_shows(tiny: Make, capfd: pytest.CaptureFixture[str]) -> None:
    dpipe.train(tiny(), show=True)
    shown = capfd.readouterr().out
    assert "step 3/3  loss" in shown
    assert "bits per byte" in shown


def test_train_reads_a_file_and_resumes(tiny: Make, tmp_path: Path) -> None:
    job = as_file(tiny(train__decay="none"), tmp_path / "job.toml")
    whole = losses(dpipe.train(job, overrides=[f"run.folder={tmp_path / 'whole'}"]))
    dpipe.train(job, overrides=["train.steps=2"])
    config = tiny(train__decay="none", run__folder="elsewhere")
    resumed = dpipe.train(config, resume=tmp_path / "run")
    assert resumed == tmp_path / "run"
    assert losses(resumed) == whole


def test_train_runs_ranks_that_join_each_other(tiny: Make, tmp_path: Path) -> None:
    alone = losses(dpipe.train(tiny(run__folder=str(tmp_path / "alone"))))
    config = tiny(pipeline__stages=2)
    address = f"127.0.0.1:{free_port()}"
    where = {"world_size": 2, "coordinator": address, "timeout_s": 60}
    second = threading.Thread(target=dpipe.train, args=(config,), kwargs={"rank": 1, **where})
    second.start()
    folder = dpipe.train(config, rank=0, **where)
    second.join(60)
    assert losses(folder) == alone


def test_train_refuses_what_can_be_fixed(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.steps: Input should be"):
        dpipe.train(tiny(), overrides=["train.steps=0"])
    with pytest.raises(ConfigError, match="1 processes were started, but .* need 2"):
        dpipe.train(tiny(pipeline__stages=2))
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        dpipe.train(tiny(), resume=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_error_of_a_callback_ends_the_run_and_is_raised(tiny: Make) -> None:
    def stop(row: Mapping[str, Any]) -> None:
        raise LookupError(f"seen {row['step']}")

    with pytest.raises(LookupError, match="seen 0"):
        dpipe.train(tiny(), on_row=stop)


@pytest.mark.usefixtures("warm_ranks")
def test_launch_runs_all_ranks_and_passes_each_row(
    tiny: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = losses(dpipe.train(tiny(run__folder=str(tmp_path / "alone"))))
    rows: list[Mapping[str, Any]] = []
    callers: set[str] = set()

    def on_row(row: Mapping[str, Any]) -> None:
        callers.add(threading.current_thread().name)
        rows.append(row)

    folder = dpipe.launch(tiny(pipeline__stages=2, node__token="secret"), on_row=on_row)
    assert folder == tmp_path / "run"
    assert rows == read_rows(folder)
    assert [row["loss"] for row in rows] == alone
    assert callers == {threading.current_thread().name}
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_launched_ranks_do_not_import_what_only_compiling_needs(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch._dynamo takes a third of the time in which a rank starts."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each import is a line on stderr
    log = dpipe.launch(tiny()) / "logs" / "rank-0.log"
    imported = {line.rpartition("|")[2].strip() for line in log.read_text().splitlines()}
    assert "torch.nn" in imported
    assert "torch._dynamo" not in imported


@pytest.mark.usefixtures("warm_ranks")
def test_launch_of_a_file_with_another_number_of_ranks(tiny: Make, tmp_path: Path) -> None:
    job = as_file(tiny(), tmp_path / "job.toml")
    folder = dpipe.launch(str(job), overrides=["train.steps=1"], num_ranks=2)
    assert json.loads((folder / "config.json").read_text())["pipeline"]["stages"] == 2
    assert len(losses(folder)) == 1
    dpipe.launch(str(job), overrides=["train.steps=2"], num_ranks=1, resume=folder)
    assert len(losses(folder)) == 2


def test_launch_works_in_a_script_without_a_main_guard(
    tiny: Make, warm_python: str, tmp_path: Path
) -> None:
    job = as_file(tiny(), tmp_path / "job.toml")
    script = tmp_path / "script.py"
    script.write_text(
        "import dpipe\n"
        f"config = dpipe.load({str(job)!r}, ('train.steps=2',))\n"
        "dpipe.launch(config, on_row=lambda row: print(row['step'], flush=True))\n"
    )
    done = subprocess.run([warm_python, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n1\n"


def test_launch_refuses_what_can_be_fixed_before_a_rank_starts(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not divide 3 processes"):
        dpipe.launch(tiny(tensor_parallel__size=2), num_ranks=3)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("warm_ranks")
def test_launch_raises_what_a_rank_could_not_use(tiny: Make, tmp_path: Path) -> None:
    """Only the rank can find out: another process uses the port of its links."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = tiny(pipeline__stages=2, node__port=taken.getsockname()[1])
        with pytest.raises(InputError, match=r"failed first, with exit code 2(.|\n)*cannot listen"):
            dpipe.launch(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("warm_ranks")
def test_launch_raises_what_ended_a_run(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(
        "from torch import nn\n"
        "class Failing(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if x.device.type != 'meta':  # where shapes are followed before the run\n"
        "            raise ArithmeticError('no more')\n"
        "        return super().forward(x)\n"
        "def layers(**sizes):\n"
        "    return [nn.Embedding(256, 8), Failing(8, 256)], nn.functional.cross_entropy\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"failed first, with exit code 1(.|\n)*no more"):
        dpipe.launch(tiny(model__layers="failing:layers", model__options={}))


@pytest.mark.usefixtures("warm_ranks")
def test_error_of_a_callback_kills_the_ranks_and_is_raised(tiny: Make, tmp_path: Path) -> None:
    def stop(row: Mapping[str, Any]) -> None:
        raise LookupError(f"seen {row['step']}")

    with pytest.raises(LookupError, match="seen 0"):
        dpipe.launch(tiny(train__steps=100_000), on_row=stop)
    assert len(losses(tmp_path / "run")) < 100_000


@pytest.mark.usefixtures("warm_ranks")
def test_signal_stops_a_launched_run_with_a_checkpoint(tiny: Make, tmp_path: Path) -> None:
    def stop(row: Mapping[str, Any]) -> None:
        if row["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    folder = dpipe.launch(tiny(train__steps=100_000), on_row=stop)
    assert list((folder / "checkpoints").glob("step-*"))
    assert len(losses(folder)) < 100_000
