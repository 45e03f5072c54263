"""A machine of an elastic run as a process of this one: `dpipe join` behind a leash.

It is in a session of its own, so that Ctrl-C at a terminal reaches its launcher alone, and gets
SIGTERM from the kernel where its launcher dies.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from dpipe.config.run import NodeConfig
from dpipe.plan.run_plan import local_device
from dpipe.processes import leash
from dpipe.processes.environment import environment

# Its keys are a machine's own; a secret is no part of a command line.
_NOT_TOLD = {"token", "port", "device"}


@dataclass(frozen=True)
class MachineProcess:
    """How a machine is started, whose launcher's section is `node`."""

    node: NodeConfig
    token: str
    wait_s: float  # for a coordinator that is away
    leave_s: float  # for handing over
    trust_code: bool = False

    def start(
        self, address: str, name: str, slot: int, log: IO[bytes] | None = None
    ) -> "subprocess.Popen[bytes]":
        """It joins at `address`, with the device of `slot` among the machines of this host. `log`
        gets what it prints; None: where this process prints.
        """
        return subprocess.Popen(  # noqa: S603 - this program's own command line
            [
                sys.executable,
                "-S",
                leash.__file__,
                str(os.getpid()),
                *self.argv(address, name, slot),
            ],
            env={**environment(), "DPIPE_TOKEN": self.token, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,  # a group to kill, and no Ctrl-C from the terminal
        )

    def argv(self, address: str, name: str, slot: int) -> list[str]:
        argv = [sys.executable, "-m", "dpipe", "join", address, "--name", name]
        argv += ["--wait", str(self.wait_s), "--leave-within", str(self.leave_s)]
        argv += ["-o", f"node.device={json.dumps(local_device(self.node.device, slot))}"]
        for key, value in self.node.model_dump(mode="json", exclude=_NOT_TOLD).items():
            if value != getattr(NodeConfig(), key):
                argv += ["-o", f"node.{key}={json.dumps(value)}"]
        if self.trust_code:
            argv += ["--trust-code"]
        return argv


def how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def kill_group(machine: "subprocess.Popen[bytes]") -> None:
    """With what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(machine.pid, signal.SIGKILL)
    machine.wait()
