"""Measures a link from its sender: round trips by `ping`, the rate by the bytes that TCP has
acknowledged.

    here                         there
    observe(address) ─── ping ──►  (the kernel answers)
             └───── n connections ►  answer(port): receives and discards

Only the sender measures, so that the two clocks need not agree.
"""

import math
import re
import selectors
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dpipe.network.link import Link
from netem import shell
from netem.shell import NetemError

PORT = 7990
TOLERANCE = 0.10
MAX_CONNECTIONS = 16
_WINDOW_BYTES = 1 << 20  # what one connection can surely keep in flight
_MAX_SEND_BUFFER = Path("/proc/sys/net/core/wmem_max")
_CHUNK = bytes(1 << 18)
_SINK = bytearray(1 << 20)
_HEADER_BYTES = 14 + 20 + 20 + 12  # Ethernet, IP, TCP and its timestamps: netem's rate counts them
_TCP_INFO_MSS, _TCP_INFO_ACKED = 16, 120  # offsets in struct tcp_info, linux/tcp.h


@dataclass(frozen=True, slots=True)
class Observed:
    """Round trips in milliseconds, the share of them lost, and gigabits a second on the wire,
    headers included.
    """

    round_trip_ms: float
    lost_percent: float
    bandwidth_gbps: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison."""

    quantity: str
    expected: float
    observed: float

    @property
    def close(self) -> bool:
        return abs(self.observed - self.expected) <= TOLERANCE * self.expected

    def __str__(self) -> str:
        result = "ok" if self.close else "OFF"
        values = f"expected {self.expected:>9.3f}   observed {self.observed:>9.3f}"
        return f"{self.quantity:<18} {values}   {result}"


def compare(forward: Link, backward: Link, observed: Observed) -> list[Row]:
    """A link and its way back, expected and observed. Without loss: too few pings to judge it."""
    return [
        Row("round trip, ms", forward.delay_ms + backward.delay_ms, observed.round_trip_ms),
        Row("rate, Gbit/s", forward.bandwidth_gbps, observed.bandwidth_gbps),
    ]


def connections_for(bandwidth_gbps: float, round_trip_ms: float) -> int:
    """Enough connections that no window limits the link."""
    under_way = bandwidth_gbps * 1e9 / 8 * round_trip_ms * 1e-3
    return min(MAX_CONNECTIONS, max(2, math.ceil(under_way / _WINDOW_BYTES)))


def observe(
    address: str,
    gbps: float,
    *,
    jitter: bool = False,
    port: int = PORT,
    seconds: float = 1.5,
    interval_s: float = 0.2,
    pinged: Callable[[], None] = lambda: None,
) -> Observed:
    """Measure the link to `address`, which is expected to carry `gbps`. `pinged` is called between
    the pings and the transfer.
    """
    round_trips, lost = ping(address, interval_s=interval_s)
    # Without jitter the shortest is the link's; a busy machine only adds to it.
    round_trip = median(round_trips) if jitter else min(round_trips)
    pinged()
    return Observed(round_trip, lost, rate_gbps(address, port, gbps, round_trip, seconds))


def ping(
    address: str, count: int = 20, interval_s: float = 0.2, within: Sequence[str] = ()
) -> tuple[list[float], float]:
    """Round trips in milliseconds and the percentage that was lost. Raises `NetemError` if all
    were.
    """
    shell.require_programs("ping")
    argv = [*within, "ping", "-n", "-c", str(count), "-i", str(interval_s), "-W", "2", address]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30 + count * interval_s)
    round_trips = parse_ping(done.stdout)
    if not round_trips:
        raise NetemError(f"{address} answers no ping: {(done.stderr or done.stdout).strip()}")
    return round_trips, 100 * (count - len(round_trips)) / count


def parse_ping(text: str) -> list[float]:
    return [float(ms) for ms in re.findall(r"time=([\d.]+) ms", text)]


def rate_gbps(address: str, port: int, gbps: float, round_trip_ms: float, seconds: float) -> float:
    """Gbit/s on a link that is expected to be like this. Raises `NetemError` if nobody receives
    there.
    """
    sockets: list[socket.socket] = []
    connections = connections_for(gbps, round_trip_ms)
    # Queues a little over one round trip at the bottleneck; the default would be seconds on a slow
    # link.
    window = gbps * 1e9 / 8 * (1.5 * round_trip_ms + 20) * 1e-3 / connections
    try:
        for _ in range(connections):
            sockets.append(_connect(address, port, round(window)))
        # TCP's slow start, which doubles its rate each round trip, is over by then.
        _send_until(sockets, time.monotonic() + 0.3 + 15 * round_trip_ms * 1e-3)
        start, bytes_before = time.monotonic(), _wire_bytes(sockets)
        _send_until(sockets, start + seconds)
        return (_wire_bytes(sockets) - bytes_before) * 8e-9 / (time.monotonic() - start)
    except OSError as error:
        raise NetemError(
            f"nobody receives at {address}:{port} ({error}); run there: python -m netem answer"
        ) from None
    finally:
        for connection in sockets:
            connection.close()


def _connect(address: str, port: int, window_bytes: int) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=10)
    # Cubic ends its slow start at a hint of queueing (HyStart), and then needs minutes to fill a
    # long fat link.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    # The kernel would cut a larger one, and does better by its own sizing then.
    if window_bytes <= int(_MAX_SEND_BUFFER.read_text()):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, window_bytes)
    connection.setblocking(False)
    return connection


def _send_until(sockets: Sequence[socket.socket], deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        for connection in sockets:
            selector.register(connection, selectors.EVENT_WRITE, connection)
        while (remaining_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                key.data.send(_CHUNK)


def _wire_bytes(sockets: Sequence[socket.socket]) -> float:
    total = 0.0
    for connection in sockets:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        (segment,) = struct.unpack_from("I", info, _TCP_INFO_MSS)
        (acknowledged,) = struct.unpack_from("Q", info, _TCP_INFO_ACKED)
        total += acknowledged * (segment + _HEADER_BYTES) / segment
    return total


def answer(
    port: int = PORT, idle_s: float = 600.0, ready: Callable[[], None] = lambda: None
) -> None:
    """Receive bytes and discard them, until none have come for `idle_s`."""
    listener = socket.create_server(("", port), backlog=64)
    listener.setblocking(False)
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        ready()
        while events := selector.select(idle_s):
            for key, _ in events:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    selector.register(connection, selectors.EVENT_READ, connection)
                elif not _discard(key.data):
                    selector.unregister(key.fileobj)
                    key.data.close()


def _discard(connection: socket.socket) -> bool:
    """False at the end of the stream. MSG_TRUNC drops the bytes in the kernel, without a copy: the
    reader is never the limit.
    """
    try:
        return connection.recv_into(_SINK, 0, socket.MSG_TRUNC) > 0
    except OSError:
        return False
