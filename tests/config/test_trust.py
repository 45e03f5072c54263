"""Which code a configuration may name: decided by the place of its file, without importing it."""

import os
import sys
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from dpipe.config.trust import GROUP, refuse_untrusted
from dpipe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BOMB = "raise RuntimeError('this ran')"


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the working folder that can be imported from."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def package(folder: Path, name: str) -> Path:
    (folder / name / "inner").mkdir(parents=True)
    for file in ("__init__.py", "net.py", "inner/__init__.py", "inner/net.py"):
        (folder / name / file).write_text(BOMB)
    return folder / name


def allowed(layers: str) -> bool:
    try:
        refuse_untrusted(layers, trust_code=False)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("layers", ["gpt", "bert", "replay"])
def test_models_of_dpipe_are_allowed(working: Path, layers: str) -> None:
    refuse_untrusted(layers, trust_code=False)


@pytest.mark.parametrize(
    "layers",
    [
        "os:system",
        "os.path:join",
        "sys:exit",
        "builtins:exec",
        "subprocess:run",
        "torch:load",
        "torch.hub:load",
        "dpipe.processes.launch:launch",
    ],
)
def test_code_outside_the_working_folder_needs_trust(working: Path, layers: str) -> None:
    with pytest.raises(ConfigError, match=r"would run code that is .*add --trust-code"):
        refuse_untrusted(layers, trust_code=False)
    refuse_untrusted(layers, trust_code=True)


def test_working_folder_is_allowed_and_nothing_is_imported(working: Path) -> None:
    (working / "trust_module.py").write_text(BOMB)
    package(working, "trust_package")
    for name in ("trust_module", "trust_package.net", "trust_package.inner.net"):
        refuse_untrusted(f"{name}:layers", trust_code=False)
    assert not any(name.startswith("trust_") for name in sys.modules)


def test_folder_without_init_is_allowed_where_all_of_it_is_ours(
    working: Path, elsewhere: Path
) -> None:
    for folder in (working / "trust_space", working / "trust_shared", elsewhere / "trust_shared"):
        folder.mkdir()
        (folder / "net.py").write_text(BOMB)
    assert allowed("trust_space.net:layers")
    assert not allowed("trust_shared.net:layers")


def test_unknown_name_is_left_to_the_import(working: Path) -> None:
    assert allowed("trust_nowhere:layers")
    (working / "trust_alone.py").write_text(BOMB)
    assert allowed("trust_alone.nowhere:layers")


def test_other_places_need_trust(working: Path, elsewhere: Path) -> None:
    package(elsewhere, "trust_away")
    with pytest.raises(ConfigError, match=f"in {elsewhere}/trust_away/__init__.py"):
        refuse_untrusted("trust_away.inner.net:layers", trust_code=False)


def test_links_out_of_the_working_folder_need_trust(working: Path, elsewhere: Path) -> None:
    """The real path counts, even if the link itself is in the working folder."""
    (elsewhere / "evil.py").write_text(BOMB)
    (working / "trust_link.py").symlink_to(elsewhere / "evil.py")
    package(elsewhere, "evils")
    (working / "trust_linked").symlink_to(elsewhere / "evils")
    assert not allowed("trust_link:layers")
    assert not allowed("trust_linked.net:layers")


def test_working_folder_reached_by_a_link_is_the_working_folder(
    working: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working / "trust_by_link.py").write_text(BOMB)
    (tmp_path / "link").symlink_to(working)
    monkeypatch.chdir(tmp_path / "link")
    assert allowed("trust_by_link:layers")


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_package_installed_below_the_working_folder_needs_trust(
    working: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    installed = working / ".venv" / "lib" / name
    package(installed, "trust_installed")
    monkeypatch.syspath_prepend(installed)
    assert not allowed("trust_installed.net:layers")


def test_python_below_the_working_folder_needs_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert sysconfig.get_paths()["stdlib"].startswith("/")
    assert not allowed("subprocess:run")
    assert not allowed("torch.hub:load")


@pytest.mark.parametrize(
    "layers", ["netem.tc:commands", "dpipe.processes.launch:launch", "fleet.ssh:x"]
)
def test_code_of_a_dpipe_checkout_as_working_folder_needs_trust(
    monkeypatch: pytest.MonkeyPatch, layers: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    assert not allowed(layers)


def test_script_that_runs_is_judged_by_its_file(
    working: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = type(sys)("__main__")
    script.__spec__ = None
    script.__file__ = str(working / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert allowed("__main__:layers")
    script.__file__ = str(tmp_path / "script.py")
    assert not allowed("__main__:layers")
    del script.__file__
    assert not allowed("__main__:layers")


def test_package_that_declares_models_is_allowed_as_far_as_it_does(
    working: Path, elsewhere: Path
) -> None:
    for name in ("trust_open", "trust_opening", "trust_narrow", "trust_other"):
        package(elsewhere, name)
    about = elsewhere / "trust-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trust\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[{GROUP}]\nopen = trust_open\nnarrow = trust_narrow.net:layers\n"
        "[console_scripts]\nother = trust_other.net:main\n"
    )
    assert Distribution.at(about).entry_points
    assert allowed("trust_open:layers")
    assert allowed("trust_open.inner.net:layers")
    assert allowed("trust_narrow.net:layers")
    assert not allowed("trust_narrow.net:other")
    assert not allowed("trust_narrow:layers")
    assert not allowed("trust_other.net:main")
    assert not allowed("trust_opening.net:layers")


@pytest.mark.parametrize("name", ["a/b", "a\0b", "x" * 5000, "a..b", "\ud800"])
def test_name_that_cannot_be_a_module_is_left_to_the_import(working: Path, name: str) -> None:
    assert allowed(f"{name}:layers")
    assert os.listdir(working) == []
