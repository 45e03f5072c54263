"""Installs the project on every machine at one commit: a git archive over SSH, then scripts/setup.

    all answer? ── all meet the requirements? ──► on each: remove files that are no longer tracked,
       │ no            │ no                       unpack the archive, scripts/setup, write `commit`
       └───────────────┴──► nothing has changed on any machine

Untracked files stay: the environment, runs, data.
"""

import gzip
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpipe.errors import InputError
from fleet.ssh import HostRefused, Machine, each

SETUP_S = 1800.0
_LOCAL_S = 60.0
_BOOT_S = 300.0

Say = Callable[[Machine, str], None]

# Changes nothing. A machine that boots for the first time is given time to finish.
_REQUIREMENTS = """
if command -v cloud-init >/dev/null; then timeout {boot:g} cloud-init status --wait >/dev/null; fi
{python} -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    echo "needs Python 3.11 or newer, and {python} is not"
command -v tar >/dev/null && command -v gzip >/dev/null || echo "needs tar and gzip"
"""

_WRITE_COMMIT = """
echo {commit} >{folder}/commit
"""

_UNPACK = """set -eu
mkdir -p {source}
rm -f {folder}/commit
cd {source}
if [ -e ../tracked ]; then xargs -d '\\n' rm -f -- <../tracked; fi
tar -xzvf - >../tracked.all
grep -v '/$' ../tracked.all >../tracked
"""

_SETUP = """set -eu
(cd {source} && PYTHON={python} timeout {limit:g} scripts/setup {extras})
"""

# In the user's own environment nothing is installed: dpipe runs from its source, and only the
# protos are compiled.
_SETUP_SOURCE = """set -eu
python=$(realpath --no-symlinks {interpreter})
"$python" -c 'import grpc_tools' 2>/dev/null || {{
    echo "$python has no grpcio-tools to compile the protos: pip install grpcio-tools==1.85.1" >&2
    exit 1
}}
(
    cd {source}
    timeout {limit:g} "$python" -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. \\
        protos/dpipe/wire/v1/*.proto
    timeout {limit:g} "$python" -c 'import dpipe.run.build'
)
"""


@dataclass(frozen=True)
class Release:
    """The project's files at a commit."""

    commit: str
    archive: bytes

    @classmethod
    def of(cls, repository: Path, revision: str) -> "Release":
        """Raises `InputError` if git does not know the revision."""
        commit = (
            _git(repository, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
            .decode()
            .strip()
        )
        return cls(commit, gzip.compress(_git(repository, "archive", "--format=tar", commit), 6))


def uncommitted(repository: Path) -> list[str]:
    """Local changes that are not part of the commit, and so will not be on the hosts."""
    return _git(repository, "status", "--porcelain", "--untracked-files=no").decode().splitlines()


def _git(repository: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *words],
            capture_output=True,
            timeout=_LOCAL_S,
            check=False,
        )
    except FileNotFoundError:
        raise InputError(
            "git is not installed on this machine; it makes the archive that is sent to the hosts"
        ) from None
    if done.returncode != 0:
        raise InputError(f"git {words[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def install(
    machines: Sequence[Machine], release: Release, *, say: Say, limit_s: float = SETUP_S
) -> None:
    """Raises `HostRefused`, before anything has changed on any machine, if one does not answer,
    does not meet the requirements, or has a run going.
    """
    commits = each(machines, lambda machine: _check(machine, say))
    commit_of = dict(zip(machines, commits, strict=True))

    def bring_up_to_date(machine: Machine) -> None:
        if commit_of[machine] != release.commit:
            _install(machine, release, say, limit_s)
        say(machine, f"has {release.commit:.12}")

    each(machines, bring_up_to_date)


def installed(machine: Machine) -> str | None:
    """The commit that is completely installed on a machine; None if there is none."""
    interpreter, commit = (
        shlex.quote(path) for path in (machine.host.interpreter, f"{machine.host.folder}/commit")
    )
    return (
        machine.run(f"test ! -x {interpreter} || cat {commit} 2>/dev/null || true").decode().strip()
        or None
    )


def require_installed(machines: Sequence[Machine]) -> None:
    """Raises `HostRefused` unless all machines answer and have the same commit."""
    commits = dict(zip(machines, each(machines, installed), strict=True))
    if missing := [machine.host.name for machine, commit in commits.items() if commit is None]:
        raise HostRefused(f"nothing is installed on {', '.join(missing)}; run scripts/cluster up")
    if len(set(commits.values())) > 1:
        each_has = ", ".join(
            f"{machine.host.name} has {commit:.12}" for machine, commit in commits.items() if commit
        )
        raise HostRefused(f"the hosts have different commits: {each_has}; run scripts/cluster up")


def copy(machines: Sequence[Machine], archive: bytes) -> None:
    """Unpack a tar.gz beside the project's files on every machine."""
    each(
        machines,
        lambda machine: machine.run(
            f"tar -xzf - -C {shlex.quote(machine.host.source)}", stdin=archive
        ),
    )


def _check(machine: Machine, say: Say) -> str | None:
    """The commit that is installed. Raises `HostRefused` if another one cannot be."""
    say(machine, "checking")
    host = machine.host
    missing = machine.run(
        _REQUIREMENTS.format(python=shlex.quote(host.python), boot=_BOOT_S), timeout_s=_BOOT_S + 60
    )
    if missing and host.venv is None:
        raise HostRefused(
            f"host {host.name}: {missing.decode().strip()}; set python in the hosts file"
        )
    commit = installed(machine)
    if commit is not None:
        status: dict[str, Any] = machine.agent("status", run=None, lines=1)
        if any(rank["state"] == "running" for rank in status["ranks"].values()):
            raise HostRefused(
                f"host {host.name}: run {status['run']} is still going; scripts/cluster down stops "
                "it"
            )
    return commit


def _install(machine: Machine, release: Release, say: Say, limit_s: float) -> None:
    host = machine.host
    folder, source = shlex.quote(host.folder), shlex.quote(host.source)
    say(machine, "sending")
    machine.run(
        _UNPACK.format(folder=folder, source=source), stdin=release.archive, timeout_s=limit_s
    )
    say(machine, "setting up")
    script = (_SETUP if host.venv is None else _SETUP_SOURCE) + _WRITE_COMMIT
    command = script.format(
        source=source,
        limit=limit_s,
        python=shlex.quote(host.python),
        extras=shlex.quote(host.extras),
        interpreter=shlex.quote(host.interpreter),
        commit=release.commit,
        folder=folder,
    )
    machine.run(command, timeout_s=limit_s + 60)


def remove(machine: Machine) -> None:
    """Delete the folder on a machine, if it holds an installation."""
    folder = shlex.quote(machine.host.folder)
    machine.run(f"test ! -e {folder}/commit || rm -rf {folder}", timeout_s=SETUP_S)
