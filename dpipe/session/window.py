"""TCP's window on one connection: kept open through pauses and past losses that are no congestion,
and kept from filling queues.

    messages    ####             ####          ####                         ####
    padding                           #  #           #  #  #  #  #  #  #  #
    window      =================================================================

A pipeline sends in bursts. Reno and CUBIC begin with ten packets again after a pause of one
retransmission timeout, and halve a window that is not filled (RFC 2861), unless root has set
net.ipv4.tcp_slow_start_after_idle to 0: where a pipe fills, each hop then waits several round
trips. So a connection that would lose its window in a pause fills it with padding, which the other
end drops: as much as the last bursts of messages, at most what the path holds in a round trip.

BBR keeps its rate, but learns it too low from messages that come one at a time, and on several
connections that share a path, and stops sending for 0.2 s in ten. It is better where packets are
lost at random, which Reno and CUBIC take for congestion.

What it has learnt wears out, too. BBR lets twice as much be under way as its rate brings in the
shortest round trip of ten seconds. Where packets overtake others that one is far shorter than the
usual one: a window then lasts for less than a round trip, and BBR learns the lower rate. Begun anew
in each pause, as a new connection would, it keeps the window that it has while it looks for the
rate.

    round trips    90 95 92 88 |41| 93 90 96 ...                    begun anew in each pause
    window                     ########------.__                    ######################
    rate learnt                ##########------.__.__               ######################

CUBIC ends its slow start at the first hint of a queue (HyStart), and then needs a while to fill a
long path. Reno doubles its window until something is lost; after a loss CUBIC is back sooner. So a
connection begins with Reno where the host has BBR or CUBIC, and takes CUBIC back after a loss.

Where nothing is lost Reno and CUBIC fill whatever queue a router has, and the kernel lets 4 MiB be
under way: seconds of a slow link, behind which signs of life wait. Where round trips say that it
comes to that, the kernel's send buffer is bounded by what the path holds. With an open window it
may take more than that in one call, so it is given no more in a call.
"""

import math
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from dpipe.errors import ConfigError

_CLOSING = 0.8  # of a retransmission timeout: a pause that is about to close the window
_CONGESTION = getattr(socket, "TCP_CONGESTION", None)  # of Linux and FreeBSD
_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_HOSTS_OWN = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_BBR, _CUBIC, _RENO = "bbr", "cubic", "reno"
_LONG_US = 2_000  # a round trip; on shorter paths a window is back within a few of them
# Losses that are random, in number and as a share of segments: congestion loses one in a window
# of a hundred segments and more, each time that it has grown by half.
_LEAST_LOSSES = 5
_LOSS_SHARE = 2e-4
_TOGETHER_S = 0.2
# Retransmission timeouts until a segment that was sent again is known to be lost, and not late: the
# other end says if it has it twice, behind a queue that may be longer than one timeout.
_CERTAIN = 4
# A queue to be bounded: round trips of so much, and so many times the shortest.
_LONG_QUEUE_US = 500_000
_LONG_QUEUE = 4
_LEAST_BUFFER_BYTES = 32 << 10  # that are asked for: the kernel takes twice as many
_MOST_BUFFER_BYTES = 1 << 30
# Given to the kernel at once: it sends these while it copies the next, and the cache holds both.
_WRITE_BYTES = 512 << 10
_BUFFER_LOCK = 72  # SO_BUF_LOCK of linux/socket.h, from Linux 5.14 on
_OF_CONGESTION = 26  # TCP_CC_INFO of linux/tcp.h, and for BBR `struct tcp_bbr_info`
_OF_BBR = struct.Struct("5I")
_FOUND = 2 << 8  # BBR's gain of the window, in 1/256, once it has found the rate
# Offsets in `struct tcp_info` of linux/tcp.h, which only grows.
_TIMEOUT = 8
_SEGMENT = 16
_UNACKNOWLEDGED = 24
_LAST_SENT = 44
_ROUND_TRIP = 68
_WINDOW = 80
_REPEATED = 100
_ACKNOWLEDGED_BYTES = 120
_LEAST_ROUND_TRIP = 148
_SENT = 156
_RATE = 160
_IN_VAIN = 216
_BYTES = 224


class TcpInfo(NamedTuple):
    """What the kernel knows of a connection; zeros where it does not say."""

    timeout_us: int = 0  # of retransmission
    segment: int = 0  # bytes
    unacknowledged: int = 0  # segments
    last_sent_ms: int = 0  # ago
    round_trip_us: int = 0
    least_round_trip_us: int = 0
    window: int = 0  # segments
    sent: int = 0  # segments
    lost: int = 0  # of them, as far as this end can tell
    acknowledged_bytes: int = 0
    bytes_per_s: int = 0  # of the last ones that arrived


