"""Tensor-parallel groups: how their ranks find each other, and what they send to the next
stage's.
"""

import socket
from collections.abc import Mapping, Sequence

from dpipe.config.load import Config
from dpipe.coordinator.abortable import unless_over
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import PLACE
from dpipe.errors import ConfigError
from dpipe.processes.neighbours import machine
from dpipe.ranks import ParallelRanks
from dpipe.stage.base import ComputingStage, PipelineStage
from dpipe.stage.scatter import Scattered
from dpipe.stage.tensor_group import TensorGroup
from dpipe.wire.collective import open_store

_LOOPBACK = "127.0.0.1"  # a group is on one machine, or is refused


def tensor_group(
    config: Config, here: ParallelRanks, coordinator: Coordination
) -> TensorGroup | None:
    """This rank's tensor-parallel group; None for one rank, and for a replay, whose ranks exchange
    over the run's links (`replay_ring.py`).

    The group's first rank opens a store, and tells the others its port through the coordinator: all
    ranks call this. Raises `ConfigError` on every rank if some group is not on one machine.
    """
    if here.tp_size == 1 or not config.model.family.computes:
        return None
    timeout_s = config.timeouts.transfer
    own_store = None
    # Open before its port goes round. A replay never gets here, so that all ranks or none share.
    if here.tp_rank == 0:
        own_store = open_store(_LOOPBACK, 0, timeout_s, master=True)
    own = {
        "machine": machine(),
        "name": socket.gethostname(),
        "port": 0 if own_store is None else own_store.port,
    }
    # All ranks of the run, not of the group: every one refuses a group that is spread out.
    shared = coordinator.share("tensor groups", own, timeout_s, PLACE)
    ranks = [place.model_dump() for place in shared]
    refuse_apart(ranks, here.tp_size)
    port = ranks[here.tp_group[0]]["port"]

    def opened() -> TensorGroup:
        return TensorGroup(
            own_store or open_store(_LOOPBACK, port, timeout_s, master=False),
            here.tp_group,
            here.tp_rank,
            host=_LOOPBACK,
            sequence=config.tensor_parallel.sequence_parallel,
            device=config.node.device,
            timeout_s=timeout_s,
        )

    # Torch waits for a rank that is gone until its timeout.
    group = unless_over(coordinator, opened)
    coordinator.on_abort(group.fail)
    return group


def refuse_apart(ranks: Sequence[Mapping[str, object]], size: int) -> None:
    """Raises `ConfigError` naming ranks of one group that are on two machines; `ranks` has the
    `machine` and host `name` of each rank.
    """
    for number, rank in enumerate(ranks):
        first = number - number % size
        if rank["machine"] != ranks[first]["machine"]:
            raise ConfigError(
                f"tensor_parallel.size {size} puts ranks {first} to {first + size - 1} on one "
                f"machine, but rank {first} is on {ranks[first]['name']} and rank {number} is not "
                f"there: it is on {rank['name']}, or in another network namespace; start a "
                f"multiple of {size} ranks on each machine, in the order of ranks"
            )


def as_executed(
    config: Config, stages: Mapping[int, PipelineStage], group: TensorGroup | None, num_stages: int
) -> Mapping[int, ComputingStage]:
    """The stages as the executor sees them: `Scattered` with tensor_parallel.scatter_gather.

    With sequence parallelism a rank has only its positions of an activation: nothing to scatter.
    """
    settings = config.tensor_parallel
    if group is None or settings.sequence_parallel or not settings.scatter_gather:
        return stages
    return {
        index: Scattered(stage, group, first=index == 0, last=index == num_stages - 1)
        for index, stage in stages.items()
    }
