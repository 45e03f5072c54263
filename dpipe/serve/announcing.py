"""Telling an elastic run where its parameter server is now: the next epoch calls it there."""

from dpipe.agent.control_stream import ask_once
from dpipe.agent.coordinate import parse_address
from dpipe.config.load import Config
from dpipe.elastic.servers import SERVER_METHOD, SERVERS_KNOWN, ServerMoved
from dpipe.errors import ConfigError, JoinError
from dpipe.run.join import advertised_host
from dpipe.wire.rpc import Security


def announce(
    run: str,
    config: Config,
    listening: tuple[str, int],
    instead_of: str | None,
    security: Security,
) -> str:
    """Tell the run that is coordinated at `run` of a server that listens at that host and port.
    Returns the address at which its workers will call it. Raises `JoinError` where nobody answers
    or the run has no such server, `ConfigError` where nobody could call it.
    """
    host, port = listening
    toward, _ = parse_address(run)
    reached = advertised_host(host, config.node.advertise, toward)
    if reached is None:
        raise ConfigError("node.advertise is none, but workers call a server: set it to an address")
    address = f"{reached}:{port}"
    try:
        message = ServerMoved(address=address, instead_of=instead_of)
    except ValueError:
        raise ConfigError(
            f"{instead_of or address!r:.300} must be HOST:PORT, such as 10.0.0.5:7100"
        ) from None
    request = message.model_dump_json().encode()
    answer = ask_once(run, security, SERVER_METHOD, request, config.timeouts.join)
    try:
        known = SERVERS_KNOWN.read(answer)
    except ValueError as error:
        raise JoinError(
            f"what listens at {run} does not answer as dpipe's coordinator does: {error}"
        ) from None
    if known.refusal:
        raise JoinError(f"the run at {run} does not take a server at {address}: {known.refusal}")
    return address
