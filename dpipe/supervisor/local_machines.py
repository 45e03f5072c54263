"""The machines of an elastic run as processes of this one: what `dpipe launch --spares` does.

launcher = coordinator ──┬── machine-0   rank 0     RUN/logs/machine-0.log
                         ├── machine-1   rank 1
                         └── machine-2   spare

a machine dies       a spare takes its rank, and another process is started in its place
Ctrl-C or SIGTERM    the step under way ends, a checkpoint is written, all end; the same command
                     goes on from it
the launcher dies    the kernel sends each machine SIGTERM
"""

import secrets
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpipe.agent.coordinate import coordinate
from dpipe.config.load import load
from dpipe.errors import RunError
from dpipe.processes.environment import environment
from dpipe.processes.launch import open_log
from dpipe.supervisor.machine_process import MachineProcess, how_it_ended, kill_group

_END_S = 10.0  # for the machines to end once the run is over
_MOST_IN_A_ROW = 5  # machines that end before the run has come a step further
_TAIL_BYTES = 2000


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
    # Their coordinator is this process, which does not come back.
    process = MachineProcess(config.node, token, _END_S, _END_S, trust_code)
    machines = LocalMachines(process, config.world_size + spares, say=say)
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
    """See `coordinate.OwnMachines`. Used by one thread. `at` is the host where the coordinator
    listens, and `slots` are those of its `num` machines.
    """

    def __init__(
        self,
        process: MachineProcess,
        num: int,
        *,
        say: Callable[[str], None],
        at: str = "127.0.0.1",
        prefix: str = "machine-",
        first_slot: int = 0,
        are_all: bool = True,
    ) -> None:
        self.are_all = are_all
        self._process = process
        self._slots = range(first_slot, first_slot + num)
        self._say = say
        self._at = at
        self._prefix = prefix
        self._machines: list[_Machine] = []
        self._num_started = 0
        self._address = ""
        self._logs = Path()
        self._lost_at = -1  # the newest step when one ended last
        self._in_a_row = 0

    def start(self, port: int, folder: Path) -> None:
        self._address = f"{self._at}:{port}"
        self._logs = folder / "logs"
        for slot in self._slots:
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
            how = how_it_ended(code)
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
                kill_group(machine.process)
        self._machines.clear()

    def _start(self, slot: int) -> str:
        name = f"{self._prefix}{self._num_started}"
        self._num_started += 1
        log = self._logs / f"{name}.log"
        with open_log(log) as file:
            process = self._process.start(self._address, name, slot, file)
        self._machines.append(_Machine(slot, name, process, log))
        return name


def _tail(log: Path) -> str:
    content = log.read_bytes()
    return content[-_TAIL_BYTES:].decode(errors="replace")
