"""How a TCP transport refuses strangers and invalid messages, over real sockets. For both kinds:
test_mesh.py.
"""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from ends import SCALAR, Make, address, assert_link_works, connect, connect_between

from dpipe.errors import ConfigError, JoinError, PeerLost, TransferError
from dpipe.session import greeting
from dpipe.session.stream import tune
from dpipe.transport.mesh import PROTOCOL
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.message import Header, framed
from dpipe.wire.rpc import Security
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import Greeting, Hello


@pytest.fixture
def kind() -> type[TcpTransport]:
    return TcpTransport


def hello(**fields: int) -> Hello:
    return Hello(
        **{"protocol": PROTOCOL, "from_rank": 0, "to_rank": 1, "num_connections": 1, **fields}
    )


def first(sequence: int = 0) -> bytes:
    return framed(Header(sequence, "x", SCALAR).encode())


def frame(payload: bytes) -> bytes:
    return struct.pack(">IQ", len(payload), 0) + payload


@contextmanager
def dialled(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        yield stranger


def soon() -> float:
    return time.monotonic() + 5


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (hello(protocol=9), "speaks dpipe transport 7, not 9"),
        (hello(to_rank=3), "rank 1 listens here, not rank 3"),
        (hello(from_rank=5), "expects no link from rank 5"),
        (hello(connection=7), r"transport.connections = 1"),
        (hello(), "two processes have one number"),
    ],
    ids=["other version", "other rank", "unknown rank", "connection", "duplicate rank"],
)
def test_unexpected_caller_gets_the_reason_and_links_continue(
    make: Make, said: Hello, reason: str
) -> None:
    ends = make(0), make(1)
    connect(*ends)
    with dialled(ends[1].port) as stranger, pytest.raises(JoinError, match=reason):
        greeting.call(stranger, said, b"", soon())
    assert_link_works(*ends)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 100,
        framed(b"\xff" * 100),
        framed(b""),
        framed(Greeting(hello=hello(), challenge=b"short").SerializeToString()),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["huge", "garbled", "empty", "short challenge", "http"],
)
def test_garbage_instead_of_a_greeting_is_hung_up_on_and_links_go_on(
    make: Make, said: bytes
) -> None:
    ends = make(0), make(1)
    connect(*ends)
    with dialled(ends[1].port) as stranger:
        stranger.sendall(said)
        with suppress(ConnectionResetError):
            assert stranger.recv(4096) == b""
    assert_link_works(*ends)


def test_one_who_cannot_prove_the_token_learns_no_proof_of_it(make: Make) -> None:
    end = make(1, security=Security("secret"))
    with dialled(end.port) as stranger:
        deadline = soon()
        greeting._send(stranger, Greeting(hello=hello(), challenge=bytes(32)), deadline)
        challenge = greeting._receive(stranger, deadline)
        greeting._send(stranger, Greeting(proof=bytes(32)), deadline)
        answer = greeting._receive(stranger, deadline)
    assert (challenge.proof, answer.proof) == (b"", b"")
    assert "wrong token" in answer.refusal


def test_listener_who_cannot_prove_the_token_is_not_trusted(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            sock, _ = impostor.accept()
            with sock:
                greeting._receive(sock, soon())
                greeting._send(sock, Greeting(challenge=bytes(32)), soon())
                greeting._receive(sock, soon())
                greeting._send(sock, Greeting(proof=bytes(32)), soon())

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(JoinError, match=r"rank 1 .* is no dpipe transport: its proof"):
            make(0).connect({0: None, 1: f"127.0.0.1:{impostor.getsockname()[1]}"}, [1])
        thread.join(5)


def test_silent_strangers_are_let_go_and_others_still_come_in(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.transport.tcp.GREETING_S", 0.3)
    # For as long the kernel keeps those who say nothing to itself.
    monkeypatch.setattr("dpipe.session.listen.GREETING_S", 0.3)
    monkeypatch.setattr("dpipe.transport.tcp.MAX_LINKS", 2)
    ends = make(0), make(1)
    silent = [socket.create_connection(("127.0.0.1", ends[1].port), timeout=5) for _ in range(3)]
    connect(*ends)
    assert_link_works(*ends)
    for stranger in silent:
        with stranger:
            assert stranger.recv(1) == b""


def test_stranger_who_drips_bytes_gains_no_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.transport.tcp.GREETING_S", 0.3)
    start = time.monotonic()
    with dialled(make(1).port) as stranger, suppress(ConnectionError):
        stranger.sendall((1000).to_bytes(4, "big"))
        for _ in range(200):  # until it hangs up
            stranger.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            b"\xff" * 100,
            "a message of 4294967295 bytes is announced where at most 65536 make sense",
        ),
        (framed(b"\xff" * 100), "a message of 100 bytes stands where a tensor's header belongs"),
        (first(5), "sent tensor 5 where 0 belongs"),
    ],
    ids=["huge header", "no header", "wrong number"],
)
def test_nonsense_on_a_link_breaks_that_link_alone(make: Make, said: bytes, reason: str) -> None:
    middle, other = make(1), make(2)
    with dialled(middle.port) as stranger:
        thread = threading.Thread(target=greeting.call, args=(stranger, hello(), b"", soon()))
        thread.start()
        connect_between(middle, other)
        thread.join(5)
        pending = middle.recv(SCALAR, 0, "x")
        stranger.sendall(frame(said))
        with pytest.raises(TransferError, match=reason):
            pending.wait()
    assert_link_works(middle, other)
    assert_link_works(other, middle)


