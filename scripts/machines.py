"""The processes of an elastic run under scripts/chaos, and what is done to them.

host 0         the coordinator; a parameter server, every other time that one starts
host 1 ...     a machine each: `dpipe join`
the last host  a standby, or the server's next place: only where faults need one
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
from forked import END_S, Forked
from levels import Levels
from progress import Progress

from dpipe.processes.launch import free_port
from netem import lab as labs

Process = Forked | subprocess.Popen[bytes]


@dataclass
class Machines:
    """All on this machine, or each on a host of `lab`."""

    folder: Path
    address: str
    overrides: list[str]
    job: str
    environ: dict[str, str]
    lab: labs.Lab | None = None
    coordinator: Process | None = None
    standby: Process | None = None
    standby_address: str = ""
    num_coordinators: int = 0
    server: Process | None = None
    server_host: int = 0
    server_address: str = ""
    num_servers: int = 0
    parted_until: float | None = None
    running: dict[str, Process] = field(default_factory=dict)
    paused: dict[str, float] = field(default_factory=dict)  # until when
    cut: dict[str, float] = field(default_factory=dict)
    hosts: dict[str, int] = field(default_factory=dict)
    num_joined: int = 0
    levels: Levels = field(default_factory=Levels)

    def coordinate(self) -> None:
        argv = ["coordinate", self.job, *self.overrides, "--bind", self.address]
        self.coordinator = self._start("coordinator", argv, 0)

    def stand_by(self) -> None:
        """Another one, in a folder of its own."""
        self.num_coordinators += 1
        host, self.standby_address = self._place(self.num_coordinators)
        own = ["-o", f'run.folder="{self.folder_of_standby}"', "--standby"]
        argv = ["coordinate", self.job, *self.overrides, *own, "--bind", self.standby_address]
        self.standby = self._start(f"standby{self.num_coordinators}", argv, host)

    def _place(self, number: int) -> tuple[int, str]:
        """A host and an address on it: in a lab the first host and the last take turns."""
        if self.lab is None:
            return 0, f"127.0.0.1:{free_port()}"
        host = (self.lab.num_hosts - 1) * (number % 2)
        return host, f"{self.lab.addresses[host]}:{free_port()}"

    @property
    def folder_of_standby(self) -> Path:
        return self.folder / f"taken-over-{self.num_coordinators}"

    def take_over(self, progress: Progress) -> None:
        """The coordinator's machine is gone, with its folder."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()
        shutil.rmtree(progress.path.parent)
        progress.path = self.folder_of_standby / "metrics.jsonl"
        self.address = self.standby_address
        self.coordinator = self.standby
        self.stand_by()

    def serve(self) -> None:
        """A parameter server by itself, where the run expects one from its beginning."""
        self.server_host, self.server_address = self._place(0)
        address = f'data_parallel.address="{self.server_address}"'
        self.overrides = [*self.overrides, "-o", address]
        self._start_server()

    def restart_server(self) -> None:
        """At its address, with its folder."""
        self._kill_server()
        self._start_server()

    def move_server(self) -> None:
        """Its machine is gone: another one begins elsewhere, without its state."""
        self._kill_server()
        self.num_servers += 1
        self.server_host, self.server_address = self._place(self.num_servers)
        self._start_server("--run", self.address)

    def _kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def _start_server(self, *options: str) -> None:
        name = f"server{self.num_servers}"
        own = ["-o", f'run.folder="{self.folder / name}"', "--bind", self.server_address]
        argv = ["serve", self.job, *self.overrides, *own, *options]
        self.server = self._start(name, argv, self.server_host)

    def part(self, names: Iterable[str], seconds: float) -> None:
        assert self.lab is not None
        if self.parted_until is not None:
            labs.rejoin(self.lab)
        labs.part(self.lab, [self.hosts[name] for name in names])
        self.parted_until = time.monotonic() + seconds

    def join(self) -> str:
        name = f"m{self.num_joined}"
        self.num_joined += 1
        taken = set(self.hosts.values())
        host = next(number for number in range(1, len(taken) + 2) if number not in taken)
        self.hosts[name] = host
        self.running[name] = self._start(name, ["join", self.address, "--name", name], host)
        return name

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()
        if name in self.cut:
            self.mend(name)
        del self.hosts[name]

    def cut_off(self, name: str, seconds: float) -> None:
        assert self.lab is not None
        labs.cut(self.lab, self.hosts[name])
        self.cut[name] = time.monotonic() + seconds

    def mend(self, name: str) -> None:
        assert self.lab is not None
        del self.cut[name]
        labs.mend(self.lab, self.hosts[name])

    def pause(self, name: str, seconds: float) -> None:
        self.running[name].send_signal(signal.SIGSTOP)
        self.paused[name] = time.monotonic() + seconds

    def wake(self) -> None:
        if self.parted_until is not None and time.monotonic() > self.parted_until:
            assert self.lab is not None
            self.parted_until = None
            labs.rejoin(self.lab)
        for name in [name for name, until in self.paused.items() if time.monotonic() > until]:
            del self.paused[name]
            if name in self.running:
                self.running[name].send_signal(signal.SIGCONT)
        for name in [name for name, until in self.cut.items() if time.monotonic() > until]:
            self.mend(name)

    def look(self) -> None:
        """Once a minute: does any process hold more?"""
        processes = dict(self.running)
        for name, process in (("coordinator", self.coordinator), ("server", self.server)):
            if process is not None:
                processes[name] = process
        self.levels.look(time.monotonic(), {name: each.pid for name, each in processes.items()})

    def awake(self) -> list[str]:
        return [
            name
            for name, process in self.running.items()
            if name not in {*self.paused, *self.cut} and process.poll() is None
        ]

    def _start(self, name: str, argv: Sequence[str], host: int) -> Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            if self.lab is None:
                return Forked(argv, self.environ, log.fileno())
            command = self.lab.hosts[host].enter([sys.executable, "-m", "dpipe", *argv])
            return subprocess.Popen(command, env=self.environ, stdout=log, stderr=subprocess.STDOUT)

    def end(self) -> None:
        processes = [*self.running.values()]
        for each in (self.coordinator, self.standby, self.server):
            if each is not None:
                processes.append(each)
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + END_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for line in self.levels.lines():
            click.echo(line)


@contextmanager
def machines_of(
    job: str,
    overrides: list[str],
    folder: Path,
    num: int,
    environ: dict[str, str],
    lab: labs.Lab | None = None,
    has_standby: bool = False,
    has_server: bool = False,
    levels: Levels | None = None,
) -> Iterator[Machines]:
    address = "127.0.0.1" if lab is None else lab.addresses[0]
    machines = Machines(folder, f"{address}:{free_port()}", overrides, job, environ, lab)
    machines.levels = levels or machines.levels
    try:
        if has_server:
            machines.serve()
        machines.coordinate()
        if has_standby:
            machines.stand_by()
        for _ in range(num):
            machines.join()
        yield machines
    finally:
        machines.end()


@contextmanager
def lab_of(network: Path | None, num_hosts: int) -> Iterator[labs.Lab | None]:
    if network is None:
        yield None
        return
    name = f"chaos{os.getpid()}"
    try:
        yield labs.up(name, num_hosts, network)
    finally:
        labs.down(name)
