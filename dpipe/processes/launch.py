"""All ranks as local processes of one launcher.

launcher ──┬── rank 0    this terminal
           ├── rank 1    RUN/logs/rank-1.log
           └── rank 2    RUN/logs/rank-2.log

Ctrl-C or SIGTERM    all ranks get SIGTERM: they write a checkpoint and end; a second one kills them
a rank dies          the coordinator tells the others, which end; after `grace_s` they are killed
the launcher dies    the kernel sends each rank SIGTERM
"""

import errno
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from dpipe.errors import ConfigError, InputError, JoinError, RunError
from dpipe.processes import leash
from dpipe.processes.environment import environment
from dpipe.report.rows import OnRow, RowPipe

# With the time that killing and reporting take it stays below 10 s: ranks that are still joining
# do not notice a failure themselves.
GRACE_S = 8.0
STOPPING = "stopping: the ranks finish their step and write a checkpoint; once more kills them"
NOT_UNDER_WAY = "stopped: the ranks were not training, so that there was nothing to save"
_PORTS = range(20_000, 32_000)
# Between the ports of two processes whose numbers follow each other.
_APART = 2411
_places = count()
_TAIL_LINES = 20  # of its log, for a rank that failed
_TAIL_BYTES = 64 << 10  # that are read to find them

Say = Callable[[str], None]


def launch(
    argv_of_rank: Callable[[int], list[str]],
    num_ranks: int,
    *,
    logs: Path,
    coordinator: str | None = None,
    environ: Mapping[str, str] | None = None,
    cores: Sequence[Sequence[int]] = (),
    on_line: Say = lambda line: None,
    grace_s: float = GRACE_S,
    timeout_s: float = math.inf,
    quiet: bool = False,
    on_row: OnRow | None = None,
) -> int:
    """Run all ranks here until the last has ended; returns the exit code of the one that failed
    first, or 0.

    Each rank finds `DPIPE_RANK` and so on, and the run's token, in its environment. Rank 0 writes
    to this terminal, with `quiet` to a log as the others do. `cores` are those that each rank may
    use; without them, all that the launcher may. `on_line` gets the launcher's own
    messages, such as the last lines of the rank that failed first. `on_row` gets each row of
    metrics that rank 0 writes, in this thread; an exception of it kills the ranks and is raised
    here.

    Exit code 2 promises that nothing was written: the logs of such a run are removed. In the main
    thread signals are handled meanwhile; Python delivers none to other threads.

    Raises `RunError` if the ranks have not ended after `timeout_s`, and kills them; `ConfigError`
    if a log cannot be written.
    """
    inherited = environment() if environ is None else environ
    shared = {
        "DPIPE_WORLD_SIZE": str(num_ranks),
        "DPIPE_COORDINATOR": coordinator or f"127.0.0.1:{free_port()}",
        # Random, so that no other process of this machine can join.
        "DPIPE_TOKEN": inherited.get("DPIPE_TOKEN") or secrets.token_urlsafe(16),
        "PYTHONUNBUFFERED": "1",  # else the last lines of a killed rank are lost
    }
    rows = RowPipe(on_row) if on_row is not None else None
    ranks = _Ranks(on_line, quiet, rows, cores)
    with ranks.handling_signals(), rows or nullcontext():
        try:
            for rank in range(num_ranks):
                own = {"DPIPE_RANK": str(rank), "DPIPE_LOCAL_RANK": str(rank)}
                ranks.start(rank, argv_of_rank(rank), {**inherited, **shared, **own}, logs)
            failed = ranks.wait(grace_s, timeout_s)
        finally:
            ranks.kill()  # also where `on_row` raised, or a rank could not be started
    if failed is None:
        return 0
    for line in ranks.last_lines(failed):
        on_line(line)
    if failed.exit_code == InputError.exit_code:
        ranks.take_back_logs()
    return failed.exit_code


