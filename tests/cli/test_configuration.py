"""`dpipe config`: the keys, and the configuration that a file results in."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpipe.cli.main import main
from dpipe.config import reference


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ("config", *words))


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 5\n")
    return str(path)


def test_keys_are_printed_with_their_types() -> None:
    result = run()
    assert result.exit_code == 0
    assert result.output == reference.text() + "\n"


def test_keys_are_printed_as_markdown() -> None:
    assert run("--markdown").output == reference.markdown() + "\n"


def test_keys_are_printed_as_json() -> None:
    assert json.loads(run("--json").output) == reference.as_json()


def test_file_is_printed_with_the_origin_of_each_value(job: str) -> None:
    result = run(job, "-o", "train.seed=7")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert {f"steps = 5 # {job}", "seed = 7 # override", "batch_size = 16 # default"} <= set(lines)
    assert tomllib.loads(result.output)["train"]["seed"] == 7


def test_file_is_printed_as_json(job: str) -> None:
    printed = json.loads(run(job, "--json").output)
    assert printed["train.steps"] == {"value": 5, "origin": job}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.toml"], "dpipe: configuration nowhere.toml does not exist\n"),
        (["JOB", "-o", "train.steps"], "dpipe: override 'train.steps' must look like section.key"),
        (["JOB", "-o", "train.stps=5"], "unknown key 'train.stps'; did you mean 'steps'?"),
        (["JOB", "-o", "train.steps=0"], "train.steps: Input should be greater than or equal to 1"),
        (["JOB", "--markdown"], "--markdown cannot be combined with CONFIG"),
        (["--markdown", "--json"], "--markdown cannot be combined with CONFIG or --json"),
        (["-o", "train.steps=5"], "-o overrides a key of a file: name CONFIG"),
    ],
)
def test_mistake_is_named_and_exit_code_2(words: list[str], message: str, job: str) -> None:
    result = run(*(job if word == "JOB" else word for word in words))
    assert result.exit_code == 2
    assert message in result.output


def test_config_command_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dpipe.cli.main import main; main(['config', '--markdown'], prog_name='dpipe')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "`train.steps`" in done.stdout
