"""What keeps the replicas of a stage in agreement: the configured kind of data parallelism,
built.
"""

from collections.abc import Collection, Mapping
from typing import assert_never

import torch

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.base import DataParallel, Layers
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.feedback import wire
from dpipe.dataparallel.local_sgd import LocalSgd, OuterSettings
from dpipe.dataparallel.optimizer import AdamSettings, trained
from dpipe.dataparallel.sharded import Sharded
from dpipe.dataparallel.single import Single
from dpipe.dataparallel.torch_group import TorchGroup
from dpipe.errors import JoinError
from dpipe.paramserver.kind import ServedStages
from dpipe.paramserver.spec import StepRule
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
    chosen = config.data_parallel
    replayed = not config.model.family.computes
    adam = None if replayed else AdamSettings(train.learning_rate, train.weight_decay, train.betas)
    if chosen.replicas == 1:
        return Single(stages, adam, uncounted)

    def exchange(wire_name: str) -> DirectExchange:
        return DirectExchange(
            links, here.dp_rank, here.dp_group, wire(wire_name), part_bytes=chosen.chunk_bytes
        )

    lag = int(chosen.delay)
    match chosen.kind:
        case "none":
            raise AssertionError("the configuration lets no replicas through without a kind")
        case "all-reduce":
            averaging = (
                torch_group(config, here, coordinator, stages.values())
                if chosen.group == "torch"
                else exchange(chosen.wire)
            )
            return AllReduce(stages, adam, averaging, lag=lag, uncounted=uncounted)
        case "sharded":
            return Sharded(
                stages, adam, exchange(chosen.wire), exchange("none"), lag=lag, uncounted=uncounted
            )
        case "parameter-server":
            assert servers is not None, "a parameter server's worker is told where it is"
            rule = StepRule(
                tuple(here.dp_group), train.weight_decay, train.betas, chosen.wire, chosen.staleness
            )
            workers = {
                stage: servers.worker(config, stage, here.dp_rank, here.rank) for stage in stages
            }
            eager = not (train.clip_norm or train.precision == "fp16")
            size = chunk_bytes(config)
            return ServedStages(
                stages, rule, workers, eager=eager, chunk_bytes=size, uncounted=uncounted
            )
        case "local-sgd":
            outer = OuterSettings(
                chosen.inner_steps,
                chosen.outer_learning_rate,
                chosen.outer_momentum,
                overlap=chosen.overlap,
            )
            averagings = [exchange(chosen.wire) for _ in range(chosen.fragments)]
            return LocalSgd(stages, adam, outer, averagings, uncounted=uncounted, tied=tied)
    assert_never(chosen.kind)


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
