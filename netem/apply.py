"""Puts a node's shaping on a real device, and removes it again however the program ends."""

import json
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dpipe.network.link import Network
from netem import shell
from netem.shell import NetemError
from netem.tc import HANDLE, Argv, clear_command, egress_commands, refuse_ingress

_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def apply(network: Network, node: int, device: str, addresses: Sequence[str] = ()) -> list[Argv]:
    """Shape `device`; an earlier shaping of ours is replaced. Returns the commands that were run.

    Raises `NetemError` if `tc` refuses one of them; the device is then unshaped. Also if the
    device carries a qdisc that is not ours; that one is left alone.
    """
    refuse_ingress(network, node)
    commands = egress_commands(network, node, device, addresses)
    clear(device)
    try:
        for command in commands:
            shell.run(command)
    except BaseException:
        clear(device)
        raise
    return commands


def clear(device: str) -> bool:
    """Remove our shaping from `device`; false if there was none."""
    root = _root_qdisc(device)
    if root is None:
        return False
    kind, handle = root
    if handle != HANDLE:
        raise NetemError(
            f"device {device} carries a qdisc that is not ours: {kind} {handle}; remove it "
            f"(tc qdisc del dev {device} root) or name another device"
        )
    shell.run(clear_command(device))
    return True


@contextmanager
def applied(
    network: Network, node: int, device: str, addresses: Sequence[str] = ()
) -> Iterator[Callable[[], None]]:
    """Shape `device` for as long as the block runs; yields a wait for Ctrl-C, SIGTERM or SIGHUP.

    These signals are blocked from before the first command until after the last, so that none can
    leave the device half shaped.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        apply(network, node, device, addresses)
        try:
            yield lambda: _wait(_ENDING)
        finally:
            clear(device)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(signals: set[signal.Signals]) -> None:
    while (
        signal.sigtimedwait(signals, 60.0) is None
    ):  # without a timeout the wait could not be interrupted
        pass


def _root_qdisc(device: str) -> tuple[str, str] | None:
    """Kind and handle of the qdisc at the root; None for the kernel's default (handle 0:)."""
    devices = [name for _, name in socket.if_nameindex()]
    if device not in devices:
        raise NetemError(
            f"device {device!r} does not exist; this machine has: {', '.join(devices)}"
        )
    shown = json.loads(shell.run(["tc", "-j", "qdisc", "show", "dev", device]) or "[]")
    roots = [(q["kind"], q["handle"]) for q in shown if q.get("root") and q["handle"] != "0:"]
    return roots[0] if roots else None