BROKE = "the connection broke: it closed the connection, and no other was opened in 0.5 s"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", BROKE),
        (frame(first() + b"12"), BROKE),
        (frame(bytes(4)), "it closed the link"),
    ],
    ids=["nothing", "half a tensor", "a farewell"],
)
def test_peer_whose_connection_ends_is_lost_by_name_with_the_cause(
    make: Make, said: bytes, reason: str
) -> None:
    end = make(1, heartbeat_s=0.5)
    with dialled(end.port) as stranger:
        thread = threading.Thread(target=greeting.call, args=(stranger, hello(), b"", soon()))
        thread.start()
        end.connect({0: "127.0.0.1:1", 1: address(end)}, [0])
        thread.join(5)
        pending = end.recv(SCALAR, 0, "x")
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost, match=rf"rank 1 lost rank 0 \(127.0.0.1:1\): {reason}$"):
            pending.wait()


def test_invalid_certificates_are_refused(make: Make) -> None:
    broken = Security("secret", b"no certificate", b"no key", b"no authority")
    with pytest.raises(
        JoinError, match=r"node\.tls_cert, node\.tls_key, node\.tls_ca cannot be used"
    ):
        make(0, security=broken)


def test_address_without_a_port_is_named_as_blocked(make: Make) -> None:
    with pytest.raises(JoinError, match=r"rank 1 \(nowhere\): .*node\.advertise"):
        make(0).connect({0: None, 1: "nowhere"}, [1])


def test_link_over_ipv6_works(make: Make) -> None:
    if not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    ends = make(0), make(1, bind="[::1]")
    addresses = {0: None, 1: f"[::1]:{ends[1].port}"}
    thread = threading.Thread(target=ends[1].connect, args=(addresses, [0]))
    thread.start()
    ends[0].connect(addresses, [1])
    thread.join(5)
    assert_link_works(*ends)


def test_both_ends_of_a_link_use_the_configured_congestion_control(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = []

    def spy(sock: socket.socket, silence_s: float, unacknowledged_s: float) -> None:
        tune(sock, silence_s, unacknowledged_s)
        sockets.append(sock)

    monkeypatch.setattr("dpipe.transport.tcp.tune", spy)
    ends = [make(rank, congestion_control="reno", connections=2) for rank in (0, 1)]
    connect(*ends)
    assert_link_works(*ends)
    names = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for sock in sockets]
    assert len(names) == 4  # both ends of two connections
    assert {name.rstrip(b"\0") for name in names} == {b"reno"}


def test_congestion_control_that_the_host_lacks_is_refused_before_anybody_is_met(
    make: Make,
) -> None:
    with pytest.raises(ConfigError, match='congestion_control "nobody_wrote_it" cannot be set'):
        make(0, congestion_control="nobody_wrote_it")


def test_long_messages_leave_one_after_another_on_a_shared_uplink(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    to rank 0   [ 1 MB at 4 MB/s ]
    to rank 2                     [ 1 MB ]
    """
    monkeypatch.setattr("dpipe.session.window._LONG_US", 0)  # as if loopback were long
    ends = [make(rank, uplink_bytes_per_s=4e6) for rank in range(3)]
    connect(*ends)
    large = torch.zeros(250_000)
    sent = [ends[1].send(large, peer, "large") for peer in (0, 2)]
    for peer in (0, 2):
        ends[peer].recv(TensorSpec.of(large), 1, "large").wait()
    for sending in sent:
        sending.wait()
    early, late = sorted((sending.moved for sending in sent), key=lambda moved: moved.start_ns)
    assert late.start_ns >= early.end_ns
    # Of each connection, the first ten packets leave at once: 640 kB on loopback.
    assert late.end_ns - late.start_ns > 0.05e9


def test_peer_that_takes_nothing_does_not_hold_up_the_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.session.window._LONG_US", 0)
    monkeypatch.setattr("dpipe.session.uplink._LATE", 0)
    monkeypatch.setattr("dpipe.session.uplink._LEAST_S", 0.2)
    ends = [make(rank, uplink_bytes_per_s=40e6, buffer_bytes=1) for rank in range(3)]
    connect(*ends)
    # More than kernels hold: rank 0 has not asked for it, and has room for one byte.
    held_back = ends[1].send(torch.zeros(8_000_000), 0, "held back")
    large = torch.ones(2_500_000)
    ends[1].send(large, 2, "large")
    assert torch.equal(ends[2].recv(TensorSpec.of(large), 1, "large").wait(), large)
    assert not held_back.done()
    ends[0].recv(TensorSpec((8_000_000,), torch.float32), 1, "held back").wait()
