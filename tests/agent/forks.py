"""`Forks`: dpipe's commands as processes of an interpreter that has imported it already."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.warm_python import program_of

from netem.measure import Host

STEP_S = 0.1  # with which a run lasts for as long as faults and newcomers take
# Steps that last, and cost little: a machine that computes for so long, without the processor.
PACED = """
import sys, time
from pathlib import Path

from dpipe.cli.main import main
from dpipe.engine.update import Update

step_s = Path(sys.argv.pop(1))
inner = Update.vote

def paced(*args, **options):
    time.sleep(float(step_s.read_text()))
    return inner(*args, **options)

Update.vote = paced
main()
"""
# At a call, not at a time: however fast the machine is, it is the same moment of a run.
DOOMED = """
import importlib, os, signal, sys

where, count = sys.argv[1], int(sys.argv[2])
module, owner, name = where.rsplit(".", 2)
owner = getattr(importlib.import_module(module), owner)
inner = getattr(owner, name)

def doomed(*args, **options):
    global count
    count -= 1
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*args, **options)

setattr(owner, name, doomed)
sys.argv[1:3] = []
from dpipe.cli.main import main
main()
"""
# A clock that somebody sets, again and again: a day forwards, then a day back. Not gRPC's: its core
# compares with the kernel's clock, which nobody has set.
JUMPING = """
import sys, time

inner = time.time
calls = 0

def jumping():
    global calls
    if sys._getframe(1).f_globals["__name__"].startswith("grpc"):
        return inner()
    calls += 1
    return inner() + (86400.0 if calls % 2 else -86400.0)

time.time = jumping
from dpipe.cli.main import main
main()
"""
TESTS = Path(__file__).resolve().parent.parent


class Forks:
    """Commands by name, each with its output in NAME.log. `python` is `warm_python`. A step of
    theirs lasts `step_s` at least.
    """

    def __init__(self, folder: Path, python: str, step_s: float = 0.0) -> None:
        self.folder = folder
        self._python = python
        self._step_s = folder / "step_s"
        self._program = ("-m", "dpipe")
        if step_s:
            self._program = ("-c", PACED, str(self._step_s))
            self.pace(step_s)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def pace(self, step_s: float) -> None:
        """From their next step on. For what takes no number of steps, but as long as a machine
        needs: a run that waits for it must not end.
        """
        new = self._step_s.with_suffix(".new")
        new.write_text(str(step_s))
        new.replace(self._step_s)

    def start(self, name: str, *argv: str, host: Host | None = None) -> None:
        """A `dpipe` command, whose output goes to NAME.log; on a host of a lab."""
        self._start(name, *self._program, *argv, host=host)

    def start_python(self, name: str, *argv: str) -> None:
        """What Python is told to run."""
        self._start(name, *argv)

    def start_jumping(self, name: str, *argv: str) -> None:
        """The same, in a process whose clock jumps by two days between any two looks at it."""
        self._start(name, "-c", JUMPING, *argv)

    def start_doomed(self, name: str, where: str, count: int, *argv: str) -> None:
        """The same, in a process that kills itself at the `count`-th call of `where`, such as
        "dpipe.stage.stage.Stage.forward".
        """
        self._start(name, "-c", DOOMED, where, str(count), *argv)

    def has_ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def stop(self, name: str) -> None:
        """SIGSTOP, which the process that stands for the program could not pass on."""
        os.kill(program_of(self._python, self._processes[name].pid), signal.SIGSTOP)

    def wake(self, name: str) -> None:
        os.kill(program_of(self._python, self._processes[name].pid), signal.SIGCONT)

    def _start(self, name: str, *argv: str, host: Host | None = None) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": str(TESTS.parent),
            "OMP_NUM_THREADS": "1",
            "DPIPE_TOKEN": "secret",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [self._python, *argv]
            self._processes[name] = subprocess.Popen(
                command if host is None else host.enter(command),
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self._processes[name]
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait(20)

    def exit_code(self, name: str, timeout_s: float = 60.0) -> int:
        process = self._processes[name]
        self.wait_until(lambda: process.poll() is not None, f"{name} to end", timeout_s)
        return process.wait()

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self._logs()}"
            time.sleep(0.05)

    def _logs(self) -> str:
        return "\n".join(f"== {name}\n{self.log(name)[-1500:]}" for name in self._processes)

    def close(self) -> None:
        for name in self._processes:
            self.kill(name)
