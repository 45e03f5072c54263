import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import import_module
from pathlib import Path

from dpipe.cli.main import main

ROOT = Path(__file__).parents[1]


def test_source_distribution_has_what_its_build_compiles_and_its_users_name(tmp_path):
    """It was without protos, and `python -m build`, which makes the wheel of it, ended with
    "Missing input file."; without profiles, which commands of the documentation name; and
    without the pages that README links to.
    """
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("protos", "dpipe/wire", "netem", "docs"):
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
    ]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names
    assert not [name for name in names if name.startswith("docs/generated")]


def test_installed_command_is_the_command_line():
    """It named a module that had become a package, and every call ended with a traceback."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["dpipe"].partition(":")
    assert getattr(import_module(module), function) is main
