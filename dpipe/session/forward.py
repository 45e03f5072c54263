"""A port of this process that forwards, for a dialler that does not let its sockets be changed.

    gRPC ====> 127.0.0.1, one connection ====> small segments, both ways ====> peer

gRPC opens its sockets itself, and TCP takes the size of segments before a connection opens. Bytes
pass as they are: TLS and the token are between gRPC and the peer.
"""

import socket
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Thread

from dpipe.session.dial import dial
from dpipe.session.stream import shut

_COPY_BYTES = 256 << 10
_ACCEPT_S = 5.0  # for gRPC, which dials at once


def forward(
    address: str, timeout_s: float, segment: int, tune: Callable[[socket.socket], None]
) -> str:
    """Dial `address` in segments of at most `segment` bytes. Returns where gRPC, which dials in its
    place, reaches it: the first connection there is forwarded until an end closes it, and no second
    one. `tune` sets what else the outer socket needs. Raises as `dial` does.
    """
    outer = dial(address, timeout_s, segment)
    try:
        outer.settimeout(None)
        tune(outer)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1)
    except BaseException:
        outer.close()
        raise
    port = listener.getsockname()[1]
    Thread(
        target=_serve, args=(listener, outer), name=f"dpipe-forward-{address}", daemon=True
    ).start()
    return f"127.0.0.1:{port}"


def _serve(listener: socket.socket, outer: socket.socket) -> None:
    with closing(outer), suppress(OSError):
        with closing(listener):
            listener.settimeout(_ACCEPT_S)
            inner, _ = listener.accept()
        with closing(inner):
            inner.settimeout(None)
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = Thread(target=_copy, args=(outer, inner), name="dpipe-forward-back", daemon=True)
            back.start()
            _copy(inner, outer)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Until either end closes; then both are shut, so that the other copy ends too."""
    view = memoryview(bytearray(_COPY_BYTES))
    with suppress(OSError):
        while num_bytes := source.recv_into(view):
            sink.sendall(view[:num_bytes])
    shut(source)
    shut(sink)
