"""A broken connection does not end a run: a proxy cuts, resets, swallows and delays connections
between two ranks, and every byte arrives once and in order.
"""

import os
import random
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fakes.broken_path import BrokenPath

from dpipe.errors import JoinError, PeerLost, TransferError, TransferTimeout
from dpipe.session import greeting
from dpipe.session.frames import ByteFrames
from dpipe.session.session import LinkSession
from dpipe.session.stream import SocketStream
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.mesh import PROTOCOL
from dpipe.transport.sessions import SessionMesh
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.rpc import Security
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import Hello

Kind = type[TcpTransport | GrpcTransport]
LARGE = TensorSpec((1_000_000,), torch.int64)


both_kinds = pytest.mark.parametrize("kind", [TcpTransport, GrpcTransport])


@contextmanager
def linked(
    kind: Kind = TcpTransport,
    *,
    reset_after: float = float("inf"),
    seed: int = 0,
    **options: Any,
) -> Iterator[tuple[SessionMesh, SessionMesh, BrokenPath]]:
    """Rank 0 dials rank 1 through a path that can break."""
    ends = [kind(rank, **{"heartbeat_s": 8.0, **options}) for rank in (0, 1)]
    with BrokenPath(ends[1].port, reset_after=reset_after, seed=seed) as path:
        addresses = {0: None, 1: path.address}
        other = threading.Thread(target=ends[1].connect, args=(addresses, [0]))
        other.start()
        try:
            ends[0].connect(addresses, [1])
            other.join()
            yield ends[0], ends[1], path
        finally:
            closing = [threading.Thread(target=end.close) for end in ends]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()


def numbered(number: int, size: int = LARGE.shape[0]) -> torch.Tensor:
    return torch.arange(number, number + size)


@both_kinds
@pytest.mark.parametrize("connections", [1, 3])
def test_link_goes_on_after_a_reset_amid_a_message(kind: Kind, connections: int) -> None:
    with linked(kind, connections=connections) as (first, second, path):
        path.delay_s = 0.001
        sends = [first.send(numbered(i), 1, str(i)) for i in range(10)]
        for i in range(10):
            assert torch.equal(second.recv(LARGE, 0, str(i)).wait(), numbered(i))
            if i in (2, 5):
                path.reset()
        for send in sends:
            send.wait()
        assert path.num_connections >= 2 * connections


def sizes_of(number: int) -> int:
    """Sizes from 0 to some megabytes."""
    return random.Random(number).choice([0, 1, 7, 1000, 100_000, 500_000])


def stream_both_ways(first: SessionMesh, second: SessionMesh, count: int) -> None:
    """Each end sends `count` tensors, changes each as soon as it may, and checks what comes."""

    def run(end: SessionMesh, peer: int) -> None:
        leaving = deque()
        for number in range(count):
            size = sizes_of(number)
            tensor = numbered(number + 1000 * end.rank, size)
            leaving.append((tensor, end.send(tensor, peer, str(number))))
            if len(leaving) > 5:
                oldest, send = leaving.popleft()
                send.wait()
                oldest.fill_(-1)
            like = TensorSpec((size,), torch.int64)
            arrived = end.recv(like, peer, str(number)).wait()
            assert torch.equal(arrived, numbered(number + 1000 * peer, size)), number

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, first, 1), pool.submit(run, second, 0)]:
            done.result(timeout=100)


@pytest.mark.some_cases(3)
@both_kinds
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("connections", [1, 3])
def test_bytes_arrive_once_and_in_order_whatever_is_reset(
    kind: Kind, seed: int, connections: int
) -> None:
    with linked(kind, connections=connections, reset_after=3e6, seed=seed) as (first, second, path):
        stream_both_ways(first, second, 60)
        path.heal()
        assert path.num_resets > 2


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def holds_soon(condition: Callable[[], bool]) -> bool:
    """gRPC closes its sockets on threads of its own, some time after close() has returned."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.slow
@both_kinds
def test_resets_leave_no_thread_and_no_descriptor(kind: Kind) -> None:
    with linked(kind):
        """gRPC opens four descriptors at a process's first link, and keeps them."""
    threads = set(threading.enumerate())
    descriptors = num_descriptors()
    with linked(kind, connections=2, reset_after=1e6) as (first, second, path):
        stream_both_ways(first, second, 30)
        path.heal()
        num_threads = len(set(threading.enumerate()) - threads)
        assert num_threads < 40, "threads that dialled are still there"
    assert holds_soon(lambda: threads >= set(threading.enumerate()))
    assert holds_soon(lambda: num_descriptors() <= descriptors), num_descriptors() - descriptors


