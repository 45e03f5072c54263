"""Shows the logs of all ranks together until all have ended, and stops a run of which a rank fails.

    machine 0 ── agent follow ──► thread ─┐
    machine 1 ── agent follow ──► thread ─┼─► one queue ──► the view
    Ctrl-C ────────────────── handler ────┘

A run does not depend on being watched. A thread that loses its connection opens another one and
continues at the same place in the log.
"""

import json
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from dpipe.errors import DpipeError
from fleet.job import KILL_S, stop
from fleet.ssh import Machine, Unreachable, as_line

GRACE_S = 15.0  # for the others to stop by themselves when a rank has failed
LOST_S = 60.0  # without a connection, until we give up on a machine
RETRY_S = 1.0
SILENT_S = 30.0  # the agent sends a heartbeat every 5 s
_POLL_S = 0.5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Line:
    rank: int
    text: str


@dataclass(frozen=True)
class Ended:
    """The outcome of a rank; `code` is None if it is not known."""

    rank: int
    host: str
    code: int | None
    why: str = ""

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host}"
        if self.code is None:
            return f"{where}: {self.why}"
        killed = f" ({signal.Signals(self.code - 128).name})" if 128 < self.code < 160 else ""
        return f"{where}: {f'exit code {self.code}{killed}' if self.code else 'ended well'}"


class Watch:
    """Follows a run's logs from `offsets`; iterating over it ends when every rank has ended."""

    def __init__(
        self, run: str, offsets: Mapping[Machine, dict[int, int]], *, wait: bool = True
    ) -> None:
        self._run, self._wait = run, wait
        self._events: SimpleQueue[Line | Ended] = SimpleQueue()
        self._left = {rank for ranks in offsets.values() for rank in ranks}
        self._closed = threading.Event()
        self._machines = list(offsets)
        self._threads = [
            threading.Thread(target=self._follow, args=(machine, dict(ranks)), daemon=True)
            for machine, ranks in offsets.items()
        ]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for machine in self._machines:
            machine.kill()
        for thread in self._threads:
            thread.join(SILENT_S)

    def __iter__(self) -> Iterator[Line | Ended | None]:
        """Lines and outcomes as they arrive; None if nothing has arrived for a moment."""
        while self._left:
            try:
                event = self._events.get(timeout=_POLL_S)
            except Empty:
                yield None
                continue
            if isinstance(event, Ended):
                self._left.discard(event.rank)
            yield event

    def _follow(self, machine: Machine, offsets: dict[int, int]) -> None:
        last_message = time.monotonic()
        while offsets and not self._closed.is_set():
            why = "its log has ended early"
            try:
                for message in self._messages(machine, offsets):
                    last_message = time.monotonic()
                    self._pass_on(machine, offsets, message)
            except DpipeError as error:
                why = str(error)
            if time.monotonic() - last_message > LOST_S:
                break
            if offsets:
                self._closed.wait(RETRY_S)
        for rank in offsets:
            self._events.put(
                Ended(rank, machine.host.name, None, f"not heard of for {LOST_S:g} s: {why}")
            )

    def _messages(self, machine: Machine, offsets: dict[int, int]) -> Iterator[dict[str, Any]]:
        command = machine.agent_command("follow")
        with machine.process(command) as process:
            assert process.stdin is not None and process.stderr is not None
            try:
                process.stdin.write(
                    as_line({"run": self._run, "offsets": offsets, "wait": self._wait})
                )
                process.stdin.close()
            except OSError:  # it has ended, and says why below
                pass
            yield from map(json.loads, _lines(process))
            machine.check(process.wait(SILENT_S), command, b"", process.stderr.read())

    def _pass_on(self, machine: Machine, offsets: dict[int, int], message: dict[str, Any]) -> None:
        match message:
            case {"rank": rank, "line": line, "offset": offset}:
                offsets[rank] = offset
                self._events.put(Line(rank, line))
            case {"rank": rank, "state": state, "code": code}:
                del offsets[rank]
                why = (
                    "gone without an exit code; has the machine been restarted?"
                    if state == "lost"
                    else state
                )
                self._events.put(Ended(rank, machine.host.name, code, why))


def _lines(process: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """Lines of standard output until its end. Raises `Unreachable` after SILENT_S without any."""
    assert process.stdout is not None
    rest = b""
    while select.select([process.stdout], [], [], SILENT_S)[0]:
        read = process.stdout.read1()  # type: ignore[attr-defined]  # a pipe's reader has it
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from lines
    raise Unreachable(f"no heartbeat for {SILENT_S:g} s")


def attend(
    watch: Watch,
    machines: Sequence[Machine],
    run: str,
    received: Sequence[int],
    *,
    show: Callable[[Line], None],
    say: Say,
    is_elastic: bool = False,
) -> int:
    """Show a run until it has ended; returns the exit code of the first rank that failed, or 0.

    On the first signal in `received` the ranks stop after the current step with a checkpoint; on a
    second one they are killed. If a rank fails, the others hear of it from the coordinator and
    stop; they are killed if that takes longer than GRACE_S.

    One that `is_elastic` outlives every process but the first, which coordinates it: its exit code
    is the run's.
    """
    outcomes: list[Ended] = []
    deadline: float | None = None
    with watch:
        handled = 0
        for event in watch:
            match event:
                case Line():
                    show(event)
                case Ended():
                    outcomes.append(event)
                    if event.code != 0 and is_elastic and event.rank != 0:
                        say(f"{event}; the run goes on")
                    elif event.code != 0 and deadline is None:
                        deadline = time.monotonic() + GRACE_S
                        say(f"{event}; the others stop")
            if len(received) > handled:
                handled = len(received)
                _stop(machines, run, handled, say)
            if deadline is not None and time.monotonic() > deadline:
                deadline = float("inf")
                _stop(machines, run, 2, say)
    if is_elastic:
        outcomes = [outcome for outcome in outcomes if outcome.rank == 0]
    return conclude(outcomes, say)


def conclude(outcomes: Sequence[Ended], say: Say) -> int:
    """The exit code of a run. If it failed, prints how each rank ended, the first failure first."""
    failed = [outcome for outcome in outcomes if outcome.code != 0]
    if not failed:
        return 0
    for outcome in (*failed, *(outcome for outcome in outcomes if outcome.code == 0)):
        say(str(outcome))
    return failed[0].code or 1


def _stop(machines: Sequence[Machine], run: str, times: int, say: Say) -> None:
    if times == 1:
        say("stopping: the ranks finish their step and write a checkpoint; once more kills them")
    for error in (
        stop(machines, run, "SIGTERM") if times == 1 else stop(machines, run, "SIGKILL", KILL_S)
    ):
        say(error)


@contextmanager
def signals() -> Iterator[list[int]]:
    """The Ctrl-C and SIGTERM received so far. Open it before a run is started, so that no signal
    leaves a run that nobody stops.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
