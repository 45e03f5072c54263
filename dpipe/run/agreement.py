"""Builds the configured kind of data parallelism for a rank, from `dataparallel/kinds.py`."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from dpipe.choices import function_at
from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import STORE_PORT
from dpipe.dataparallel.base import DataParallel, Layers
from dpipe.dataparallel.optimizer import AdamSettings, trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.dataparallel.torch_group import TorchGroup
from dpipe.errors import JoinError
from dpipe.ranks import ParallelRanks
from dpipe.run.parameter_servers import Servers, chunk_bytes
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
) -> DataParallel:
    """The configured kind; with one replica, plain AdamW.

    `uncounted` names parameters that another rank counts in the norm of the gradient, `tied` the
    copies of a shared weight. `servers` is needed where the kind has a server.
    """
    train = config.train
    kind = config.data_parallel.active_kind
    setup = ReplicaSetup(
        stages=stages,
        adam=AdamSettings(train.learning_rate, train.weight_decay, train.betas),
        learns=config.model.family.computes,
        options=config.data_parallel,
        replica=here.dp_rank,
        ranks=here.dp_group,
        links=links,
        open_torch_group=partial(torch_group, config, here, coordinator, stages.values()),
        waits_for_verdict=train.waits_for_verdict,
        message_bytes=chunk_bytes(config),
        uncounted=uncounted,
        tied=tied,
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
    return built


@contextmanager
def attended(agreement: DataParallel, coordinator: Coordination) -> Iterator[None]:
    """Passes an abort of the run on to `agreement`, and lets it leave at the run's end."""
    coordinator.on_abort(agreement.fail)
    yield
    agreement.leave()  # not after an error: what this rank has left undone, others may wait for


def torch_group(
    config: Config,
    here: ParallelRanks,
    coordinator: Coordination,
    stages: Collection[Layers],
) -> TorchGroup:
    """The torch.distributed group of this rank's DP group. Its first rank opens a store, and
    shares the port through the coordinator. Raises `JoinError` where a rank has no address.
    """
    timeout_s = config.timeouts.transfer
    first = here.dp_group[0]
    host = _host(coordinator.addresses[here.rank], here.rank)
    # In both branches this rank shares: a gather is complete when every rank has given its part.
    if here.dp_rank == 0:
        store = open_store(host, 0, timeout_s, master=True)
        coordinator.share("torch group", store.port, timeout_s, STORE_PORT)
    else:
        ports = coordinator.share("torch group", 0, timeout_s, STORE_PORT)
        store_host = _host(coordinator.addresses[first], first)
        store = open_store(store_host, ports[first], timeout_s, master=False)
    group = TorchGroup(
        store,
        here.dp_rank,
        here.dp_size,
        host=host,
        device=config.node.device,
        wire=config.data_parallel.wire,
        part_bytes=config.data_parallel.chunk_bytes,
        timeout_s=timeout_s,
    )
    coordinator.on_abort(group.fail)
    if group.device.type == "cuda":
        _warm_up(group, here.pp_rank, stages, config.data_parallel.chunk_bytes)
    return group


def _warm_up(
    group: TorchGroup,
    pp_rank: int,
    stages: Collection[Layers],
    part_bytes: int,
) -> None:
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
