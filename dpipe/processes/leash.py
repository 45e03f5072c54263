"""Becomes a program that gets SIGTERM when its launcher dies: `python -S leash.py LAUNCHER PROGRAM
ARGUMENT...`, LAUNCHER being a process id.

A program of its own between the launcher and a rank, because only the child can ask the kernel for
this, and Python code between fork and exec is unsafe beside threads. It imports as little as
possible, to start fast.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(launcher: int, argv: list[str]) -> None:
    # SIGTERM, not SIGKILL: the rank writes a checkpoint. It outlives `exec`.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:  # it died before prctl
        sys.exit(128 + signal.SIGTERM)
    os.execvp(argv[0], argv)  # noqa: S606 - the caller's own command line


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
