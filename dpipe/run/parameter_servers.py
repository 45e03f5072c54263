"""Where parameter servers live: embedded in ranks of replica 0, or processes of their own (`dpipe
serve`).

    data_parallel.servers   embedded (no data_parallel.address)      by themselves
    one                     in rank 0, for all stages                address = "host:port"
    per-stage               in replica 0, each beside its stages     address = ["host:port", ...]

With tensor parallelism each rank has its own part of a stage on the server; embedded, "per-stage",
it hosts that part itself.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpipe.config.load import Config, load
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import EMBEDDED
from dpipe.dataparallel.kinds import KINDS, names_where
from dpipe.errors import ConfigError, InputError, RunError, TransferError
from dpipe.paramserver.journal import REMEDY
from dpipe.paramserver.server import ParameterServer
from dpipe.paramworker.client import ServerAccess, reach
from dpipe.plan.assumed_network import connections_of
from dpipe.processes.environment import environment
from dpipe.processes.signals import stop_on_signals
from dpipe.run.join import address_toward
from dpipe.schedule.schedule import Schedule
from dpipe.store import checkpoint
from dpipe.store.run_folder import absent, held
from dpipe.wire.rpc import Security

LOG = logging.getLogger("dpipe")
_POLL_S = 1.0  # between looks at whether a signal has come
_MESSAGE_BYTES = 3 << 20  # of one chunk: with its head it stays below gRPC's limit of 4 MiB

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Servers:
    """Where the parameters of each stage are, and what this run is called there."""

    session: str
    # HOST:PORT by stage
    addresses: tuple[str, ...]
    security: Security
    part: int = 0  # this rank's tp_rank: which part of a stage it has

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
        )


def chunk_bytes(config: Config) -> int:
    """A chunk is one message, so it is bounded by what a message may be."""
    return min(config.data_parallel.chunk_bytes, config.transport.chunk_bytes, _MESSAGE_BYTES)


@contextmanager
def parameter_servers(
    config: Config, schedule: Schedule, coordinator: Coordination, bind: str, security: Security
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
        # one call for each server, whatever stages it has
        stages = {address: stage for stage, address in enumerate(servers.addresses)}
        for stage in stages.values():
            reach(servers.access(config, stage, 0, rank))
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


class FolderSnapshots:
    """`paramserver.journal.Snapshots`: checkpoints of one stage, by `store/checkpoint.py`."""

    def save(
        self, folder: Path, step: int, tensors: Tensors, moments: Tensors, state: Mapping[str, Any]
    ) -> None:
        checkpoint.save(
            str(folder),
            step,
            0,
            tensors,
            moments,
            state,
            lambda part: [part],  # one process: it shares with itself
            keep=1,
            remedy=REMEDY,
        )

    def load(self, folder: Path) -> tuple[int, Tensors, Tensors, Mapping[str, Any]] | None:
        if checkpoint.latest(str(folder)) is None:
            return None
        loaded = checkpoint.load(str(folder), lambda name: True)
        return loaded.step, loaded.tensors, loaded.optimizer, loaded.state


def serve_parameters(
    path: str, overrides: tuple[str, ...], bind: str | None, say: Callable[[str], None]
) -> None:
    """A parameter server by itself, until every worker has left it or it is asked to stop.

    Raises `RunError` once a stage cannot go on: started again, the server goes on at the last step
    that it kept.
    """
    # a server runs no layers
    config = load(path, overrides, trust_code=True)
    if not KINDS[config.data_parallel.kind].has_server:
        raise ConfigError(
            f'data_parallel.kind is "{config.data_parallel.kind}", so that no worker would ever '
            f"come; set it to {names_where(lambda kind: kind.has_server)}, here and for the workers"
        )
    host, port = _bind(config, bind)
    node = config.node
    folder = _state_folder(config, host, port)
    token = node.token or environment().get("DPIPE_TOKEN", "")
    security = Security.load(token, node.tls_cert, node.tls_key, node.tls_ca, node.token_file)
    torch.set_num_threads(node.threads)  # it steps all stages: this is its compute
    stopping = stop_on_signals("stopping; every acknowledged step is kept")
    with _state_held(folder), stopping as wants_stop:
        server = ParameterServer(
            bind=host, port=port, security=security, folder=folder, snapshots=FolderSnapshots()
        )
        try:
            kept = [f"; stage {stage} is at step {step}" for stage, step in server.standing.items()]
            say(f"parameter server at {host}:{server.port}, state in {folder}{''.join(kept)}")
            # In pieces, because a signal is only noted, and wakes nobody.
            while not (wants_stop() or server.failure or server.wait_until_left(_POLL_S)):
                pass
        finally:
            server.close()
    if server.failure is not None:
        raise RunError(f"{server.failure}; start it again to continue") from server.failure
    say("stopped; start it again to continue" if wants_stop() else "all workers have left")


def _state_folder(config: Config, host: str, port: int) -> Path:
    """Where a server keeps its state; one of several has a folder of its own, or it would take up
    the others' stages when it is started again, and wait for workers that never come to it.
    """
    folder = Path(config.run.folder) / "server"
    if config.data_parallel.servers == "one":
        return folder
    return folder / f"{host}-{port}"


@contextmanager
def _state_held(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`: two servers would remove each other's steps. The folders made for
    one that cannot start are removed again.
    """
    created = absent(folder)
    lock = folder / "lock"  # a file of its own: those of the state are replaced by others
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; set another run.folder") from None
    taken = (
        f"another parameter server has its state in {folder}; give this one a run.folder of its own"
    )
    with held(lock, taken):
        try:
            yield
        except InputError:
            lock.unlink(missing_ok=True)
            for path in created:
                # It fails where another server has put something in it.
                with suppress(OSError):
                    path.rmdir()
            raise


def _bind(config: Config, bind: str | None) -> tuple[str, int]:
    """Host and port to listen on: those of `bind`, else of the one address that workers call."""
    addresses = config.data_parallel.address
    if bind is None and len(addresses) != 1:
        raise ConfigError(
            "no address to listen on: give --bind HOST:PORT, or set data_parallel.address to one "
            "HOST:PORT"
        )
    host, _, port = (addresses[0] if bind is None else bind).rpartition(":")
    if bind is None:
        host = config.node.bind or address_toward(host)
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--bind {bind!r} must be HOST:PORT, such as 0.0.0.0:7100")
    return host, int(port)
