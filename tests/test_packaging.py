import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.small_job import TEXT, small_toml

from dpipe.cli.main import main

ROOT = Path(__file__).parents[1]


def test_source_distribution_has_what_its_build_compiles_and_its_users_name(tmp_path):
    """It was without protos, and `python -m build`, which makes the wheel of it, ended with
    "Missing input file."; without profiles, which commands of the documentation name; and
    without the pages that README links to.
    """
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("protos", "dpipe/wire", "dpipe/watch/page", "netem", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"], cwd=tmp_path, check=True, timeout=60
    )
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        names = {str(Path(*Path(name).parts[1:])) for name in packed.getnames()}
    wanted = [
        *(ROOT / "protos").rglob("*.proto"),
        *(ROOT / "netem/profiles").glob("*.toml"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/images").glob("*.png"),
        *(ROOT / "dpipe/watch/page").iterdir(),  # the wheel is made of the same list
    ]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names
    assert not [name for name in names if name.startswith("docs/generated")]


@pytest.mark.slow
def test_release_trains_outside_the_checkout(tmp_path):
    """As `python -m build` and pip make it, without a network: the wheel is made of the source
    distribution, and what it installs trains, writes its report, and has the lab's profiles. A
    wheel that was built where no protos had been compiled before lacked them.
    """
    source = copied_source(tmp_path)
    build(source, "sdist")
    (archive,) = (source / "dist").iterdir()
    # The standard library's way to unpack safely is not in Python 3.11.0 to 3.11.3.
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True, timeout=60)
    (unpacked,) = tmp_path.glob("dpipe-*")
    for name in (
        "scripts/demo",
        "scripts/quickstart.toml",
        "docs/first-run.md",
        "tests/security/decoders.py",  # which scripts/docs was without
    ):
        assert (unpacked / name).is_file()
    build(unpacked, "bdist_wheel")
    (wheel,) = (unpacked / "dist").glob("*.whl")
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "job.toml").write_text(small_toml(train={"steps": 2}, pipeline={"stages": 2}))

    def run(*argv):
        environ = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import dpipe; print(dpipe.__file__)").startswith(str(installed))
    run("-m", "dpipe", "launch", "job.toml")
    assert (tmp_path / "runs/run/report.html").is_file()
    profiles = "from importlib.resources import files; print(*files('netem.profiles').iterdir())"
    assert "10ms-1gbps.toml" in run("-c", profiles)


def copied_source(tmp_path):
    source = tmp_path / "source"
    leave_out = shutil.ignore_patterns("__pycache__", "*_pb2.py*", "generated")
    source.mkdir()
    for name in (
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "SECURITY.md",
    ):
        shutil.copy(ROOT / name, source)
    for folder in ("protos", "dpipe", "netem", "docs", "scripts", "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=leave_out)
    return source


@pytest.mark.daemon
@pytest.mark.timeout(600)
def test_wheel_runs_with_pipx_and_as_a_tool_of_uv(tmp_path):
    """As docs/install.md has it, with both programs and all dependencies from their registry."""
    source = copied_source(tmp_path)
    build(source, "bdist_wheel")
    (wheel,) = (source / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "tools"], check=True, timeout=100)
    programs = tmp_path / "tools/bin"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {
        "PIPX_HOME": str(tmp_path / "pipx"),
        "UV_TOOL_DIR": str(tmp_path / "uv"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "uv-bin"),
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),  # uv does not read pip's
    }
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "job.toml").write_text(small_toml(train={"steps": 2}, pipeline={"stages": 2}))

    def run(*argv):
        done = subprocess.run(
            argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(programs / "pip", "install", "--quiet", "pipx", "uv")
    assert "dpipe, version" in run(programs / "pipx", "run", "--spec", wheel, "dpipe", "--version")
    run(programs / "uv", "tool", "install", "--python", sys.executable, f"{wheel}[watch]")
    run(tmp_path / "uv-bin/dpipe", "launch", "job.toml")
    assert (tmp_path / "runs/run/report.html").is_file()


def build(folder, *command):
    """Without isolation: a build environment of its own would come from the network."""
    argv = [sys.executable, "setup.py", "-q", *command]
    subprocess.run(argv, cwd=folder, check=True, timeout=100, capture_output=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completes_commands(shell):
    """As docs/install.md sets it up."""
    script = CliRunner().invoke(main, prog_name="dpipe", env={"_DPIPE_COMPLETE": f"{shell}_source"})
    assert "_DPIPE_COMPLETE" in script.output
    asked = {
        "_DPIPE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "dpipe la",
        "COMP_CWORD": "la" if shell == "fish" else "1",  # fish gives the word itself
    }
    assert "launch" in CliRunner().invoke(main, prog_name="dpipe", env=asked).output


def test_installed_command_is_the_command_line():
    """It named a module that had become a package, and every call ended with a traceback."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["dpipe"].partition(":")
    assert getattr(import_module(module), function) is main
