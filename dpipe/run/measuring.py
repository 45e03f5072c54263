"""`dpipe measure`: this machine among the others, or alone. Rank 0 writes what they are."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from dpipe.config.load import Config, load
from dpipe.coordinator.alone import Alone
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.client import Coordinator
from dpipe.errors import ConfigError, RunAborted
from dpipe.machines.file import save_machines
from dpipe.measure.connections import Connections
from dpipe.measure.found import MeasuredCluster, measured_alone
from dpipe.measure.measure import Measuring
from dpipe.measure.reports import NAME, MachineReport
from dpipe.measure.this_machine import describe_this_machine
from dpipe.plan.on_machines import digest_of_layers
from dpipe.plan.run_plan import check_device, local_device, make_model
from dpipe.processes.environment import ProcessInfo, environment, process_info
from dpipe.run.join import coordinated, listening_on, security_of

Say = Callable[[str], None]


def measure_to_file(
    path: str,
    overrides: Sequence[str],
    *,
    out: Path,
    rank: int | None,
    world_size: int | None,
    coordinator: str | None,
    alone: bool,
    timeout_s: float | None,
    name: str | None,
    price_per_hour: float | None,
    micro_batch_sizes: Sequence[int],
    trust_code: bool,
    say: Say,
) -> MeasuredCluster:
    """This process's part; on rank 0 the file `out` is there afterwards. Raises `InputError` for
    what can be wrong before anybody is met, and `RunError` where a rank is lost.
    """
    config = load(path, overrides, trust_code=trust_code)
    process = ProcessInfo()
    if not alone:
        process = process_info(environment(), rank, world_size, coordinator)
    if process.local_rank > 0:
        raise ConfigError(
            "two processes measure one machine, and each makes the other slower: start one "
            "dpipe measure on each machine"
        )
    if name is not None and not re.fullmatch(NAME, name):
        raise ConfigError(
            f"--name {name!r:.100}: at most 90 letters, digits, dots, colons, hyphens and "
            "underscores"
        )
    if process.rank == 0:
        _refuse_file(out)
    else:
        say = silent
    sizes = tuple(sorted(set(micro_batch_sizes))) or (config.microbatch_size,)
    with measuring(
        config,
        process,
        micro_batch_sizes=sizes,
        name=name,
        price_per_hour=price_per_hour,
        join_s=timeout_s,
        say=say,
    ) as (_, measured):
        if process.rank == 0:
            save_machines(measured.cluster, out, comments=measured.problems)
            _sum_up(measured, out, say)
    return measured


@contextmanager
def measuring(
    config: Config,
    process: ProcessInfo,
    *,
    micro_batch_sizes: tuple[int, ...],
    name: str | None = None,
    price_per_hour: float | None = None,
    join_s: float | None = None,
    say: Say = lambda text: None,
) -> Iterator[tuple[Coordination, MeasuredCluster]]:
    """What was measured, while the ranks are still together. Raises as `measure_to_file` does."""
    torch.set_num_threads(config.node.threads)
    check_device(local_device(config.node.device, 0))
    # For its errors, before anybody is met.
    if config.model.family.computes:
        make_model(config)

    def here() -> MachineReport:
        say("measuring what the layers take")
        return describe_this_machine(config, micro_batch_sizes, name, price_per_hour)

    if process.world_size == 1:
        yield Alone(), measured_alone(here(), digest_of_layers(config))
        return
    shared = {**config.shared(), "--micro-batch-size": micro_batch_sizes}
    with _joined(config, process, join_s, shared) as (coordinator, connections):
        part = Measuring(
            coordinator,
            connections,
            connect_s=config.timeouts.connect,
            wait_s=config.timeouts.transfer,
            say=say,
        )
        yield coordinator, part.run(here(), digest_of_layers(config))


@contextmanager
def _joined(
    config: Config, process: ProcessInfo, join_s: float | None, shared: dict[str, object]
) -> Iterator[tuple[Coordinator, Connections]]:
    """An error inside ends the measurement on all ranks."""
    security = security_of(config, process)
    # They listen first: this rank tells the coordinator at which port.
    connections = Connections(
        process.rank, bind=listening_on(config, process), port=config.node.port, security=security
    )
    timeout_s = config.timeouts.join if join_s is None else join_s
    with (
        closing(connections),
        coordinated(config, process, security, timeout_s, connections.port, shared) as coordinator,
    ):
        try:
            yield coordinator, connections
        except RunAborted:
            raise  # the coordinator has said it itself
        except BaseException as error:
            coordinator.abort(f"{type(error).__name__}: {error}")
            raise
        coordinator.leave()


def silent(text: str) -> None:
    """On all ranks but one: they would say the same."""


def _refuse_file(out: Path) -> None:
    """Before minutes of measuring: what cannot be written, or would be lost."""
    if out.exists():
        raise ConfigError(
            f"{out} exists, and may have been edited by hand: move it away, or name another file "
            "(--out)"
        )
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out} cannot be written: there is no folder {out.parent}")


def _sum_up(measured: MeasuredCluster, out: Path, say: Say) -> None:
    cluster = measured.cluster
    for line in measured.problems:
        say(line)
    say(f"wrote {out}: {len(cluster.machines)} machines, {len(cluster.links)} links")