@both_kinds
def test_path_that_swallows_what_it_acknowledges_is_left_for_another(kind: Kind) -> None:
    """It was waited for until timeouts.transfer."""
    with linked(kind, heartbeat_s=4.0) as (first, second, path):
        stream_both_ways(first, second, 3)
        path.swallow()
        start = time.monotonic()
        stream_both_ways(first, second, 10)
        assert 0.4 < time.monotonic() - start < 4.0
        assert path.num_connections == 2


@both_kinds
@pytest.mark.parametrize("sender", [0, 1])
def test_path_that_loses_large_packets_is_dialled_in_smaller_segments(
    kind: Kind, sender: int
) -> None:
    """The path MTU fell in mid-run: 300 s of silence, until timeouts.transfer."""
    with linked(kind, heartbeat_s=4.0) as (*ends, path):
        stream_both_ways(*ends, 3)
        path.mtu = 1300
        ends[sender].send(numbered(7), 1 - sender, "x")
        assert torch.equal(ends[1 - sender].recv(LARGE, sender, "x").wait(), numbered(7))
        assert ends[0]._links[1].connections[0].segment == 1200
        stream_both_ways(*ends, 3)


@both_kinds
def test_slow_path_is_not_silent(kind: Kind) -> None:
    """A message that took longer than a silence to come was lost and sent again, for ever."""
    with linked(kind, heartbeat_s=16.0) as (first, second, path):
        path.delay_s = 0.15  # for each 64 KiB; the silence is 2 s
        send = first.send(numbered(5, 300_000), 1, "x")
        like = TensorSpec((300_000,), torch.int64)
        assert torch.equal(second.recv(like, 0, "x").wait(), numbered(5, 300_000))
        send.wait()
        assert path.num_connections == 1
        path.delay_s = 0.0


@both_kinds
def test_cut_of_more_than_a_silence_is_waited_out(kind: Kind) -> None:
    with linked(kind, heartbeat_s=8.0) as (first, second, path):
        pending = second.recv(LARGE, 0, "x")
        path.cut()
        first.send(numbered(5), 1, "x")
        threading.Timer(3.0, path.restore).start()
        assert torch.equal(pending.wait(), numbered(5))


@both_kinds
def test_cut_of_more_than_a_heartbeat_loses_the_peer_and_says_for_how_long(kind: Kind) -> None:
    with linked(kind, heartbeat_s=1.0) as (first, second, path):
        pending = [first.recv(LARGE, 1, "x"), second.recv(LARGE, 0, "x")]
        path.cut()
        for end, peer in ((0, 1), (1, 0)):
            why = (
                rf"rank {end} lost rank {peer}.*: the connection broke: nothing came for 0.125 s, "
            )
            with pytest.raises(PeerLost, match=why + "and no other was opened in 1 s"):
                pending[end].wait()


@both_kinds
def test_end_that_is_held_back_for_long_is_not_dialled_again(kind: Kind) -> None:
    # Silent for 0.25 s is lost. With half of that a busy machine, whose threads wait, lost some.
    with linked(kind, heartbeat_s=2.0, buffer_bytes=1000) as (first, second, path):
        sends = [first.send(numbered(i), 1, str(i)) for i in range(8)]
        time.sleep(3.0)
        for i, send in enumerate(sends):
            assert torch.equal(second.recv(LARGE, 0, str(i)).wait(), numbered(i))
            send.wait()
        assert path.num_connections == 1


# Who may resume a link


def intruder(path: BrokenPath, secret: bytes, *, received: int = 0) -> str:
    """The reason for which an intruder that claims to be rank 0 is refused."""
    hello = Hello(
        protocol=PROTOCOL,
        from_rank=0,
        to_rank=1,
        num_connections=1,
        resumes=True,
        received=received,
    )
    host, port = path.address.split(":")
    with (
        socket.create_connection((host, int(port)), 5) as sock,
        pytest.raises(JoinError) as refusal,
    ):
        greeting.call(sock, hello, secret, time.monotonic() + 5)
    return str(refusal.value)


