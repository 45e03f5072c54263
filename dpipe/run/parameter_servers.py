"""Where parameter servers live: embedded in ranks of replica 0, or processes of their own (`dpipe
serve`).

    data_parallel.servers   embedded (no data_parallel.address)      by themselves
    one                     in rank 0, for all stages                address = "host:port"
    per-stage               in replica 0, each beside its stages     address = ["host:port", ...]

With tensor parallelism each rank has its own part of a stage on the server; embedded, "per-stage",
it hosts that part itself.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from dpipe.config.load import Config
from dpipe.coordinator.abortable import unless_over
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import EMBEDDED
from dpipe.errors import ConfigError, TransferError
from dpipe.paramserver.server import ParameterServer
from dpipe.paramworker.client import ServerAccess, reach
from dpipe.plan.assumed_network import connections_of
from dpipe.schedule.schedule import Schedule
from dpipe.wire.rpc import Security

_MESSAGE_BYTES = 3 << 20  # of one chunk: with its head it stays below gRPC's limit of 4 MiB


@dataclass(frozen=True)
class ServedEpoch:
    """One of the epochs of a run whose machines come and go, as servers by themselves see it: they
    outlive it, and know the run's token, not that of the epoch's links.
    """

    session: str  # of the run and the epoch: `paramserver.stage_server.Session`
    security: Security


@dataclass(frozen=True)
class Servers:
    """Where the parameters of each stage are, and what this run is called there."""

    session: str
    # HOST:PORT by stage
    addresses: tuple[str, ...]
    security: Security
    part: int = 0  # this rank's tp_rank: which part of a stage it has
    # Workers that end before so many steps are done come back; None: they do not
    num_steps: int | None = None

    def access(self, config: Config, stage: int, replica: int, rank: int) -> ServerAccess:
        return ServerAccess(
            address=self.addresses[stage],
            session=self.session,
            replica=replica,
            rank=rank,
            security=self.security,
            connections=connections_of(config),
            connect_s=config.timeouts.connect,
            timeout_s=config.timeouts.transfer,
            part=self.part,
            num_steps=self.num_steps,
        )


def chunk_bytes(config: Config) -> int:
    """A chunk is one message, so it is bounded by what a message may be."""
    return min(config.data_parallel.chunk_bytes, config.transport.chunk_bytes, _MESSAGE_BYTES)


@contextmanager
def parameter_servers(
    config: Config,
    schedule: Schedule,
    coordinator: Coordination,
    bind: str,
    security: Security,
    epoch: ServedEpoch | None = None,
) -> Iterator[Servers | None]:
    """The run's parameter servers, up and reached by every rank; None where its replicas need none.

    Raises `JoinError` naming one that cannot be reached. One that is embedded here stays until all
    have left it.
    """
    if not config.data_parallel.active_kind.has_server:
        yield None
        return
    rank = coordinator.rank
    hosts = _embedding_ranks(config, schedule, rank)
    # Up before the addresses go round: whoever hears one can call it.
    server = ParameterServer(bind=bind, security=security) if rank in hosts else None
    try:
        servers = _exchange_addresses(config, schedule, coordinator, hosts, server, security)
        if epoch is not None and not hosts:
            servers = replace(
                servers,
                session=epoch.session,
                security=epoch.security,
                num_steps=config.train.steps,
            )
        # one call for each server, whatever stages it has
        stages = {address: stage for stage, address in enumerate(servers.addresses)}
        for stage in stages.values():
            # A server may be away for longer than the run goes on.
            unless_over(coordinator, partial(reach, servers.access(config, stage, 0, rank)))
        yield servers
        # Without a step nobody has come, and nobody will.
        if server is not None and server.standing:
            server.wait_until_left(config.timeouts.transfer)
    finally:
        if server is not None:
            server.close()


def _embedding_ranks(config: Config, schedule: Schedule, rank: int) -> list[int]:
    """By stage, the rank that embeds the server of this rank's part of it; [] where servers are
    processes of their own.
    """
    if config.data_parallel.address:
        return []
    if config.data_parallel.servers == "one":
        return [0] * schedule.num_stages
    size = config.tensor_parallel.size
    tp_rank = rank % size
    return [pp_rank * size + tp_rank for pp_rank in schedule.rank_of_stage]


def _exchange_addresses(
    config: Config,
    schedule: Schedule,
    coordinator: Coordination,
    hosts: list[int],
    server: ParameterServer | None,
    security: Security,
) -> Servers:
    """All ranks say which server they embed; rank 0 names the run."""
    port = None if server is None else server.port
    mine = {"session": secrets.token_hex(8), "port": port}
    everybody = coordinator.share("parameter servers", mine, config.timeouts.join, EMBEDDED)
    addresses = config.data_parallel.address
    if hosts:
        listening = (coordinator.addresses[host] for host in hosts)
        ports = (everybody[host].port for host in hosts)
        addresses = tuple(map(_beside, listening, ports, hosts))
    elif len(addresses) == 1:
        addresses *= schedule.num_stages
    tp_rank = coordinator.rank % config.tensor_parallel.size
    return Servers(everybody[0].session, addresses, security, tp_rank)


def _beside(listening: str | None, port: int | None, rank: int) -> str:
    """A server listens on the host where its rank does."""
    if port is None:
        raise TransferError(f"rank {rank} sent no port of the parameter server that it embeds")
    if listening is None:
        raise ConfigError(
            f"rank {rank} would host a parameter server, but node.advertise is none there: nobody "
            "can reach it; run `dpipe serve` where all can, and set data_parallel.address"
        )
    host, _, _ = listening.rpartition(":")
    return f"{host}:{port}"
