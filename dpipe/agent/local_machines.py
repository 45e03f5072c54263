"""The machines of an elastic run as processes of this one: what `dpipe launch --spares` does.

launcher = coordinator ──┬── machine-0   rank 0     RUN/logs/machine-0.log
                         ├── machine-1   rank 1
                         └── machine-2   spare

a machine dies       a spare takes its rank, and another process is started in its place
Ctrl-C or SIGTERM    the step under way ends, a checkpoint is written, all end; the same command
                     goes on from it
the launcher dies    the kernel sends each machine SIGTERM
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpipe.agent.coordinate import coordinate
from dpipe.config.load import Config, load
from dpipe.config.run import NodeConfig
from dpipe.errors import RunError
from dpipe.plan.run_plan import local_device
from dpipe.processes import leash
from dpipe.processes.environment import environment
from dpipe.processes.launch import open_log

_END_S = 10.0  # for the machines to end once the run is over
_MOST_IN_A_ROW = 5  # machines that end before the run has come a step further
_TAIL_BYTES = 2000
# Its keys are a machine's own; a secret is no part of a command line.
_NOT_TOLD = {"token", "port", "device"}


def launch_elastic(
    path: str,
    overrides: tuple[str, ...],
    spares: int,
    *,
    trust_code: bool,
    say: Callable[[str], None],
) -> Path | None:
    """Train all ranks as processes of this machine, with so many spares, until the run is over or
    this is asked to stop; killed ones are replaced. Started again it goes on. Returns what
    `coordinate` does.

    Raises what `coordinate` does, and `RunError` where machines end as fast as they are started.
    """
    config = load(path, overrides, trust_code=trust_code)
    own = environment()
    token = config.node.token or own.get("DPIPE_TOKEN") or secrets.token_urlsafe(16)
    machines = LocalMachines(config, spares, token, trust_code=trust_code, say=say)
    try:
        return coordinate(
            path,
            overrides,
            "127.0.0.1:0",
            patience_s=config.timeouts.join,
            trust_code=trust_code,
            say=say,
            token=token,
            machines=machines,
        )
    finally:
        machines.close()


@dataclass
class _Machine:
    slot: int  # among those that run at once
    name: str
    process: subprocess.Popen[bytes]
    log: Path


class LocalMachines:
    """See `coordinate.OwnMachines`. Used by one thread."""

    def __init__(
        self,
        config: Config,
        spares: int,
        token: str,
        *,
        trust_code: bool,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._num = config.world_size + spares
        self._token = token
        self._trust_code = trust_code
        self._say = say
        self._machines: list[_Machine] = []
        self._num_started = 0
        self._address = ""
        self._logs = Path()
        self._lost_at = -1  # the newest step when one ended last
        self._in_a_row = 0

    def start(self, port: int, folder: Path) -> None:
        self._address = f"127.0.0.1:{port}"
        self._logs = folder / "logs"
        for slot in range(self._num):
            self._start(slot)

    def look(self, newest_step: int) -> None:
        ended = [machine for machine in self._machines if machine.process.poll() is not None]
        for machine in ended:
            self._machines.remove(machine)
            code = machine.process.returncode
            if newest_step > self._lost_at:
                self._in_a_row = 0
            self._lost_at = newest_step
            self._in_a_row += 1
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            if self._in_a_row > _MOST_IN_A_ROW:
                raise RunError(
                    f"{self._in_a_row} machines have ended without a step between, {machine.name} "
                    f"last ({how}); the end of {machine.log}:\n{_tail(machine.log)}"
                )
            other = self._start(machine.slot)
            self._say(f"{machine.name} has ended ({how}); {other} takes its place")

    def close(self) -> None:
        """End those that have not; the coordinator has told them to, or is gone."""
        deadline = time.monotonic() + _END_S
        for machine in self._machines:
            with suppress(subprocess.TimeoutExpired):
                machine.process.wait(max(0.0, deadline - time.monotonic()))
        for machine in self._machines:
            if machine.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(machine.process.pid, signal.SIGKILL)
                machine.process.wait()
        self._machines.clear()

    def _start(self, slot: int) -> str:
        name = f"machine-{self._num_started}"
        self._num_started += 1
        log = self._logs / f"{name}.log"
        with open_log(log) as file:
            process = subprocess.Popen(  # noqa: S603 - this program's own command line
                [sys.executable, "-S", leash.__file__, str(os.getpid()), *self._argv(name, slot)],
                env={**environment(), "DPIPE_TOKEN": self._token, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group to kill, and no Ctrl-C from the terminal
            )
        self._machines.append(_Machine(slot, name, process, log))
        return name

    def _argv(self, name: str, slot: int) -> list[str]:
        node = self._config.node
        argv = [sys.executable, "-m", "dpipe", "join", self._address, "--name", name]
        # Its coordinator is the launcher, which does not come back.
        argv += ["--wait", str(_END_S), "--leave-within", str(_END_S)]
        argv += ["-o", f"node.device={json.dumps(local_device(node.device, slot))}"]
        for key, value in node.model_dump(mode="json", exclude=_NOT_TOLD).items():
            if value != getattr(NodeConfig(), key):
                argv += ["-o", f"node.{key}={json.dumps(value)}"]
        if self._trust_code:
            argv += ["--trust-code"]
        return argv


def _tail(log: Path) -> str:
    content = log.read_bytes()
    return content[-_TAIL_BYTES:].decode(errors="replace")
