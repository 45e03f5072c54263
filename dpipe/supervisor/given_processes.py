"""What `dpipe train --spares` does: the processes that torchrun, Slurm or `scripts/cluster` has
started are the machines of an elastic run, more of them than the job has ranks.

process 0      coordinates ──┬── its machine      each process keeps one machine going, which is a
process 1..n   ──────────────┴── its machine      process of its own: killed, it is started again

a machine is killed      a spare takes its rank; its process starts it again, as a spare
a process is killed      so is its machine: the run has one spare less
process 0 is killed      the others wait for `timeouts.join`, and end
all are told to stop     the step under way ends, a checkpoint is written, all end
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from dpipe.agent.coordinate import coordinate
from dpipe.config.elastic import check_spares
from dpipe.config.load import Config, load
from dpipe.errors import ConfigError, RunError
from dpipe.processes.environment import ProcessInfo, environment, process_info
from dpipe.processes.signals import stop_on_signals
from dpipe.run.join import advertised_host, listening_on
from dpipe.supervisor.local_machines import LocalMachines
from dpipe.supervisor.machine_process import MachineProcess, how_it_ended, kill_group

_LEAVE_S = 60.0  # for the step under way
_MOST_STARTS = 100  # of one process's machine
_POLL_S = 0.5


def train_elastic(
    path: str,
    overrides: tuple[str, ...],
    spares: int,
    *,
    rank: int | None,
    world_size: int | None,
    coordinator: str | None,
    trust_code: bool,
    say: Callable[[str], None],
) -> Path | None:
    """One of the processes of a run with so many spares, until the run is over or all are told to
    stop. Returns on process 0 what `coordinate` does.

    Raises what `coordinate` does, and `RunError` where this process's machine cannot go on.
    """
    config = load(path, overrides, trust_code=trust_code)
    check_spares(config)
    process = process_info(environment(), rank, world_size, coordinator)
    _check(config, process, spares)
    token = config.node.token or process.token
    machine = MachineProcess(config.node, token, config.timeouts.join, _LEAVE_S, trust_code)
    if process.rank != 0:
        _keep_machine(machine, process, config.timeouts.join, say)
        return None
    bind = listening_on(config, process)
    host = advertised_host(bind, config.node.advertise, process.coordinator_host) or bind
    machines = _FirstMachine(machine, process, host, say)
    try:
        return coordinate(
            path,
            overrides,
            f"{bind}:{process.port}",
            patience_s=config.timeouts.join,
            trust_code=trust_code,
            say=say,
            token=token,
            machines=machines,
        )
    finally:
        machines.close()


def _check(config: Config, process: ProcessInfo, spares: int) -> None:
    wanted = config.world_size + spares
    if process.world_size != wanted:
        raise ConfigError(
            f"{config.world_size} ranks and {spares} spares are {wanted} processes, and "
            f"{process.world_size} were started: start {wanted}, or set --spares to "
            f"{max(0, process.world_size - config.world_size)}"
        )
    if process.coordinator is None and process.store is None:
        raise ConfigError(
            "this process was started as the only one: `dpipe launch --spares` starts its machines "
            "itself"
        )


class _FirstMachine(LocalMachines):
    """That of process 0, which tells the others where the coordinator listens."""

    def __init__(
        self, machine: MachineProcess, process: ProcessInfo, host: str, say: Callable[[str], None]
    ) -> None:
        super().__init__(
            machine,
            1,
            say=say,
            at=host,
            prefix="process-0-",
            first_slot=process.local_rank,
            are_all=False,
        )
        self._publish = process.publish

    def start(self, port: int, folder: Path) -> None:
        self._publish(f"{self._at}:{port}")
        super().start(port, folder)


def _keep_machine(
    machine: MachineProcess, process: ProcessInfo, join_s: float, say: Callable[[str], None]
) -> None:
    """Until the machine ends by itself, which says why. Raises `RunError` where that is a failure,
    or it is killed again and again.
    """
    address = process.find(join_s)
    # A machine that ends with words would say the same again; one that was killed has not spoken.
    with stop_on_signals("this machine hands over, and goes") as wants_stop:
        for attempt in range(_MOST_STARTS):
            name = f"process-{process.rank}-{attempt}"
            code = _wait(machine.start(address, name, process.local_rank), wants_stop)
            if code == 0 or wants_stop():
                return
            how = how_it_ended(code)
            if code > 0:
                raise RunError(f"{name} cannot go on ({how}): its messages are above")
            say(f"{name} has ended ({how}); another takes its place")
    raise RunError(f"the machine of process {process.rank} was killed {_MOST_STARTS} times")


def _wait(machine: "Popen[bytes]", wants_stop: Callable[[], bool]) -> int:
    """Until it has ended; returns its exit code. It is told to leave once this process is told to
    stop.
    """
    is_told = False
    try:
        while machine.poll() is None:
            with suppress(TimeoutExpired):
                machine.wait(_POLL_S)
            # Once: a second SIGTERM would end it before it has handed over.
            if wants_stop() and not is_told:
                is_told = True
                machine.terminate()
        return machine.returncode
    finally:
        if machine.poll() is None:
            kill_group(machine)
