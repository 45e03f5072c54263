"""What `dpipe join` does: a keeper, an agent, and what asks it to leave."""

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dpipe.agent import inquiry
from dpipe.agent.coordinate import parse_address
from dpipe.agent.process import AgentProcess, machine_memory_bytes
from dpipe.config.load import Config, load
from dpipe.epoch.preparation import prepare
from dpipe.errors import ConfigError
from dpipe.keeper.keeper import Keeper
from dpipe.processes import notice as notices
from dpipe.processes.environment import environment, process_info
from dpipe.run.join import address_toward, advertised_host, security_of
from dpipe.terms.following import HolderSearch
from dpipe.terms.storing import TermStore
from dpipe.wire.rpc import Security

LOG = logging.getLogger("dpipe")


def join(
    address: str,
    overrides: tuple[str, ...],
    *,
    name: str | None,
    notice: str | None,
    leave_s: float,
    wait_s: float,
    memory_gb: float | None,
    keeper_port: int = 0,
    trust_code: bool,
) -> None:
    """Be one of the machines of the run that is coordinated at `address`, until it is over."""
    config = own_settings(overrides)
    node = config.node
    host, _ = parse_address(address)
    security = security_of(config, process_info(environment()))
    bind = node.bind or address_toward(host)
    ask = None if notice is None else notices.watcher(notice)
    memory_bytes = machine_memory_bytes() if memory_gb is None else int(memory_gb * 1e9)
    offer = inquiry.job(address, security, wait_s)
    # Before anybody counts on this machine: what it cannot train is refused here.
    job = prepare(offer.config, offer.layer_costs, node, trust_code=trust_code)
    with Keeper(
        security=security,
        bind=bind,
        port=keeper_port,
        host=advertised_host(bind, node.advertise, host),
        max_bytes=memory_bytes,
    ) as keeper:
        agent = AgentProcess(
            address,
            keeper,
            node,
            security,
            name=name or socket.gethostname(),
            memory_bytes=memory_bytes,
            silence_s=job.timeouts.heartbeat,
            wait_s=wait_s,
            trust_code=trust_code,
        )
        with (
            _watching(ask, agent),
            _leaving_on_signals(agent, leave_s),
            _searching(job.run.checkpoint_url, agent),
        ):
            agent.run()


@contextmanager
def _searching(url: str | None, agent: AgentProcess) -> Iterator[None]:
    """For a coordinator that takes over."""
    if url is None:
        yield
        return
    search = HolderSearch(TermStore(url), agent)
    search.start()
    try:
        yield
    finally:
        search.close()


@contextmanager
def _watching(ask: notices.Ask | None, agent: AgentProcess) -> Iterator[None]:
    """For the notice that this machine goes."""
    stopped = threading.Event()
    if ask is not None:
        threading.Thread(
            target=notices.watch, args=(ask, agent.leave, stopped), name="notice", daemon=True
        ).start()
    try:
        yield
    finally:
        stopped.set()


def own_settings(overrides: tuple[str, ...]) -> Config:
    """A configuration of which only `[node]` is the user's. Raises `ConfigError` for other keys."""
    for override in overrides:
        if not override.strip().startswith("node."):
            raise ConfigError(
                f"{override!r:.200} is the coordinator's to say: a machine that joins sets keys of "
                "[node] alone, such as -o node.device=cuda"
            )
    return load(Config(), overrides)


def own_security(overrides: tuple[str, ...]) -> Security:
    return security_of(own_settings(overrides), process_info(environment()))


@contextmanager
def _leaving_on_signals(agent: AgentProcess, leave_s: float) -> Iterator[None]:
    """The first SIGINT or SIGTERM hands over; a second one raises `KeyboardInterrupt`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        LOG.warning("%s: handing over, within %g s", signal.Signals(signum).name, leave_s)
        # In a thread: this one may hold what `leave` waits for.
        threading.Thread(target=agent.leave, args=(leave_s,), daemon=True).start()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
