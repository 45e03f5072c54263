import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dpipe.bench import bench
from dpipe.cli.main import main
from dpipe.cli.measuring import BENCHMARKS
from dpipe.cli.options import MAX_WAIT_S
from dpipe.config.load import build


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def commands() -> list[str]:
    return sorted(main.list_commands(click.Context(main)))


def test_command_line_is_frozen(golden: Callable[[str, str], None]) -> None:
    texts = [run("--help").output, *(run(name, "--help").output for name in commands())]
    golden("cli_help.txt", "\n".join(texts))


@pytest.mark.parametrize("name", commands())
def test_help_shows_an_example(name: str) -> None:
    assert f"dpipe {name} " in run(name, "--help").output


def test_schedule_draws_the_grid() -> None:
    result = run("schedule", "gpipe", "--stages", "2", "--micro-batches", "2")
    assert result.exit_code == 0
    assert "1F1" in result.output


def test_schedule_prints_csv() -> None:
    result = run("schedule", "gpipe", "--stages", "2", "--micro-batches", "2", "--csv")
    assert result.output.split() == ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]


def test_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[train]\nstps = 5\n")
    result = run("simulate", str(config))
    assert result.exit_code == 2
    assert result.output == "dpipe: unknown key 'train.stps'; did you mean 'steps'?\n"


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e9", "0", "-1"])
def test_wait_beyond_the_clock_is_refused(seconds: str) -> None:
    result = run("train", "job.toml", "--timeout", seconds)
    assert result.exit_code == 2
    assert "Invalid value for '--timeout'" in result.output


@pytest.mark.parametrize("temperature", ["nan", "-1"])
def test_invalid_temperature_is_refused(temperature: str) -> None:
    result = run("generate", "run", "--prompt", "The", "--temperature", temperature)
    assert result.exit_code == 2
    assert "Invalid value for '--temperature'" in result.output


def test_wait_is_bounded_on_the_command_line_as_in_the_configuration() -> None:
    assert build({"timeouts": {"join": MAX_WAIT_S}}).timeouts.join == MAX_WAIT_S


def test_every_benchmark_has_a_name_on_the_command_line() -> None:
    assert set(BENCHMARKS) == set(bench._BENCHES)


GPIPE = ("schedule", "gpipe", "--stages", "2", "--micro-batches", "2")


def test_output_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    with open("/dev/full", "w") as full:
        words = (sys.executable, "-m", "dpipe", *GPIPE)
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr
        == "dpipe: cannot write to standard output: [Errno 28] No space left on device\n"
    )


def test_character_outside_the_terminals_encoding_is_replaced() -> None:
    """For example in generated text."""
    code = (
        "from dpipe.cli.main import main\n"
        "from dpipe.cli.options import show\n"
        "main.callback(); show('5 \u20ac')"
    )
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ
    )
    assert done.stdout == "5 ?\n", done.stderr


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in commands())])
def test_help_comes_fast_without_torch_and_pydantic(words: list[str]) -> None:
    code = (
        "import sys\n"
        "for slow in ('torch', 'pydantic', 'numpy', 'grpc', 'rich'): sys.modules[slow] = None\n"
        f"from dpipe.cli.main import main; main({words!r}, prog_name='dpipe')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: dpipe")


def test_simulate_answers_without_torch(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[pipeline]\nstages = 2\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from dpipe.cli.main import main; main(['simulate', {str(config)!r}, '--json'], "
        "prog_name='dpipe')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["step_s"] > 0
    assert row["peak_in_flight"] == [2, 1]


def test_simulate_uses_the_given_machines(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[pipeline]\nstages = 2\n")
    machines = tmp_path / "3.toml"
    machines.write_text('[[machine]]\nname = "a"\ndevices = 2\ngflops = 10\n')
    slower = run("simulate", str(config), "--machines", str(machines), "--json")
    plain = run("simulate", str(config), "--json")
    assert json.loads(slower.output)["step_s"] > json.loads(plain.output)["step_s"]
    gone = run("simulate", str(config), "--machines", str(tmp_path / "none.toml"))
    assert gone.exit_code == 2
    assert "none.toml does not exist" in gone.stderr


@pytest.mark.parametrize("command", ["train", "launch"])
def test_run_refuses_machines_that_are_too_few(command: str, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('[model]\nlayers = "replay"\n[pipeline]\nstages = 2\n')
    machines = tmp_path / "machines.toml"
    machines.write_text('[[machine]]\nname = "a"\n')
    flags = ["--rank", "0", "--world-size", "2", "--coordinator", "127.0.0.1:1"]
    flags = flags if command == "train" else []
    result = run(command, str(config), "--machines", str(machines), *flags)
    assert result.exit_code == 2
    assert "the run takes 2 places, but the machines of" in result.stderr


def test_simulate_uses_the_given_network(tmp_path: Path) -> None:
    config, slow = tmp_path / "job.toml", tmp_path / "slow.toml"
    config.write_text("[pipeline]\nstages = 2\n")
    slow.write_text('name = "slow"\ndelay_ms = 500\nbandwidth_gbps = 0.1\n')
    loopback, far = (
        json.loads(run("simulate", str(config), "--json", *flags).output)
        for flags in ((), ("--network", str(slow)))
    )
    assert far["network"] == "slow"
    assert far["step_s"] > loopback["step_s"] + 1.0
