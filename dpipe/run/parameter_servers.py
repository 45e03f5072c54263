"""Where parameter servers live: embedded in ranks of replica 0, or processes of their own (`dpipe
serve`).

data_parallel.servers    embedded (no data_parallel.address)          by themselves
one                      in rank 0, for all stages                    address = "host:port"
per-stage                in each rank of replica 0, for its stages    address = ["host:port", ... one a stage]

Where several ranks of a replica hold a stage together, each has its own part on the server, as a
row of its own.
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
from dpipe.dataparallel.kinds import KINDS, names_where
from dpipe.errors import ConfigError, InputError, RunError
from dpipe.paramserver.client import ServerAccess, reach
from dpipe.paramserver.journal import REMEDY
from dpipe.paramserver.server import ParameterServer
from dpipe.plan.assumed_network import connections_of
from dpipe.run.environment import environment
from dpipe.run.join import address_toward
from dpipe.run.signals import stop_on_signals
from dpipe.schedule.schedule import Schedule
from dpipe.store import checkpoint
from dpipe.store.run_folder import absent, held
from dpipe.wire.rpc import Security

LOG = logging.getLogger("dpipe")
_LOOK_S = 1.0
_MESSAGE_BYTES = 3 << 20  # of one chunk: it fits gRPC's limit whatever stands before it

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Servers:
    """Where the parameters of each stage are, and what this run is called there."""

    session: str
    addresses: tuple[str, ...]
    security: Security
    part: int = 0  # which of a stage's parts this rank has

    def worker(self, config: Config, stage: int, replica: int, rank: int) -> ServerAccess:
        return ServerAccess(
            self.addresses[stage],
            self.session,
            replica,
            rank,
            self.security,
            connections_of(config),
            config.timeouts.connect,
            config.timeouts.transfer,
            self.part,
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
    chosen = config.data_parallel
    rank = coordinator.rank
    if not chosen.active_kind.has_server:
        yield None
        return
    embedded = not chosen.address
    size = config.tensor_parallel.size
    hosts = [
        0 if chosen.servers == "one" else place * size + rank % size
        for place in schedule.rank_of_stage
    ]
    server = ParameterServer(bind=bind, security=security) if embedded and rank in hosts else None
    try:
        told = {"session": secrets.token_hex(8), "port": None if server is None else server.port}
        everybody = coordinator.share("parameter servers", told, config.timeouts.join)
        if embedded:
            addresses = tuple(
                _beside(coordinator.addresses[host], everybody[host]["port"], host)
                for host in hosts
            )
        else:
            addresses = (
                chosen.address if len(chosen.address) > 1 else chosen.address * schedule.num_stages
            )
        servers = Servers(everybody[0]["session"], addresses, security, rank % size)
        for stage in {address: stage for stage, address in enumerate(addresses)}.values():
            reach(servers.worker(config, stage, 0, rank))
        yield servers
        if server is not None and server.standing:  # nobody comes where no step was left to do
            server.wait_until_left(config.timeouts.transfer)
    finally:
        if server is not None:
            server.close()


def _beside(links: str | None, port: int, rank: int) -> str:
    """A server listens beside the links of its rank."""
    if links is None:
        raise ConfigError(
            f"rank {rank} would host a parameter server, but node.advertise is none there: nobody "
            "can reach it; run "
            "`dpipe serve` where all can, and set data_parallel.address"
        )
    return f"{links.rpartition(':')[0]}:{port}"


class FolderSnapshots:
    """Checkpoints of one stage, in the engine's format."""

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
            lambda part: [part],
            keep=1,
            remedy=REMEDY,
        )

    def load(self, folder: Path) -> tuple[int, Tensors, Tensors, Mapping[str, Any]] | None:
        if checkpoint.latest(str(folder)) is None:
            return None
        found = checkpoint.load(str(folder), lambda name: True)
        return found.step, found.tensors, found.optimizer, found.state


def serve_parameters(
    path: str, overrides: tuple[str, ...], bind: str | None, say: Callable[[str], None]
) -> None:
    """A parameter server by itself, until every worker has left it or it is asked to stop.

    Raises `RunError` once a stage cannot go on: started again, the server goes on at the last step
    that it kept.
    """
    config = load(path, overrides)
    if not KINDS[config.data_parallel.kind].has_server:
        raise ConfigError(
            f'data_parallel.kind is "{config.data_parallel.kind}", so that no worker would ever '
            f"come; set it to {names_where(lambda kind: kind.has_server)}, here and for the workers"
        )
    host, port = _bind(config, bind)
    node = config.node
    folder = _state_folder(config, host, port)
    token = node.token or environment().get("DPIPE_TOKEN", "")
    security = Security.load(token, node.tls_cert, node.tls_key, node.tls_ca)
    torch.set_num_threads(node.threads)
    stopping = stop_on_signals("stopping; every step that workers were told of is kept")
    with _state_held(folder), stopping as wants_stop:
        server = ParameterServer(
            bind=host, port=port, security=security, folder=folder, snapshots=FolderSnapshots()
        )
        try:
            kept = "".join(
                f"; stage {stage} is at step {step}" for stage, step in server.standing.items()
            )
            say(f"parameter server at {host}:{server.port}, state in {folder}{kept}")
            while not (wants_stop() or server.failure or server.wait_until_left(_LOOK_S)):
                pass
        finally:
            server.close()  # who waits for what failed has been told by then
    if server.failure is not None:
        raise RunError(f"{server.failure}; start it again to go on") from server.failure
    say("stopped; start it again to go on" if wants_stop() else "all workers have left")


def _state_folder(config: Config, host: str, port: int) -> Path:
    """Where a server keeps its state; one of several has a folder of its own, or it would take up
    the others' stages when it is started again, and wait for workers that never come to it.
    """
    folder = Path(config.run.folder) / "server"
    return folder if config.data_parallel.servers == "one" else folder / f"{host}-{port}"


@contextmanager
def _state_held(folder: Path) -> Iterator[None]:
    """Two servers would remove each other's steps. What was made for one that cannot start is
    removed again.
    """
    made = absent(folder)
    lock = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; set another run.folder") from None
    with held(
        lock,
        f"another parameter server has its state in {folder}; give this one a run.folder of its "
        "own",
    ):
        try:
            yield
        except InputError:
            lock.unlink(missing_ok=True)
            for path in made:
                with suppress(OSError):  # another server is in it
                    path.rmdir()
            raise


def _bind(config: Config, bind: str | None) -> tuple[str, int]:
    """Where to listen: as told, else on the port that workers look for."""
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
