"""Who opens a TCP connection, and how: in smaller segments where large ones were lost.

A path may swallow large packets without a word: its MTU fell, and what says so (ICMP) is blocked.
Small packets pass, so the connection opens and then moves nothing. Linux finds the size that passes
with `net.ipv4.tcp_mtu_probing = 1`, which is for the administrator to set; a process can make its
segments smaller, before it dials.
"""

import socket
from collections.abc import Callable, Mapping

from dpipe.errors import JoinError

_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - compared with, not bound
# Bytes of a segment: the path's own; what an IPv6 path must carry; what an IPv4 host must take.
SEGMENTS = (None, 1200, 536)


def smaller(segment: int | None) -> int | None:
    """The next smaller of `SEGMENTS`; the smallest stays."""
    return SEGMENTS[min(SEGMENTS.index(segment) + 1, len(SEGMENTS) - 1)]


def dial(
    address: str,
    timeout_s: float,
    segment: int | None = None,
    prepare: Callable[[socket.socket], None] = lambda _: None,
) -> socket.socket:
    """A connection to `host:port`, whose both ends send segments of at most `segment` bytes;
    `prepare` sets what must be set before it is opened. Raises `OSError`, and `ValueError` where
    there is no port.
    """
    host, _, port = address.rpartition(":")
    failure = OSError(f"{address} has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            if segment is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            prepare(sock)
            sock.settimeout(timeout_s)
            sock.connect(target)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def local_address(bind: str, port: int) -> str:
    """Where this machine itself reaches what listens there."""
    return f"{_OF_WILDCARD.get(bind, bind)}:{port}"


def dials(rank: int, peer: int, addresses: Mapping[int, str | None]) -> bool:
    """Whether `rank` opens the link with `peer`; raises `JoinError` if neither has an address."""
    lower, higher = sorted((rank, peer))
    if addresses[lower] is None and addresses[higher] is None:
        raise JoinError(
            f"rank {lower} and rank {higher} cannot meet: neither has an address that the other "
            "can reach; set node.advertise on one of them"
        )
    dialler = lower if addresses[higher] is not None else higher
    return rank == dialler
