"""Builds the configured kind of data parallelism for a rank, from `dataparallel/kinds.py`."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from dpipe.choices import function_at
from dpipe.config.load import Config
from dpipe.coordinator.abortable import unless_over
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import STORE_PORT
from dpipe.dataparallel.base import DataParallel, Layers
from dpipe.dataparallel.by_segment import BySegment, SomeLayers
from dpipe.dataparallel.optimizer import trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.dataparallel.torch_group import TorchGroup
from dpipe.errors import JoinError
from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.ranks import ParallelRanks
from dpipe.run.parameter_servers import Servers, chunk_bytes
from dpipe.schedule.segments import on_stage, segments_of
from dpipe.transport.base import Transport
from dpipe.wire.collective import open_store


def data_parallel(
    config: Config,
    here: ParallelRanks,
    stages: Mapping[int, Layers],
    links: Transport,
    coordinator: Coordination,
    uncounted: Collection[str],
    servers: Servers | None = None,
    tied: Collection[str] = (),
    *,
    last_layer: int | None = None,
) -> DataParallel:
    """The configured kind; with one replica, the optimizer alone.

    `last_layer` is the number of the model's last. `uncounted` names parameters that another rank
    counts in the norm of the gradient, `tied` the copies of a shared weight. `servers` is needed
    where the kind has a server.
    """
    kind = config.data_parallel.active_kind
    segments = _segments(config, here, stages)
    setup = ReplicaSetup(
        stages=segments.held or stages,
        settings=_settings(config, last_layer),
        learns=config.model.family.computes,
        options=config.data_parallel,
        replica=here.dp_rank,
        ranks=here.dp_group,
        links=links,
        open_torch_group=partial(torch_group, config, here, coordinator, stages.values()),
        waits_for_verdict=config.train.waits_for_verdict,
        message_bytes=chunk_bytes(config),
        uncounted=uncounted,
        tied=tied,
        ranks_by_stage=segments.ranks,
    )
    build = function_at(kind.builder)
    built: DataParallel
    if kind.has_server:
        assert servers is not None, "the servers have been reached before a rank is built"
        accesses = {
            stage: servers.access(config, stage, here.dp_rank, here.rank) for stage in stages
        }
        built = build(setup, accesses)
    else:
        built = build(setup)
    return BySegment(built, segments.by_stage) if segments.held else built


def _settings(config: Config, last_layer: int | None) -> OptimizerSettings:
    train = config.train
    return OptimizerSettings(
        train.learning_rate,
        train.weight_decay,
        train.betas,
        name=train.optimizer,
        last_layer=last_layer,
    )


@dataclass
class _Segments:
    """What this rank exchanges where replicas are cut differently; empty where they are not."""

    by_stage: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # By segment: its layers, and who holds them in each replica.
    held: dict[int, Layers] = field(default_factory=dict)
    ranks: dict[int, list[int]] = field(default_factory=dict)


def _segments(config: Config, here: ParallelRanks, stages: Mapping[int, Layers]) -> _Segments:
    found = _Segments()
    # No cuts, no segments: stages are exchanged whole, among the ranks of a DP group.
    every = segments_of(config.pipeline.splits) if config.pipeline.splits else ()
    for stage, layers in stages.items():
        numbers = on_stage(every, here.dp_rank, stage)
        found.by_stage[stage] = numbers
        for number in numbers:
            found.held[number] = SomeLayers(layers, every[number].layers)
            found.ranks[number] = here.holders(every[number].stages)
    return found


@contextmanager
def attended(agreement: DataParallel, coordinator: Coordination) -> Iterator[None]:
    """Passes an abort of the run on to `agreement`, and lets it leave at the run's end."""
    coordinator.on_abort(agreement.fail)
    yield
    agreement.leave()  # not after an error: what this rank has left undone, others may wait for


def torch_group(
    config: Config, here: ParallelRanks, coordinator: Coordination, stages: Collection[Layers]
) -> TorchGroup:
    """The torch.distributed group of this rank's DP group. Its first rank opens a store, and
    shares the port through the coordinator. Raises `JoinError` where a rank has no address.
    """
    timeout_s = config.timeouts.transfer
    first = here.dp_group[0]
    host = _host(coordinator.addresses[here.rank], here.rank)
    own_store = None
    # Open before its port goes round.
    if here.dp_rank == 0:
        own_store = open_store(host, 0, timeout_s, master=True)
    port = 0 if own_store is None else own_store.port
    # All ranks of the run: a gather is complete when every rank has given its part.
    ports = coordinator.share("torch group", port, timeout_s, STORE_PORT)
    store_host = _host(coordinator.addresses[first], first)

    def opened() -> TorchGroup:
        return TorchGroup(
            own_store or open_store(store_host, ports[first], timeout_s, master=False),
            here.dp_rank,
            here.dp_size,
            host=host,
            device=config.node.device,
            wire=config.data_parallel.wire,
            part_bytes=config.data_parallel.chunk_bytes,
            timeout_s=timeout_s,
        )

    # Torch waits for a replica that is gone until its timeout.
    group = unless_over(coordinator, opened)
    coordinator.on_abort(group.fail)
    if group.device.type == "cuda":
        _warm_up(group, here.pp_rank, stages, config.data_parallel.chunk_bytes)
    return group


def _warm_up(group: TorchGroup, pp_rank: int, stages: Collection[Layers], part_bytes: int) -> None:
    """NCCL makes its communicator at its first use. In a step that would wait for receives in
    progress, and they for it.
    """
    most = max(sum(p.numel() for _, p in trained(stage)) for stage in stages)
    part = torch.zeros(min(most, part_bytes // 4), device=group.device)
    group.average(part, pp_rank, lambda piece: None)


def _host(address: str | None, rank: int) -> str:
    if address is None:
        raise JoinError(
            f'rank {rank} has node.advertise = "none": torch.distributed must reach it; set an '
            "address, or leave data_parallel.group out"
        )
    host, _, _ = address.rpartition(":")
    return host
