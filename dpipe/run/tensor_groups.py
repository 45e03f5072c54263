"""The ranks that hold a stage together: how they find each other, and what they send to those of
the next stage.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.errors import ConfigError
from dpipe.ranks import ParallelRanks
from dpipe.stage.replay import ReplayStage
from dpipe.stage.scatter import Scattered
from dpipe.stage.stage import Stage
from dpipe.stage.tensor_group import TensorGroup
from dpipe.wire.collective import open_store

_LOOPBACK = "127.0.0.1"  # they are on one machine, or are refused


def tensor_group(
    config: Config, here: ParallelRanks, coordinator: Coordination
) -> TensorGroup | None:
    """This rank's group, where there is one. Its first rank opens a store, and says where through
    the coordinator.

    Raises `ConfigError` on every rank where some group is not on one machine.
    """
    if (
        here.tp_size == 1 or not config.model.family.computes
    ):  # which has links instead (`replayed.py`)
        return None
    timeout_s = config.timeouts.transfer
    store = open_store(_LOOPBACK, 0, timeout_s, master=True) if here.tp_rank == 0 else None
    own = {"machine": machine(), "name": socket.gethostname(), "port": store.port if store else 0}
    told = coordinator.share("tensor groups", own, timeout_s)
    refuse_apart(told, here.tp_size)
    group = TensorGroup(
        store or open_store(_LOOPBACK, told[here.tp_group[0]]["port"], timeout_s, master=False),
        here.tp_group,
        here.tp_rank,
        host=_LOOPBACK,
        sequence=config.tensor_parallel.sequence_parallel,
        device=config.node.device,
        timeout_s=timeout_s,
    )
    coordinator.on_abort(group.fail)
    return group


def machine() -> str:
    """What processes that reach each other over loopback have in common: the running kernel, and
    its network.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/net')}"


def refuse_apart(told: Sequence[Mapping[str, object]], size: int) -> None:
    """Raises `ConfigError` naming ranks of one group that are on two machines; `told` has one
    `machine` a rank.
    """
    for rank, other in enumerate(told):
        first = rank - rank % size
        if other["machine"] != told[first]["machine"]:
            raise ConfigError(
                f"tensor_parallel.size {size} puts ranks {first} to {first + size - 1} on one "
                "machine, but rank "
                f"{first} is on {told[first]['name']} and rank {rank} is not there: it is on "
                f"{other['name']}, or in "
                f"another network namespace; start a multiple of {size} ranks on each machine, in "
                "the order of ranks"
            )


def as_executed(
    config: Config,
    stages: Mapping[int, Stage | ReplayStage],
    group: TensorGroup | None,
    num_stages: int,
) -> Mapping[int, Stage | ReplayStage | Scattered]:
    """The stages as the executor sees them. Positions that are split are part of an activation
    already.
    """
    chosen = config.tensor_parallel
    if group is None or chosen.sequence_parallel or not chosen.scatter_gather:
        return stages
    return {
        index: Scattered(stage, group, first=index == 0, last=index == num_stages - 1)
        for index, stage in stages.items()
        if isinstance(stage, Stage)
    }
