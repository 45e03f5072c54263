"""Commands on one machine, or on all at once, through OpenSSH's client.

It is the program and not a library, so ~/.ssh/config, agents, bastions and hardware keys work as in
the user's terminal, nothing has to be installed, and a connection that hangs is a process that can
be killed. The first command opens a connection and the others share it (ControlMaster), so each
costs one round trip.
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
SILENT_S = 5  # between keepalives; a connection ends when three are missing
COMMAND_S = 60.0
_FAILED = 255  # the exit status of ssh when ssh itself has failed, and not the command
_TAIL_LINES = 20


class HostRefused(InputError):  # noqa: N818 - what happened
    """A machine is not reachable or cannot do what is asked; nothing has changed on any machine."""


class Unreachable(HostRefused):
    """SSH to a machine has failed."""


class HostFailed(RunError):  # noqa: N818
    """A command has failed on a machine; the message has the end of its output."""


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
        """What a shell command prints. Raises `Unreachable`, or `HostFailed` with the end of the
        output.
        """
        with self.process(command) as process:
            try:
                output, errors_output = process.communicate(
                    stdin if isinstance(stdin, bytes) else stdin.read(), timeout_s
                )
            except subprocess.TimeoutExpired:
                raise HostFailed(
                    f"host {self.host.name}: `{command}` has not ended after {timeout_s:g} s"
                ) from None
        self.check(process.returncode, command, output, errors_output)
        return output

    def agent(self, verb: str, *, timeout_s: float = COMMAND_S, **spec: Any) -> Any:
        """The answer of the agent on the machine. Raises `HostRefused` if it refuses."""
        answer = json.loads(
            self.run(self.agent_command(verb), stdin=as_line(spec), timeout_s=timeout_s)
        )
        if "refused" in answer:
            raise HostRefused(f"host {self.host.name}: {answer['refused']}")
        return answer

    def agent_command(self, verb: str) -> str:
        """The specification goes to its standard input, because every user of a machine can read a
        command line.
        """
        # -S: it needs no packages, and starts in two thirds of the time without them.
        return shlex.join(
            [self.host.interpreter, "-S", f"{self.host.source}/scripts/fleet/agent.py", verb]
        )

    @contextmanager
    def process(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A command over pipes, killed at the end of the block. It has a session of its own, so
        that Ctrl-C reaches only us.
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

    def check(self, status: int, command: str, output: bytes, errors_output: bytes) -> None:
        tail = "\n".join(
            (output + errors_output).decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        )
        if status == _FAILED:
            raise Unreachable(
                f"host {self.host.name} does not answer: "
                f"{errors_output.decode(errors='replace').strip()}"
            )
        if status != 0:
            raise HostFailed(
                f"host {self.host.name}: `{_short(command)}` failed ({status}):\n{tail}"
            )

    def kill(self) -> None:
        """Kill the commands of all threads."""
        with self._lock:
            for process in self._running:
                process.kill()

    def disconnect(self) -> None:
        argv = [*self._ssh("-O", "exit")]
        subprocess.run(argv, capture_output=True, timeout=CONNECT_S, check=False)

    def _ssh(self, *words: str) -> list[str]:
        host = self.host
        options = [
            *host.ssh_options,  # first, because ssh uses the first value of an option
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
        login = ["-p", str(host.port)] if host.port else []
        login += ["-i", str(host.key.expanduser()), "-o", "IdentitiesOnly=yes"] if host.key else []
        target = host.address if host.user is None else f"{host.user}@{host.address}"
        return [
            "ssh",
            "-T",
            *(word for option in options for word in ("-o", option)),
            *login,
            *words,
            target,
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
    """Call `action` on all machines at the same time. Raises one error, with a line for each
    machine on which it failed.
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