def test_another_rank_of_the_run_cannot_take_a_link_over() -> None:
    with linked(security=Security("token")) as (first, second, path):
        stream_both_ways(first, second, 3)
        assert intruder(path, b"token") == (
            "this is not the end that opened this link, or not the same run"
        )
        stream_both_ways(first, second, 3)
        assert path.num_connections == 2  # the link's own, and the intruder's


@pytest.mark.parametrize(("received", "said"), [(0, "0"), (10**15, "1000000000000000")])
def test_forged_count_of_what_arrived_is_refused(received: int, said: str) -> None:
    with linked() as (first, second, path):
        stream_both_ways(first, second, 6)
        time.sleep(0.1)
        secret = first._links[1].connections[0].session.secret
        refusal = intruder(path, secret, received=received)
        assert re.fullmatch(
            rf"it says that {said} bytes have arrived, of \d+ that were sent and \d+ that it had "
            "acknowledged",
            refusal,
        )
        stream_both_ways(first, second, 3)


def test_end_that_has_given_up_a_link_says_so() -> None:
    with linked() as (first, second, path):
        secret = first._links[1].connections[0].session.secret
        first.fail(PeerLost("enough"))
        start = time.monotonic()
        with pytest.raises(PeerLost, match="it broke off the link"):
            second.recv(LARGE, 0, "x").wait()
        assert time.monotonic() - start < 5  # and not the 8 s in which it could dial again
        assert intruder(path, secret) == "rank 1 has given up its link with rank 0"


def test_link_with_certificates_goes_on_after_resets(authority) -> None:
    one = authority()
    with linked(security=one.security("token"), reset_after=3e6) as (first, second, path):
        stream_both_ways(first, second, 40)
        path.heal()
        assert path.num_resets > 1


def test_acknowledgement_of_what_was_not_sent_breaks_the_link() -> None:
    here, there = socket.socketpair()
    session = LinkSession(8.0)
    session.attach(ByteFrames(SocketStream(here)), 0, 0)
    there.sendall(struct.pack(">IQ", 1, 5) + b"x")
    with there, pytest.raises(TransferError, match="it says that 5 bytes have arrived, of 0"):
        session.read(memoryview(bytearray(1)))
    session.close()
    session.release()


@both_kinds
def test_what_a_peer_never_acknowledges_is_bounded(kind: Kind) -> None:
    """It takes every byte and acknowledges none: each was kept, until there was no memory."""
    with linked(kind, buffer_bytes=1, transfer_timeout_s=2.0) as (first, second, _):
        theirs = second._links[0].connections[0].session
        ours = first._links[1].connections[0].session
        frames = theirs._frames
        assert frames is not None
        write = frames.write
        frames.write = lambda received, pieces: write(0, pieces)
        sends = [first.send(numbered(i), 1, str(i)) for i in range(6)]
        for i in range(2):  # and goes on below the bound
            assert torch.equal(second.recv(LARGE, 0, str(i)).wait(), numbered(i))
        for i in range(2, 6):
            second.recv(LARGE, 0, str(i))
        for send in sends[:2]:
            send.wait()
        with pytest.raises(TransferTimeout, match="has waited 2 s to hand over 2 to rank 1"):
            sends[2].wait()
        assert 16 << 20 <= ours._written - ours._acknowledged < 18 << 20


def test_path_that_loses_the_smallest_segments_too_is_given_up_in_words_over_grpc() -> None:
    """Connections opened, moved nothing and broke, one after the other, until timeouts.transfer."""
    with linked(GrpcTransport, heartbeat_s=2.0) as (first, second, path):
        stream_both_ways(first, second, 3)
        path.mtu = 500
        first.send(numbered(7), 1, "x")
        given_up = "the path may lose large packets|no other was opened in 2 s"
        with pytest.raises(PeerLost, match=given_up):
            first.recv(LARGE, 1, "y").wait()
        assert path.num_connections > 2
