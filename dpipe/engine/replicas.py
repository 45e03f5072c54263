"""Where a rank stands among the replicas, and what keeps them in agreement there.

replica 0     rank 0  1  2  3          along a row: the pipeline's links
replica 1     rank 4  5  6  7          down a column: the links between the replicas of a stage

Where T ranks hold a stage together they take the place of one, side by side, and each has a row and a column of its
own: T = 2 and two stages make the rows 0 2 and 1 3 of replica 0, and 4 6 and 5 7 of replica 1.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch

from dpipe.config import Config
from dpipe.coordinator.base import Coordination
from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.base import DataParallel, Layers
from dpipe.dataparallel.exchange import DirectExchange
from dpipe.dataparallel.feedback import wire
from dpipe.dataparallel.group import TorchGroup
from dpipe.dataparallel.layout import StepRule
from dpipe.dataparallel.local_sgd import LocalSgd, OuterSettings
from dpipe.dataparallel.optimizer import AdamSettings, trained
from dpipe.dataparallel.served import ServedStages
from dpipe.dataparallel.sharded import Sharded
from dpipe.dataparallel.single import Single
from dpipe.engine.serving import Servers, chunk_bytes
from dpipe.errors import JoinError
from dpipe.schedule.plan import Schedule
from dpipe.transport.base import Transport
from dpipe.wire.collective import open_store


@dataclass(frozen=True)
class Seat:
    """Rank `rank` among `num_replicas` pipelines of `num_ranks` places, each of which `tensor_size` ranks share."""

    rank: int = 0
    num_ranks: int = 1
    num_replicas: int = 1
    tensor_size: int = 1

    @property
    def replica(self) -> int:
        return self.rank // self._replica_size

    @property
    def place(self) -> int:
        """The rank in the schedule."""
        return self.rank // self.tensor_size % self.num_ranks

    @property
    def tensor_rank(self) -> int:
        """Which part of its stages is here; that of rank 0 speaks for all where they know the same."""
        return self.rank % self.tensor_size

    @property
    def tensor_ranks(self) -> range:
        """The ranks with the same stages in the same replica."""
        return range(self.rank - self.tensor_rank, self.rank - self.tensor_rank + self.tensor_size)

    @property
    def replica_ranks(self) -> range:
        return range(self.replica * self._replica_size, (self.replica + 1) * self._replica_size)

    @property
    def row(self) -> range:
        """The ranks of this replica that have the same part of their stages, by place."""
        return self.replica_ranks[self.tensor_rank :: self.tensor_size]

    @property
    def column(self) -> range:
        """The ranks with the same part of the same stages, by replica."""
        return range(self.rank % self._replica_size, self._replica_size * self.num_replicas, self._replica_size)

    @property
    def _replica_size(self) -> int:
        return self.num_ranks * self.tensor_size

    def peers(self, schedule: Schedule, *, column: bool = True) -> set[int]:
        """The ranks that this one exchanges anything with; the other replicas' only where they talk to each other."""
        owner, last = schedule.rank_of_stage, schedule.num_stages - 1
        pairs = {(owner[s], owner[s + 1]) for s in range(last)}
        pairs |= {(owner[0], owner[last])} if schedule.tied else set()
        neighbours = {a if b == self.place else b for a, b in pairs if self.place in (a, b) and a != b}
        others = set(self.column) - {self.rank} if column else set()
        return {self.row[place] for place in neighbours} | others


def seat(config: Config, rank: int) -> Seat:
    return Seat(rank, config.pipeline.ranks, config.data_parallel.replicas, config.tensor_parallel.size)


def data_parallel(
    config: Config,
    here: Seat,
    stages: Mapping[int, Layers],
    links: Transport,
    meeting: Coordination,
    uncounted: Collection[str],
    servers: Servers | None = None,
    tied: Collection[str] = (),
) -> DataParallel:
    """What the configuration asks for; `uncounted` names parameters that a norm counts on another rank, `tied` the
    copies of a shared weight."""
    train, chosen = config.train, config.data_parallel
    replayed = config.model.layers == "replay"
    adam = None if replayed else AdamSettings(train.learning_rate, train.weight_decay, train.betas)
    if chosen.replicas == 1:
        return Single(stages, adam, uncounted)

    def exchange(wire_name: str) -> DirectExchange:
        return DirectExchange(links, here.replica, here.column, wire(wire_name), part_bytes=chosen.chunk_bytes)

    lag = int(chosen.delay)
    match chosen.kind:
        case "none":
            raise AssertionError("the configuration lets no replicas through without a kind")
        case "all-reduce":
            averaging = (
                torch_group(config, here, meeting, stages.values())
                if chosen.group == "torch"
                else exchange(chosen.wire)
            )
            return AllReduce(stages, adam, averaging, lag=lag, uncounted=uncounted)
        case "sharded":
            return Sharded(stages, adam, exchange(chosen.wire), exchange("none"), lag=lag, uncounted=uncounted)
        case "parameter-server":
            assert servers is not None, "a parameter server's worker is told where it is"
            rule = StepRule(tuple(here.column), train.weight_decay, train.betas, chosen.wire, chosen.staleness)
            workers = {stage: servers.worker(config, stage, here.replica, here.rank) for stage in stages}
            eager = not (train.clip_norm or train.precision == "fp16")
            size = chunk_bytes(config)
            return ServedStages(stages, rule, workers, eager=eager, chunk_bytes=size, uncounted=uncounted)
        case "local-sgd":
            outer = OuterSettings(
                chosen.inner_steps, chosen.outer_learning_rate, chosen.outer_momentum, overlap=chosen.overlap
            )
            averagings = [exchange(chosen.wire) for _ in range(chosen.fragments)]
            return LocalSgd(stages, adam, outer, averagings, uncounted=uncounted, tied=tied)
    assert_never(chosen.kind)


def torch_group(config: Config, here: Seat, meeting: Coordination, stages: Collection[Layers]) -> TorchGroup:
    """The group of this rank's column. Its first rank opens a store, and says where through the coordinator."""
    timeout_s, first = config.timeouts.transfer, here.column[0]
    host = _host(meeting.addresses[here.rank], here.rank)
    store = open_store(host, 0, timeout_s, master=True) if here.replica == 0 else None
    port = 0 if store is None else store.port
    told = meeting.gather("torch group", str(port).encode()).wait(timeout_s)
    if store is None:
        store = open_store(_host(meeting.addresses[first], first), int(told[first]), timeout_s, master=False)
    group = TorchGroup(
        store,
        here.replica,
        here.num_replicas,
        host=host,
        device=config.node.device,
        wire=config.data_parallel.wire,
        part_bytes=config.data_parallel.chunk_bytes,
        timeout_s=timeout_s,
    )
    meeting.on_abort(group.fail)
    if group.device.type == "cuda":  # at its first use NCCL makes a communicator: not in a step, under other receives
        most = max(sum(p.numel() for _, p in trained(stage)) for stage in stages)
        piece = torch.zeros(min(most, config.data_parallel.chunk_bytes // 4), device=group.device)
        group.average(piece, here.place, lambda piece: None)
    return group


def _host(address: str | None, rank: int) -> str:
    if address is None:
        raise JoinError(
            f'rank {rank} has node.advertise = "none": torch.distributed must reach it; set an address, or leave '
            "data_parallel.group out"
        )
    return address.rpartition(":")[0]
