"""Where the parameter servers of a run are that are processes by themselves: at the addresses of
its job, until one of them moves.

    job                     10.0.0.5:7100  10.0.0.6:7100
    the second one moves    10.0.0.5:7100  10.0.0.9:7100     the next epoch calls it there
"""

from typing import Annotated

from pydantic import Field

from dpipe.wire.schema import Schema, Shape

SERVER_METHOD = "/dpipe.elastic.v1.Agents/Server"
Address = Annotated[str, Field(max_length=300, pattern=r"^[\w.:%\[\]-]+:[0-9]{1,5}$")]
Addresses = Annotated[list[Address], Field(max_length=100_000)]


class ServerMoved(Shape):
    """What `dpipe serve --run` says: a server is at `address` now."""

    address: Address
    instead_of: Address | None = None  # where it was; None: the run has no other


class ServersKnown(Shape):
    """The answer: where the servers of the run are, or why that one is refused."""

    addresses: Addresses
    refusal: Annotated[str, Field(max_length=10_000)] = ""


SERVER_MOVED = Schema[ServerMoved](ServerMoved)
SERVERS_KNOWN = Schema[ServersKnown](ServersKnown)
ADDRESSES = Schema[list[str]](Addresses)


def moved(addresses: tuple[str, ...], message: ServerMoved) -> tuple[str, ...]:
    """`addresses` with the one that has moved. Raises `ValueError` where it is none of them."""
    if not addresses:
        raise ValueError(
            "this run has no parameter server by itself: data_parallel.address of its job says "
            "where one is"
        )
    # Said again, by a server that was started again.
    if message.address in addresses:
        return addresses
    before = message.instead_of
    if before is None and len(addresses) == 1:
        before = addresses[0]
    known = ", ".join(addresses)
    if before is None:
        raise ValueError(f"the run has several servers, at {known}: say with --instead-of which")
    if before not in addresses:
        raise ValueError(f"no server of the run is at {before}: they are at {known}")
    index = addresses.index(before)
    return (*addresses[:index], message.address, *addresses[index + 1 :])
