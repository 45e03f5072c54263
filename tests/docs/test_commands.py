"""Every command in README and the docs exists, with its options and keys."""

import os
import re
import shlex
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import click
import make_reference
import pytest
from fleet.hosts import load_hosts
from pages import DOCS, NAMES, ROOT, blocks, commands, inline_code

from dpipe.config.load import Config, build, load
from dpipe.machines.hosts import load_hosts_network
from dpipe.machines.machine import LayerTime, Machine
from dpipe.network.profile import load_network
from dpipe.plan.forecast import forecast

SECTIONS = Config.model_fields
_KEY = re.compile(rf"\b({'|'.join(SECTIONS)})\.([a-z_]+)\b")
_FILES = ("toml", "json", "jsonl", "py", "md", "log")
# Programs that pages show and that are not ours; their options are theirs.
_OTHERS = (
    "pip",
    "sbatch",
    "ssh",
    "tensorboard",
    ".",
    "sky",
    "docker",
    "kubectl",
    "export",
    "pipx",
    "uv",
)


def words(command: str) -> list[str]:
    """A command without the environment, torchrun or srun in front of it."""
    arguments = shlex.split(command, comments=False)
    while arguments and re.match(r"[A-Z_]+=", arguments[0]):
        arguments = arguments[1:]
    if arguments[:1] == ["torchrun"]:
        arguments = ["dpipe", *arguments[arguments.index("dpipe") + 1 :]]
    if arguments[:1] == ["srun"]:
        arguments = arguments[1:]
    return arguments


def program(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The entry of `COMMANDS` and the arguments; None for any other program."""
    for name in make_reference.COMMANDS:
        length = len(name.split())
        if [" ".join(arguments[:length]).removeprefix("./")] == [name]:
            return name, arguments[length:]
    return None, arguments


def complaints(command: str) -> list[str]:
    """The mistakes of a command in the docs."""
    name, arguments = program(words(command))
    if name is None:
        return []
    command_: click.Command = make_reference.command(name)
    while isinstance(command_, click.Group) and arguments and not arguments[0].startswith("-"):
        if arguments[0] not in command_.commands:
            return [f"{name} has no command {arguments[0]!r}"]
        command_ = command_.commands[arguments[0]]
        arguments = arguments[1:]
    options = {option for parameter in command_.params for option in parameter.opts} | {
        "--help",
        "--version",
    }
    wrong = [
        f"{command}: no option {a}" for a in arguments if a.startswith("-") and a not in options
    ]
    overrides = [b for a, b in pairwise(arguments) if a == "-o"]
    return wrong + [problem for text in overrides if (problem := override_problem(text))]


def override_problem(text: str) -> str | None:
    key = text.partition("=")[0]
    section, _, name = key.partition(".")
    if section not in SECTIONS or name not in SECTIONS[section].annotation.model_fields:
        return f"-o {text}: no key {key}"
    return None


def shown(name: str) -> list[str]:
    return [part.strip() for line in commands(ROOT / name) for part in line.split(";")]


@pytest.mark.parametrize("name", NAMES)
def test_command_exists_with_the_options_that_are_shown(name: str) -> None:
    all_complaints = []
    for command in shown(name):
        try:
            all_complaints += complaints(command)
        except ValueError:  # inline code with a single quotation mark is not a command
            assert not command.startswith(("dpipe ", "scripts/")), command
    assert not all_complaints, all_complaints


@pytest.mark.parametrize("name", NAMES)
def test_first_word_of_a_shell_line_is_known(name: str) -> None:
    for block_line in shell_lines(name):
        arguments = words(block_line)
        is_known = (
            program(arguments)[0] or arguments[0] in _OTHERS or (ROOT / arguments[0]).is_file()
        )
        assert is_known or arguments[:2] == ["python", "-m"], block_line


def test_script_that_begins_with_its_program_can_be_executed() -> None:
    """`scripts/sweep.py` could not: every page that names it shows it as a command."""
    scripts = [path for path in (ROOT / "scripts").glob("*") if path.is_file()]
    begun = [path for path in scripts if path.read_bytes().startswith(b"#!")]
    assert len(begun) > 20
    assert all(os.access(path, os.X_OK) for path in begun)


def shell_lines(name: str) -> list[str]:
    inline = set(inline_code(ROOT / name))
    return [line for line in commands(ROOT / name) if line not in inline]


@pytest.mark.parametrize("name", NAMES)
def test_configuration_key_that_is_named_exists(name: str) -> None:
    for code in inline_code(ROOT / name):
        for section, key in _KEY.findall(code):
            keys = SECTIONS[section].annotation.model_fields
            assert key in keys or key in _FILES or key[0].isupper(), f"{name}: {code}"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("dpipe tran job.toml", "dpipe has no command 'tran'"),
        ("dpipe train job.toml --rnk 0", "dpipe train job.toml --rnk 0: no option --rnk"),
        (
            "torchrun --nproc-per-node 4 -m dpipe train job.toml -o train.step=1",
            "no key train.step",
        ),
        ("./scripts/cluster run job.toml --detached", "no option --detached"),
        ("python -m netem lab upp", "has no command 'upp'"),
    ],
)
def test_check_finds_a_command_that_does_not_exist(command: str, complaint: str) -> None:
    (only_complaint,) = complaints(command)
    assert complaint in only_complaint


@pytest.mark.parametrize("name", NAMES)
def test_configuration_that_is_shown_can_be_loaded(name: str, tmp_path: Path) -> None:
    for block in blocks(ROOT / name, "toml"):
        if block.file == "job.toml":
            (tmp_path / "job.toml").write_text(block.text, encoding="utf-8")
            load(tmp_path / "job.toml")


def test_network_profile_that_is_shown_can_be_loaded(tmp_path: Path) -> None:
    (profile,) = [b for b in blocks(DOCS / "networks.md", "toml") if b.file == "slow.toml"]
    (tmp_path / "slow.toml").write_text(profile.text, encoding="utf-8")
    assert load_network(tmp_path / "slow.toml").link(1, 0).delay_ms == 50


def test_file_of_machines_that_is_shown_can_be_used(tmp_path: Path) -> None:
    """Every key that there is stands in it, and a job runs on its machines."""
    (shown,) = [b for b in blocks(DOCS / "networks.md", "toml") if b.file == "machines.toml"]
    path = tmp_path / "machines.toml"
    path.write_text(shown.text, encoding="utf-8")
    keys = {each.name for kind in (Machine, LayerTime) for each in fields(kind)}
    assert [key for key in keys - {"layers"} if f"\n{key} = " not in shown.text] == []
    assert len(load_hosts(path).hosts) == 3
    assert load_hosts_network(path).link(0, 2).bandwidth_gbps < 0.11
    predict = {"machines": str(path)}
    pipeline = {"stages": 4, "schedule": "zero-bubble", "split": [2, 2, 1, 1]}
    (costs,) = forecast(build({"predict": predict, "pipeline": pipeline})).costs
    assert costs.forward_us[:2] == pytest.approx((200 + 3100, 2 * 3100))


def test_hosts_file_that_is_shown_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/cloud.pem").touch()
    (hosts,) = [block for block in blocks(DOCS / "machines.md", "toml") if block.file]
    (tmp_path / "hosts.toml").write_text(hosts.text, encoding="utf-8")
    assert len(load_hosts(tmp_path / "hosts.toml").hosts) == 2
