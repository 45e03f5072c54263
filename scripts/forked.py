"""`dpipe` commands in processes that are forked from one which has imported dpipe."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from dpipe.processes.environment import set_up_grpc

END_S = 60.0  # for processes to end once the run is over


def import_dpipe() -> None:
    """What a rank needs, before the first fork; no thread and no connection is made by it."""
    set_up_grpc()
    import_module("dpipe.cli.main")
    import_module("dpipe.agent.coordinate")
    import_module("dpipe.agent.joining")


def make_folder(folder: Path) -> None:
    """Raises `click.UsageError` where it is there: a run's files are not mixed with another's."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise click.UsageError(
            f"cannot make the folder {folder} ({error.strerror}); choose another --folder"
        ) from None


class Forked:
    """A `dpipe` command in a process that is forked from this one, which has imported dpipe: to
    import torch again takes longer than what is measured. Used like a `subprocess.Popen`.
    """

    def __init__(self, argv: Sequence[str], environ: dict[str, str], log: int) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(argv, environ, log)

    def _run(self, argv: Sequence[str], environ: dict[str, str], log: int) -> NoReturn:
        code = 1
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.default_int_handler)
            os.environ.update(environ)
            from dpipe.cli.main import main as dpipe

            dpipe(list(argv))
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # past what belongs to the process that was forked

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = END_S) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("dpipe", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