def tcp_info(sock: socket.socket) -> TcpInfo:
    """Raises `OSError` for a socket that is closed."""
    if not hasattr(socket, "TCP_INFO"):
        return TcpInfo()
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES).ljust(_BYTES, b"\0")

    def number(offset: int, kind: str = "I") -> int:
        (value,) = struct.unpack_from(kind, info, offset)
        return int(value)

    return TcpInfo(
        timeout_us=number(_TIMEOUT),
        segment=number(_SEGMENT),
        unacknowledged=number(_UNACKNOWLEDGED),
        last_sent_ms=number(_LAST_SENT),
        round_trip_us=number(_ROUND_TRIP),
        least_round_trip_us=number(_LEAST_ROUND_TRIP),
        window=number(_WINDOW),
        sent=number(_SENT),
        # The other end had some of them twice: they were late and not lost.
        lost=max(0, number(_REPEATED) - number(_IN_VAIN)),
        acknowledged_bytes=number(_ACKNOWLEDGED_BYTES, "Q"),
        bytes_per_s=number(_RATE, "Q"),
    )


def bbr_has_found_rate(sock: socket.socket) -> bool:
    """Whether BBR's search for the rate has ended (its startup: Cardwell et al. 2016); false for
    another congestion control. Raises `OSError` for a socket that is closed.
    """
    if sys.platform != "linux":
        return False
    told = sock.getsockopt(socket.IPPROTO_TCP, _OF_CONGESTION, _OF_BBR.size)
    return len(told) == _OF_BBR.size and _OF_BBR.unpack(told)[-1] == _FOUND


class Losses:
    """What the connections of a link have lost together."""

    def __init__(self) -> None:
        self._sent = 0  # segments
        self._times = 0  # that something was lost
        self._last = -math.inf

    def see(self, sent: int, lost: int) -> None:
        """So many segments more. What is lost together counts once: a window that opens too far
        loses half of itself, on all connections.
        """
        self._sent += sent
        now = time.monotonic()
        if lost > 0 and now - self._last > _TOGETHER_S:
            self._times += 1
            self._last = now

    @property
    def are_random(self) -> bool:
        return self._times >= max(_LEAST_LOSSES, _LOSS_SHARE * self._sent)


class Window:
    """Of the connection over `sock`. With `losses`, those of its link, it takes the host's CUBIC in
    the place of Reno once something is lost, and BBR where they are random and the host allows it,
    which it keeps open.
    """

    def __init__(self, sock: socket.socket, losses: Losses | None = None) -> None:
        self._socket = sock
        self._losses = losses
        taken = _taken(sock)
        self._adapts = losses is not None
        self.outruns_loss = taken == _BBR
        self._fills_queues = taken not in ("", _BBR)
        self._grows_slowly = losses is not None and taken == _RENO and _hosts_own() == _CUBIC
        self._closes = self._fills_queues and _slow_starts_after_idle()
        self._may_bound = _may_bound(sock)  # its send buffer
        self._is_bounded = False
        self._asked_bytes = 0  # of the kernel, as its bound
        self.write_bytes = _WRITE_BYTES  # at most, in a call
        self._best_rate = 0  # bytes a second
        self._least_round_trip_us: float = math.inf
        self._sent = 0  # segments, when they were last looked at
        self._lost = 0
        # When, and how much seemed lost then: less than at any later time.
        self._suspected = deque([(time.monotonic(), 0)])

    def look(self, burst_bytes: int) -> int:
        """How many bytes to write now, lest the window close that a burst of so many needs. Call it
        many times in a retransmission timeout. Raises `OSError` for a socket that is closed.
        """
        if self.outruns_loss and self._adapts:
            self._keep_bbr_open()
        if not self._fills_queues:
            return 0
        info = tcp_info(self._socket)
        self._best_rate = max(self._best_rate, info.bytes_per_s)
        # Kept: behind a queue that never empties the kernel forgets it after five minutes.
        self._least_round_trip_us = min(self._least_round_trip_us, info.least_round_trip_us)
        in_flight = round(self._best_rate * self._least_round_trip_us / 1e6)
        self._bound_queue(info, in_flight)
        if self._losses is not None:
            lost = self._certainly_lost(info)
            self._losses.see(info.sent - self._sent, lost - self._lost)
            self._sent, self._lost = info.sent, lost
            if self._grows_slowly and lost:
                self._grows_slowly = not _takes(self._socket, _CUBIC)
            if self._losses.are_random:
                self._take_bbr()
        if not self._closes or not _is_closing(info):
            return 0
        return min(burst_bytes, in_flight, info.window * info.segment)

    def is_path_long(self) -> bool:
        """Whether a round trip, without queues, takes long. Raises `OSError` for a socket that is
        closed.
        """
        return tcp_info(self._socket).least_round_trip_us >= _LONG_US

    def _certainly_lost(self, info: TcpInfo) -> int:
        """Segments: the fewest that seemed lost in the last few retransmission timeouts. Where a
        queue grows within a round trip, segments are sent again that only wait in it.
        """
        now = time.monotonic()
        while self._suspected and self._suspected[-1][1] >= info.lost:
            self._suspected.pop()
        self._suspected.append((now, info.lost))
        while self._suspected[0][0] < now - _CERTAIN * info.timeout_us / 1e6:
            self._suspected.popleft()
        return self._suspected[0][1]

    def _bound_queue(self, info: TcpInfo, in_flight: int) -> None:
        """Let eight times as much be under way as the path holds. Acknowledgements wait in the
        queue of the other end: with less, a connection waits for them while its link is idle. Half
        of it will do where the host gives no more.
        """
        queue_us = max(_LONG_QUEUE_US, _LONG_QUEUE * self._least_round_trip_us)
        is_long = self._is_bounded or info.round_trip_us >= queue_us
        if not self._may_bound or not is_long:
            return
        wanted = min(max(_LEAST_BUFFER_BYTES, 4 * in_flight), _MOST_BUFFER_BYTES)
        if self._is_bounded and wanted <= self._asked_bytes:
            return
        self._asked_bytes = wanted
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        given = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        self._is_bounded = given >= wanted // 2
        self.write_bytes = min(given, _WRITE_BYTES) if self._is_bounded else _WRITE_BYTES
        if not self._is_bounded:  # this user may have too little: leave it to the kernel again
            self._socket.setsockopt(socket.SOL_SOCKET, _BUFFER_LOCK, 0)

    def _keep_bbr_open(self) -> None:
        """Begin BBR anew, in a pause, once it has found a rate that it would unlearn."""
        if not bbr_has_found_rate(self._socket) or tcp_info(self._socket).unacknowledged:
            return
        if _takes(self._socket, _RENO):
            self.outruns_loss = _takes(self._socket, _BBR)

    def _take_bbr(self) -> None:
        self._losses = None
        if _takes(self._socket, _BBR):
            self._fills_queues = False
            self.outruns_loss = True


