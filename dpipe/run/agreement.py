"""What keeps the replicas of a stage in agreement: the configured kind of data parallelism,
built.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from dpipe.choices import function_at
from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
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
    """What the configuration asks for; `uncounted` names parameters that a norm counts on another
    rank, `tied` the copies of a shared weight.
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
    agreement: DataParallel
    if kind.has_server:
        assert servers is not None, "the servers have been reached before a rank is built"
        workers = {
            stage: servers.worker(config, stage, here.dp_rank, here.rank) for stage in stages
        }
        agreement = build(setup, workers)
    else:
        agreement = build(setup)
    return agreement


@contextmanager
def attended(agreement: DataParallel, coordinator: Coordination) -> Iterator[None]:
    """`agreement` hears of an abort of the run, and leaves at its end."""
    coordinator.on_abort(agreement.fail)
    yield
    agreement.leave()


def torch_group(
    config: Config, here: ParallelRanks, coordinator: Coordination, stages: Collection[Layers]
) -> TorchGroup:
    """The group of this rank's column. Its first rank opens a store, and says where through the
    coordinator.
    """
    timeout_s = config.timeouts.transfer
    first = here.dp_group[0]
    host = _host(coordinator.addresses[here.rank], here.rank)
    store = open_store(host, 0, timeout_s, master=True) if here.dp_rank == 0 else None
    port = 0 if store is None else store.port
    ports = coordinator.share("torch group", port, timeout_s)
    if store is None:
        store = open_store(
            _host(coordinator.addresses[first], first), ports[first], timeout_s, master=False
        )
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
    if (
        group.device.type == "cuda"
    ):  # at its first use NCCL makes a communicator: not in a step, under other receives
        most = max(sum(p.numel() for _, p in trained(stage)) for stage in stages)
        piece = torch.zeros(min(most, config.data_parallel.chunk_bytes // 4), device=group.device)
        group.average(piece, here.pp_rank, lambda piece: None)
    return group


def _host(address: str | None, rank: int) -> str:
    if address is None:
        raise JoinError(
            f'rank {rank} has node.advertise = "none": torch.distributed must reach it; set an '
            "address, or leave "
            "data_parallel.group out"
        )
    return address.rpartition(":")[0]
