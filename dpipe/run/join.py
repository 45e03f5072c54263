"""A rank joins the others: first the coordinator, then every link is opened and checked."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from dpipe.choices import function_at
from dpipe.config.load import Config
from dpipe.coordinator.alone import Alone
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.errors import JoinError, PeerLost, RunAborted, TransferTimeout
from dpipe.plan.assumed_network import (
    configured_network,
    connections_of,
    leaves_all_to_one,
    uplink_bytes_per_s,
)
from dpipe.processes.environment import ProcessInfo
from dpipe.store.run_folder import keep_upload
from dpipe.streams import Streams
from dpipe.transport.base import Transport
from dpipe.transport.kinds import TRANSPORTS
from dpipe.transport.local import LocalHub
from dpipe.transport.shaped import ShapedTransport
from dpipe.wire.rpc import Security

LOG = logging.getLogger("dpipe")
_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not bound


def security_of(config: Config, process: ProcessInfo) -> Security:
    node = config.node
    token = node.token or process.token
    return Security.load(token, node.tls_cert, node.tls_key, node.tls_ca, node.token_file)


@contextmanager
def joined(
    config: Config,
    process: ProcessInfo,
    peers: set[int],
    join_s: float | None,
    streams: Streams,
    on_attempt: Callable[[Coordination], None] = lambda coordinator: None,
) -> Iterator[tuple[Coordination, Transport]]:
    """Join the coordinator and open the links to `peers`. An error inside ends the run on all
    ranks.

    A lost peer is a symptom: the coordinator is then asked for the first cause, and that is raised
    as `RunAborted`. `on_attempt` is that of `Coordinator.join`.
    """
    folder = Path(config.run.folder)
    # No server, no port, no thread: one rank has nobody to meet.
    if process.world_size == 1:
        alone = Alone(on_upload=partial(keep_upload, folder))
        on_attempt(alone)
        yield alone, LocalHub(1).transport(0)
        return
    with ExitStack() as stack:
        # The links listen first: this rank tells the coordinator at which port.
        security = security_of(config, process)
        links = _links(config, process, security, streams)
        stack.callback(links.close)
        transport = shaped(config, links, streams)
        stack.callback(transport.close)
        if join_s is None:
            join_s = config.timeouts.join
        keep = partial(keep_upload, folder)
        coordinator = stack.enter_context(
            coordinated(
                config, process, security, join_s, links.port, config.shared(), keep, on_attempt
            )
        )
        coordinator.on_abort(transport.fail)
        try:
            transport.prepare(coordinator, peers)
            yield coordinator, transport
        except RunAborted:
            raise  # the coordinator has said it itself
        except (PeerLost, TransferTimeout) as error:
            raise coordinator.abort(str(error), symptom=True) from error
        # Ctrl-C as well: else the others would notice only when no sign of life comes.
        except BaseException as error:
            coordinator.abort(f"{type(error).__name__}: {error}")
            transport.fail(RunAborted("this rank failed"))
            raise
        # While the coordinator's machine still passes on what it relays. Else this rank leaves
        # first: a link that broke at the end is waited for longer than the coordinator waits.
        if coordinator.relayed:
            transport.close()
        coordinator.leave()


def _links(config: Config, process: ProcessInfo, security: Security, streams: Streams) -> Transport:
    settings = config.transport
    make_links = function_at(TRANSPORTS[settings.kind].make)
    links: Transport = make_links(
        process.rank,
        bind=listening_on(config, process),
        port=config.node.port,
        security=security,
        connections=connections_of(config),
        one_outruns_loss=leaves_all_to_one(config),
        uplink_bytes_per_s=uplink_bytes_per_s(config, process.rank),
        chunk_bytes=settings.chunk_bytes,
        buffer_bytes=settings.buffer_bytes,
        congestion_control=settings.congestion_control,
        transfer_timeout_s=config.timeouts.transfer,
        connect_timeout_s=config.timeouts.connect,
        heartbeat_s=config.timeouts.heartbeat,
        streams=streams,
    )
    return links


def shaped(config: Config, links: Transport, streams: Streams) -> Transport:
    """`links`, slowed to the network of `transport.shape`, if that is set."""
    if config.transport.shape is None:
        return links
    network = configured_network(config, config.transport.shape)
    network = network.shared_by(config.ranks_per_machine)
    return ShapedTransport(
        links, network, transfer_timeout_s=config.timeouts.transfer, streams=streams
    )


@contextmanager
def coordinated(
    config: Config,
    process: ProcessInfo,
    security: Security,
    join_s: float,
    port: int,
    shared: dict[str, object],
    on_upload: Callable[[int, str, bytes], None] | None = None,
    on_attempt: Callable[[Coordination], None] = lambda coordinator: None,
) -> Iterator[Coordinator]:
    """Rank 0 starts the coordinator's server and publishes its address; then every rank joins, with
    what it listens on: `port` of this machine. `shared` must be alike on all ranks.
    """
    node = config.node
    heartbeat_s = config.timeouts.heartbeat
    bind = listening_on(config, process)
    host = advertised_host(bind, node.advertise, process.coordinator_host)
    with ExitStack() as stack:
        if process.rank == 0 and not process.coordinator_is_elsewhere:
            server = CoordinatorServer(
                process.world_size,
                bind=bind,
                port=process.port,
                security=security,
                heartbeat_s=heartbeat_s,
                join_s=join_s,
                on_upload=on_upload,
            )
            stack.callback(server.close)
            process.publish(f"{host}:{server.port}")
        coordinator = Coordinator.join(
            process.find(join_s),
            process.rank,
            process.world_size,
            shared=shared,
            advertised=None if host is None else f"{host}:{port}",
            security=security,
            join_s=join_s,
            heartbeat_s=heartbeat_s,
            on_wait=lambda what: LOG.warning("%s", what),
            on_attempt=on_attempt,
        )
        stack.callback(coordinator.close)
        yield coordinator


def listening_on(config: Config, process: ProcessInfo) -> str:
    """The address that everything of this rank listens on."""
    return config.node.bind or address_toward(process.coordinator_host)


def advertised_host(bind: str, advertise: str | None, toward: str) -> str | None:
    """Where others reach this process; None ("none") behind NAT, where only it can dial.

    If `bind` is a wildcard, it is this machine's address on the way `toward` the coordinator's
    host.
    """
    if advertise == "none":
        return None
    if advertise is not None:
        return advertise
    return address_toward(toward) if bind in _WILDCARDS else bind


def address_toward(host: str) -> str:
    """This machine's address on the way to `host`: of several interfaces, the one that leads to the
    other ranks.

    It is loopback if all ranks are on one machine: nothing listens where nobody needs it. Raises
    `JoinError` if there is no route.
    """
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)
        family, *_, target = min(addresses)  # IPv4, if the host has both
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing, but chooses a route
            own = str(probe.getsockname()[0])
            return f"[{own}]" if family is socket.AF_INET6 else own
    except OSError as error:
        hint = "check --coordinator, or set node.bind and node.advertise"
        raise JoinError(f"no way to {host}: {error}; {hint}") from None