def _is_closing(info: TcpInfo) -> bool:
    is_long = info.round_trip_us >= _LONG_US
    idle_us = info.last_sent_ms * 1e3
    return is_long and not info.unacknowledged and idle_us >= _CLOSING * info.timeout_us


def set_congestion_control(sock: socket.socket, name: str, *, loses: bool = False) -> None:
    """Take TCP's congestion control called `name`; "host" leaves the host's. So does "auto", but it
    begins with Reno in the place of BBR and CUBIC, and with BBR on a link that is known to lose
    packets, if the host allows it: see `Window`. Before a connection is opened: BBR has the kernel
    space packets out from then on, whatever follows it.

    Raises `ConfigError` where the host does not have it, or allows it to root alone.
    """
    if name == "host":
        return
    if name == "auto":
        if loses or _taken(sock) in (_BBR, _CUBIC):
            _takes(sock, _BBR if loses else _RENO)
        return
    try:
        _take(sock, name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f'transport.congestion_control "{name}" cannot be set on this host: {reason}; take one '
            "that `sysctl net.ipv4.tcp_allowed_congestion_control` lists, have root add it there "
            "(modprobe tcp_NAME loads it), or leave it out"
        ) from None


def _take(sock: socket.socket, name: str) -> None:
    if _CONGESTION is None:
        raise OSError("this system sets it for all sockets alone")
    sock.setsockopt(socket.IPPROTO_TCP, _CONGESTION, name.encode())


def _takes(sock: socket.socket, name: str) -> bool:
    """False where the host does not have it, or only root may take it."""
    try:
        _take(sock, name)
    except OSError:
        return False
    return True


def _taken(sock: socket.socket) -> str:
    """Empty where the system does not say."""
    if _CONGESTION is None:
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, _CONGESTION, 16)
    except OSError:  # not TCP
        return ""
    return name.rstrip(b"\0").decode()


def _hosts_own() -> str:
    try:
        return _HOSTS_OWN.read_text().strip()
    except OSError:  # not Linux
        return ""


def _may_bound(sock: socket.socket) -> bool:
    """Whether a send buffer that was bounded can be left to the kernel again."""
    try:
        sock.getsockopt(socket.SOL_SOCKET, _BUFFER_LOCK)
    except OSError:
        return False
    return True


def _slow_starts_after_idle() -> bool:
    try:
        return _AFTER_IDLE.read_text().strip() != "0"
    except OSError:  # not Linux
        return True
