"""Runs `ip`, `tc` and the like, and turns their errors into what the user can do about them."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from dpipe.errors import InputError

WITHOUT_ROOT = "without root the `shaped` transport does the same in software"
TIMEOUT_S = 60.0
PACKAGES = {
    "tc": "iproute2",
    "ip": "iproute2",
    "ping": "iputils-ping",
    "linux.uml": "user-mode-linux",
}
PACKAGES |= {"insmod": "kmod", "ethtool": "ethtool", "sysctl": "procps"}


class NetemError(InputError):
    """This machine cannot make the network; the message says what is missing."""


def require_root(subject: str) -> None:
    if os.geteuid() != 0:
        raise NetemError(f"{subject} needs root; {WITHOUT_ROOT}")


def require_programs(*programs: str) -> None:
    if missing := [program for program in programs if shutil.which(program) is None]:
        packages = " ".join(sorted({PACKAGES.get(program, program) for program in missing}))
        raise NetemError(
            f"{', '.join(missing)} not found; on Debian and Ubuntu: apt-get install {packages}"
        )


def run(argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """The standard output of a command. Raises `NetemError` with the command and its message if
    it fails.
    """
    require_programs(argv[0])
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise NetemError(f"`{' '.join(argv)}` has not ended after {timeout_s:g} s") from None
    if done.returncode != 0:
        raise NetemError(explain(argv, done.stderr.strip() or done.stdout.strip()))
    return done.stdout


def explain(argv: Sequence[str], message: str) -> str:
    """The message of a failed command, with advice for the failures that users meet."""
    if "tcp_congestion_control" in message and "Operation not permitted" in message:
        advice = (
            ": a network namespace takes only the congestion controls that the machine's "
            "net.ipv4.tcp_allowed_congestion_control lists"
        )
    elif "Operation not permitted" in message:
        advice = f": this needs root; {WITHOUT_ROOT}"
    elif argv[0] == "tc" and (
        "kind is unknown" in message or "No such file or directory" in message
    ):
        advice = (
            ": this kernel lacks a module (sch_netem, sch_htb, cls_u32); load it, or use the "
            "`shaped` transport, "
            "or `python -m netem lab`, whose router brings its own kernel"
        )
    else:
        advice = ""
    return f"`{' '.join(argv)}` failed{advice}\n{message}"
