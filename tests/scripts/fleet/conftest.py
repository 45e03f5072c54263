"""Machines to log in to: an OpenSSH server on loopback, and a small project in place of dpipe's."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from click.testing import CliRunner, Result
from fleet import cluster as commands
from fleet import ssh
from fleet.ec2 import ssh_answers

from dpipe.processes.launch import free_port

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"

DPIPE = """
# Does in place of training what play.py beside the project says.
import os, signal, sys, time
from pathlib import Path

rank = int(os.environ["DPIPE_RANK"])
folder = Path(next(w for w in sys.argv if "run.folder=" in w).split('"')[1])
print("starts", *sys.argv[1:])
exec(Path("play.py").read_text())
"""
NETEM = """
import sys, time
from pathlib import Path

words = sys.argv[1:]
with open("../netem.log", "a") as log:
    print(*words, file=log)
if Path("../refuse").exists() and words[0] == "apply":
    sys.exit("netem: refused by the kernel")
if words[0] == "answer":
    print("answering on port 7990", flush=True)
    time.sleep(60)
if words[0] == "verify":
    off = "round trip, ms     asked 20 observed 40 OFF"
    print(off if Path("../off").exists() else "round trip, ms  ok")
    sys.exit(Path("../off").exists())
"""
SETUP = """#!/bin/sh
set -eu
mkdir -p .venv/bin
test ! -e broken || { echo "no such package" >&2; exit 1; }
printf '#!/bin/sh\\nexec %s "$@"\\n' "$PYTHON" >.venv/bin/python
chmod +x .venv/bin/python
"""


@dataclass
class Sshd:
    """One server process; `within` runs it on a host of a lab."""

    process: subprocess.Popen[bytes]

    def cut_all(self) -> None:
        """End every connection, like a brief failure of the network."""
        for child in psutil.Process(self.process.pid).children():
            child.kill()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@dataclass(frozen=True)
class Keys:
    folder: Path

    @property
    def lines(self) -> str:
        """Their lines in a hosts file."""
        options = [
            f"UserKnownHostsFile={self.folder}/known",
            "KexAlgorithms=curve25519-sha256",
        ]  # the default is slow
        return f'key = "{self.folder}/user"\nssh_options = {options}\n'

    def serve(
        self, port: int, addresses: Sequence[str], within: Sequence[str] = (), path: str = ""
    ) -> Sshd:
        """Start a server; `path` is put before the PATH of its commands."""
        options = {
            "HostKey": f"{self.folder}/host",
            "AuthorizedKeysFile": f"{self.folder}/user.pub",
            "Port": port,
            "PidFile": "none",
            "StrictModes": "no",
            "UseDNS": "no",
            **({"SetEnv": f"PATH={path}:{os.environ['PATH']}"} if path else {}),
        }
        given = [f"-o{key}={value}" for key, value in options.items()]
        given += [f"-oListenAddress={address}" for address in addresses]
        sshd = [
            str(shutil.which("sshd")),
            "-D",
            "-f",
            "/dev/null",
            "-E",
            f"{self.folder}/log",
            *given,
        ]
        return Sshd(subprocess.Popen([*within, *sshd]))


@pytest.fixture(scope="session")
def keys(tmp_path_factory) -> Keys:
    if os.environ.get("DPIPE_NO_LAB") == "1":
        pytest.skip("DPIPE_NO_LAB=1: no OpenSSH server is started")
    if not shutil.which("sshd"):
        pytest.fail(
            "these tests need openssh-server: run scripts/apt-lab as root, or set DPIPE_NO_LAB=1 "
            "to go without"
        )
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists, as root
    folder = tmp_path_factory.mktemp("keys")
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
            timeout=20,
        )
    return Keys(folder)


@pytest.fixture(scope="session")
def sshd(keys) -> Iterator[tuple[Sshd, int]]:
    port = free_port()
    server = keys.serve(port, ["127.0.0.1", "127.0.0.2"])
    deadline = time.monotonic() + 20
    while not ssh_answers("127.0.0.2", port) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield server, port
    server.stop()


def git(repository: Path, *words: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    argv = ["git", "-C", str(repository), *who, *words]
    return subprocess.run(
        argv, check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()


@dataclass
class Cloud:
    """Two machines, 127.0.0.1 and 127.0.0.2, that share a disk but not a folder, and what is
    installed on them.
    """

    sshd: Sshd
    port: int
    keys: Keys
    repository: Path
    root: Path

    def folder(self, number: int) -> Path:
        return self.root / f"host{number}"

    def write_hosts(
        self, *more: str, slots: int = 1, top: str = "", name: str = "hosts.toml"
    ) -> Path:
        blocks = [
            f'[[host]]\naddress = "127.0.0.{n + 1}"\nport = {self.port}\nslots = {slots}\nfolder = '
            f'"{self.folder(n)}"\n'
            for n in range(2)
        ]
        path = self.root / name
        path.write_text(
            f'python = "{sys.executable}"\n{top}{self.keys.lines}{"".join(blocks)}{"".join(more)}'
        )
        return path

    def __call__(self, *words: str | Path, hosts: Path | None = None) -> Result:
        """A command of scripts/cluster."""
        name, *more = map(str, words)
        given = ["--hosts", str(hosts or self.root / "hosts.toml")]
        return CliRunner().invoke(commands.main, [name, *given, *more])

    def play(self, text: str) -> None:
        """Set what the ranks do instead of training."""
        (self.root / "play.py").write_text(text)
        for number in range(2):
            shutil.copy(self.root / "play.py", self.folder(number) / "src")

    def run(self, *words: str, ranks: int = 2) -> Result:
        job = self.root / "job.toml"
        job.write_text(f"[pipeline]\nstages = {ranks}\n")
        return self("run", job, *words)

    def change(self, files: dict[str, str]) -> str:
        """A new commit, in which a file without text is gone; returns it."""
        for name, text in files.items():
            (self.repository / name).parent.mkdir(parents=True, exist_ok=True)
            (self.repository / name).write_text(text)
            if not text:
                (self.repository / name).unlink()
        git(self.repository, "add", "--all")
        git(self.repository, "commit", "--quiet", "--message", "change")
        return git(self.repository, "rev-parse", "HEAD")


def new_cloud(sshd: tuple[Sshd, int], keys: Keys, root: Path) -> Cloud:
    repository = root / "repository"
    (repository / "scripts/fleet").mkdir(parents=True)
    git(repository, "init", "--quiet")
    (repository / "scripts/setup").write_text(SETUP)
    (repository / "scripts/setup").chmod(0o755)
    agent = (SCRIPTS / "fleet/agent.py").read_text()
    cloud = Cloud(*sshd, keys, repository, root)
    # Packages, not namespaces: those would lose to what is installed where the tests run.
    package = "# stands for the real one\n"
    cloud.change(
        {
            "dpipe/__init__.py": package,
            "dpipe/__main__.py": DPIPE,
            "netem/__init__.py": package,
            "netem/__main__.py": NETEM,
            "scripts/fleet/agent.py": agent,
        }
    )
    cloud.write_hosts()
    return cloud


def end_all_in(root: Path) -> None:
    """Kill all processes that were started there, including holders, and wait until nothing writes
    there any more.
    """
    ended = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(str(root)) or f"{root}/host" in " ".join(process.cmdline()):
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=10)


@pytest.fixture(scope="session")
def sockets(sshd) -> Iterator[None]:
    """Connections are shared between commands, because opening one takes longer than most tests."""
    with TemporaryDirectory(prefix="dpipe-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssh, "TemporaryDirectory", lambda prefix: nullcontext(folder))
        patch.setattr(ssh.Machine, "disconnect", lambda machine: None)
        yield
        sshd[0].cut_all()


@pytest.fixture
def bare(sshd, keys, sockets, tmp_path, monkeypatch) -> Iterator[Cloud]:
    """Machines on which nothing is installed."""
    cloud = new_cloud(sshd, keys, tmp_path)
    monkeypatch.setattr(commands, "REPOSITORY", cloud.repository)
    yield cloud
    end_all_in(tmp_path)


@pytest.fixture
def fresh(bare) -> Cloud:
    """Machines of this test alone, on which it is installed."""
    assert (done := bare("up")).exit_code == 0, done.output
    return bare


@pytest.fixture(scope="session")
def installed(sshd, keys, sockets, tmp_path_factory) -> Cloud:
    cloud = new_cloud(sshd, keys, tmp_path_factory.mktemp("cloud"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "REPOSITORY", cloud.repository)
        assert (done := cloud("up")).exit_code == 0, done.output
    return cloud


@pytest.fixture
def cloud(installed) -> Iterator[Cloud]:
    """Machines on which it is installed, and nothing has run. They are shared: change nothing
    else.
    """
    yield installed
    end_all_in(installed.root)
    for number in range(2):
        for path in installed.folder(number).iterdir():
            if path.name in ("cluster", "netem.log", "shaped", "refuse", "off"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(installed.folder(number) / "src/runs", ignore_errors=True)


@pytest.fixture
def command_lines() -> Callable[[], list[list[str]]]:
    """Of every process of this machine, as any user can read them."""

    def read() -> list[list[str]]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended since
                found.append(path.read_bytes().decode(errors="replace").split("\0"))
        return found

    return read


@pytest.fixture
def later() -> Iterator[Callable[[Callable[[], bool], Callable[[], object]], None]]:
    """`later(when, what)`: does something once a condition holds, while the test waits in a
    command.
    """
    threads: list[threading.Thread] = []

    def wait(when: Callable[[], bool], what: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not when() and time.monotonic() < deadline:
            time.sleep(0.05)
        what()

    def start(when: Callable[[], bool], what: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=wait, args=(when, what)))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
