"""The socket on which others dial."""

import socket

from dpipe.errors import JoinError
from dpipe.session.redial import GREETING_S

_BACKLOG = 1024  # diallers that wait in the kernel; most may be strangers that say nothing
ACCEPT_S = 1.0  # poll interval of the thread that accepts


def open_listener(bind: str, port: int) -> socket.socket:
    host = bind.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise JoinError(
            f"cannot listen on {bind}:{port}: {error.strerror}; set node.bind and node.port to "
            "what is free here"
        ) from None
    # Who dials speaks first: those who say nothing wait in the kernel, and keep nobody out.
    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, round(GREETING_S))
    listener.settimeout(ACCEPT_S)
    return listener