def free_port(host: str = "127.0.0.1") -> int:
    """A free port below the range from which Linux takes ports of outgoing connections, so that
    none of them takes it meanwhile.

    It stays free until its rank listens: processes that look at the same time look far apart.
    """
    for _ in range(100):
        place = os.getpid() * _APART + next(_places)
        port = _PORTS[place % len(_PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise JoinError(f"found no free port among {_PORTS[0]}..{_PORTS[-1]} on {host}")


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path | None  # None: it writes to this terminal
    log_start: int = 0  # where this run's part begins: a resumed run appends to its logs

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 + n if signal n killed the rank."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL goes to the rank's process group, so also to what it started; others to the rank
        alone.
        """
        send = os.killpg if number is signal.SIGKILL else os.kill
        # Once it is reaped, its number may be another process's.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                send(self.process.pid, number)

    def last_lines(self) -> list[str]:
        """How it ended, and the end of its log."""
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        line = f"rank {self.number} failed first, with {how}"
        if self.log is None:
            return [line]
        return [f"{line}; the end of {self.log}:", *_tail(self.log, self.log_start)]


def _tail(log: Path, start: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]


def open_log(log: Path) -> BinaryIO:
    """To add to it. Raises `ConfigError` where it cannot be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        raise ConfigError(
            f"{log} cannot be written: {error.strerror}; make it writable, or move it away"
        ) from None


class _Ranks:
    """The local processes of one run."""

    def __init__(
        self, say: Say, quiet: bool, rows: RowPipe | None, cores: Sequence[Sequence[int]]
    ) -> None:
        self._rows = rows
        self._cores = cores
        self._ranks: list[_Rank] = []
        self._say = say
        self._quiet = quiet
        self._stop: signal.Signals | None = None  # what the ranks were last sent

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python gives signals to the main thread alone
            return
        before = {
            number: signal.signal(number, self._forward)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        # SIGTERM for Ctrl-C too: the ranks are in sessions of their own, and get none from the
        # terminal.
        if self._stop is None:
            self._stop = signal.SIGTERM
            self._say(STOPPING)
        else:
            self._stop = signal.SIGKILL
        self._signal_all(self._stop)

    def last_lines(self, failed: _Rank) -> list[str]:
        """What to say of the rank that failed first."""
        # A rank that trains catches the first signal that is sent.
        if self._stop is signal.SIGTERM and failed.process.returncode == -signal.SIGTERM:
            return [NOT_UNDER_WAY]
        return failed.last_lines()

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def start(self, number: int, argv: list[str], environ: Mapping[str, str], logs: Path) -> None:
        log = logs / f"rank-{number}.log" if number or self._quiet else None
        # Looked up here: what starts is the leash, which finds its interpreter in any case.
        if shutil.which(argv[0], path=environ.get("PATH")) is None:
            raise FileNotFoundError(
                errno.ENOENT, f"rank {number} is to run a program that is not here", argv[0]
            )
        rows = self._rows if number == 0 else None
        with open_log(log) if log else nullcontext() as file:
            process = subprocess.Popen(  # noqa: S603 - the caller's own command line
                # -S: without site-packages, which it has no use for and which take time.
                [sys.executable, "-S", leash.__file__, str(os.getpid()), *argv],
                env=environ if rows is None else rows.added_to(environ),
                pass_fds=() if rows is None else (rows.write_fd,),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT if file else None,
                start_new_session=True,  # a group to kill, and no Ctrl-C from the terminal
            )
            self._ranks.append(_Rank(number, process, log, file.tell() if file else 0))
        if self._cores:
            self._pin(process.pid, self._cores[number])
        if self._stop:  # asked to stop while starting
            self._ranks[-1].signal(self._stop)

    def _pin(self, started: int, cores: Sequence[int]) -> None:
        """Of a process that was just started: it is the leash still, and has one thread."""
        try:
            os.sched_setaffinity(started, cores)
        except ProcessLookupError:
            pass  # it has just ended
        except OSError as error:  # a container may forbid it
            self._say(f"a rank cannot be pinned to its cores, and may be slower: {error.strerror}")

    def wait(self, grace_s: float, timeout_s: float) -> _Rank | None:
        """Wait until all have ended; returns the one that failed first, after which the others have
        `grace_s`.
        """
        # By file descriptor: one `poll` waits for all ranks and for rows, without a thread each.
        running = {os.pidfd_open(rank.process.pid): rank for rank in self._ranks}
        try:
            return self._wait_for(running, grace_s, timeout_s)
        finally:
            for fd in running:
                os.close(fd)

    def _wait_for(
        self, running: dict[int, _Rank], grace_s: float, timeout_s: float
    ) -> _Rank | None:
        """Closes and removes from `running` the file descriptors of ranks that have ended."""
        poll = select.poll()
        rows_fd = [] if self._rows is None else [self._rows.read_fd]
        for fd in (*running, *rows_fd):
            poll.register(fd, select.POLLIN)
        failed: _Rank | None = None
        late = False
        deadline = time.monotonic() + timeout_s
        while running:
            # Without a limit unless one was given: a run may take weeks. Signal handlers run
            # meanwhile.
            left_s = max(0.0, deadline - time.monotonic())
            ready = poll.poll(None if left_s == math.inf else left_s * 1000)
            if self._rows is not None:
                self._rows.take()
            for fd, _ in ready:
                if fd not in running:  # rows
                    continue
                rank = running.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                # The first one: the others fail because of it.
                if rank.exit_code and failed is None:
                    failed = rank
                    deadline = time.monotonic() + grace_s
            if not ready:
                # Past the deadline: of the run, or of those that were to notice a failure.
                late = late or failed is None
                self.kill()
        if late:
            raise RunError(f"the ranks have not ended after {timeout_s:g} s and were killed")
        return failed

    def kill(self) -> None:
        self._signal_all(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()

    def take_back_logs(self) -> None:
        for rank in self._ranks:
            if rank.log and rank.log_start:  # an earlier run's lines stay
                os.truncate(rank.log, rank.log_start)
            elif rank.log:
                rank.log.unlink()
                for folder in (rank.log.parent, rank.log.parent.parent):
                    with suppress(OSError):  # something else is in it
                        folder.rmdir()
