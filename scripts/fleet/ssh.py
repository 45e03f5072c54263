"""OpenSSH's client as a function call, and the same on all machines at once.

The program rather than a library: ~/.ssh/config, agents, bastions and hardware keys work as they do
in the user's terminal, there is nothing to install, and a connection that hangs is a process that
can be killed. The first command opens a machine's connection, the others share it (ControlMaster),
so a round trip is all that they cost.
"""

import json
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeVar

from dpipe.errors import DpipeError, InputError, RunError
from fleet.hosts import Host

T = TypeVar("T")

CONNECT_S = 10
SILENT_S = 5  # between signs of life; three that are missing end a connection
COMMAND_S = 60.0
_FAILED = 255  # ssh's own exit status, where it is not the command's
_TAIL_LINES = 20


class HostRefused(InputError):  # noqa: N818 - what happened
    """A machine cannot do what is asked, or cannot be reached; nothing was changed on any."""


class Unreachable(HostRefused):
    """SSH to a machine has failed."""


class HostFailed(RunError):  # noqa: N818
    """Something has failed on a machine; the message names it and says what the machine said."""


class Machine:
    """A host and the connection to it. Used by several threads; each command is a process."""

    def __init__(self, host: Host, socket: Path) -> None:
        self.host = host
        self.socket = socket  # of the connection that its commands share
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(
        self, command: str, *, stdin: bytes | IO[bytes] = b"", timeout_s: float = COMMAND_S
    ) -> bytes:
        """What a shell command prints. Raises `Unreachable`, or `HostFailed` with the end of what
        it said.
        """
        with self.process(command) as process:
            try:
                said, complaint = process.communicate(
                    stdin if isinstance(stdin, bytes) else stdin.read(), timeout_s
                )
            except subprocess.TimeoutExpired:
                raise HostFailed(
                    f"host {self.host.name}: `{command}` has not ended after {timeout_s:g} s"
                ) from None
        self.check(process.returncode, command, said, complaint)
        return said

    def agent(self, verb: str, *, timeout_s: float = COMMAND_S, **spec: Any) -> Any:
        """The answer of the agent on the machine. Raises `HostRefused` where it refuses."""
        answer = json.loads(
            self.run(self.agent_command(verb), stdin=as_line(spec), timeout_s=timeout_s)
        )
        if "refused" in answer:
            raise HostRefused(f"host {self.host.name}: {answer['refused']}")
        return answer

    def agent_command(self, verb: str) -> str:
        """Its specification comes on standard input: a command line is seen by every user of the
        machine.
        """
        # -S: it needs no packages, and starts in two thirds of the time.
        return shlex.join(
            [self.host.interpreter, "-S", f"{self.host.source}/scripts/fleet/agent.py", verb]
        )

    @contextmanager
    def process(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command over pipes, killed at the end of the block. A session of its own keeps Ctrl-C
        ours.
        """
        pipe = subprocess.PIPE
        argv = [*self._ssh(), command]
        process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        with self._lock:
            self._running.add(process)
        with process:
            try:
                yield process
            finally:
                process.kill()
                with self._lock:
                    self._running.discard(process)

    def check(self, status: int, command: str, said: bytes, complaint: bytes) -> None:
        words = "\n".join(
            (said + complaint).decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        )
        if status == _FAILED:
            raise Unreachable(
                f"host {self.host.name} does not answer: "
                f"{complaint.decode(errors='replace').strip()}"
            )
        if status != 0:
            raise HostFailed(
                f"host {self.host.name}: `{_short(command)}` failed ({status}):\n{words}"
            )

    def kill(self) -> None:
        """End the commands under way, in whatever thread."""
        with self._lock:
            for process in self._running:
                process.kill()

    def disconnect(self) -> None:
        argv = [*self._ssh("-O", "exit")]
        subprocess.run(argv, capture_output=True, timeout=CONNECT_S, check=False)

    def _ssh(self, *words: str) -> list[str]:
        host = self.host
        options = [
            *host.ssh_options,  # first: ssh takes the first value it meets
            "BatchMode=yes",
            f"ConnectTimeout={CONNECT_S}",
            f"ServerAliveInterval={SILENT_S}",
            "ServerAliveCountMax=3",
            "StrictHostKeyChecking=accept-new",
            "LogLevel=ERROR",
            "ControlMaster=auto",
            f"ControlPath={self.socket}",
            "ControlPersist=60",
        ]
        given = ["-p", str(host.port)] if host.port else []
        given += ["-i", str(host.key.expanduser()), "-o", "IdentitiesOnly=yes"] if host.key else []
        where = host.address if host.user is None else f"{host.user}@{host.address}"
        return [
            "ssh",
            "-T",
            *(word for option in options for word in ("-o", option)),
            *given,
            *words,
            where,
        ]


@contextmanager
def connected(hosts: Sequence[Host]) -> Iterator[list[Machine]]:
    """The machines; their connections are closed at the end."""
    with TemporaryDirectory(prefix="dpipe-") as folder:
        machines = [Machine(host, Path(folder) / str(number)) for number, host in enumerate(hosts)]
        try:
            yield machines
        finally:
            with ThreadPoolExecutor(len(machines)) as pool:
                list(pool.map(Machine.disconnect, machines))


def each(machines: Sequence[Machine], action: Callable[[Machine], T]) -> list[T]:
    """Do the same on all machines at once; raises one error with a line for each where it
    failed.
    """
    with ThreadPoolExecutor(len(machines)) as pool:
        futures = [pool.submit(action, machine) for machine in machines]
        try:
            errors = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:
            for machine in machines:
                machine.kill()
            raise
    for error in errors:
        if not isinstance(error, DpipeError):
            raise error
    if errors:
        kind = HostRefused if all(isinstance(error, InputError) for error in errors) else HostFailed
        raise kind("\n".join(map(str, errors)))
    return [future.result() for future in futures]


def as_line(spec: dict[str, Any]) -> bytes:
    return json.dumps(spec).encode() + b"\n"


def _short(command: str) -> str:
    first, *more = command.strip().splitlines()
    return f"{first} ..." if more else first
