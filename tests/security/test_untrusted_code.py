"""A foreign configuration or run does not run code that the reader has not approved."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dpipe
from dpipe.baselines import foreign
from dpipe.cli.main import main
from dpipe.config.load import Config
from dpipe.errors import ConfigError

Make = Callable[..., Config]

MODEL = (
    "from pathlib import Path\n"
    "from torch import nn\n"
    "from torch.nn.functional import cross_entropy\n"
    "def layers(mark):\n"
    "    Path(mark).touch()\n"
    "    return [nn.Embedding(256, 8), nn.Linear(8, 256)], loss\n"
    "def loss(outputs, targets):\n"
    "    return cross_entropy(outputs.flatten(0, 1), targets.flatten())\n"
)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that the stranger's code makes when it runs."""
    return tmp_path / "mark"


@pytest.fixture
def stranger(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: Path
) -> Callable[..., Path]:
    """A configuration of somebody else, whose model could be imported here and in the ranks."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "strangers_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(elsewhere)
    path = os.pathsep.join([str(elsewhere), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delitem(sys.modules, "strangers_model", raising=False)
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    model = {"layers": "strangers_model:layers", "options": {"mark": str(mark)}, "context": 16}

    def make(**overrides: Any) -> Path:
        table = tiny(**overrides).model_dump(mode="json", exclude_unset=True)
        job = tmp_path / "job.json"
        job.write_text(json.dumps({**table, "model": model}))
        return job

    return make


def invoke(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    return result.exit_code, result.output


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("command", ["train", "launch", "simulate"])
def test_command_runs_no_code_of_a_stranger(
    stranger: Callable[..., Path], mark: Path, tmp_path: Path, command: str
) -> None:
    code, said = invoke(command, stranger())
    assert code == 2
    assert "strangers_model.py: neither in the working folder" in said
    assert not mark.exists()
    assert not (tmp_path / "run").exists()
    assert invoke(command, stranger(), "--trust-code")[0] == 0
    assert mark.exists()


def test_shell_command_is_not_run(tiny: Make, tmp_path: Path) -> None:
    """It was: `os.system` is a function in a module."""
    job = tmp_path / "job.json"
    options = {"command": f"touch {tmp_path / 'owned'}"}
    job.write_text(json.dumps({"model": {"layers": "os:system", "options": options}}))
    for command in ("train", "launch", "simulate"):
        code, said = invoke(command, job)
        assert code == 2
        assert "code that is part of Python" in said
    assert not (tmp_path / "owned").exists()


def test_python_asks_for_trust_too(stranger: Callable[..., Path], mark: Path) -> None:
    job = stranger()
    for call in (dpipe.load, dpipe.train, dpipe.launch):
        with pytest.raises(ConfigError, match="trust_code=True"):
            call(job)
    config = dpipe.load(job, trust_code=True)
    with pytest.raises(ConfigError, match="trust_code=True"):
        dpipe.train(config)
    assert not mark.exists()
    dpipe.train(config, trust_code=True)
    assert mark.exists()


def test_other_engines_ask_for_trust_too(
    stranger: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error named a --trust-code that they did not have."""
    trained: list[Config] = []
    monkeypatch.setattr(foreign, "train_rank", lambda config, *rest: trained.append(config))
    monkeypatch.setattr(foreign, "process_info", lambda environment: None)
    engine = foreign.command("", lambda config: [], lambda *parts: None)
    refused = CliRunner().invoke(engine, [str(stranger())])
    assert (refused.exit_code, trained) == (2, [])
    assert "add --trust-code" in refused.output
    assert CliRunner().invoke(engine, [str(stranger()), "--trust-code"]).exit_code == 0
    assert len(trained) == 1


@pytest.mark.usefixtures("warm_ranks")
def test_run_of_a_stranger_is_not_used_without_trust(
    stranger: Callable[..., Path], mark: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    dpipe.train(stranger(), trust_code=True)
    mark.unlink()
    generate = ("generate", run, "--prompt", "The ", "--tokens", 2)
    resume = (run / "config.json", "-o", "train.steps=4", "--resume", run)
    for words in (generate, ("launch", *resume)):
        code, said = invoke(*words)
        assert code == 2
        assert "add --trust-code" in said
        assert not mark.exists()
        code, said = invoke(*words, "--trust-code")
        assert code == 0, said
        assert mark.exists()
        mark.unlink()


def test_trace_of_a_strangers_run_runs_nothing_of_it(
    stranger: Callable[..., Path], mark: Path, tmp_path: Path
) -> None:
    dpipe.train(stranger(run__trace_steps=1), trust_code=True)
    mark.unlink()
    assert invoke("trace", tmp_path / "run")[0] == 0
    assert invoke("config", tmp_path / "run/config.json")[0] == 0
    assert not mark.exists()
