"""What gRPC adds to a transport: meeting, refusing, holding back, and leaving nothing behind. Over real sockets."""

import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from dpipe.errors import JoinError, PeerLost, TransferError
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.mesh import PROTOCOL
from dpipe.wire.message import Header, framed
from dpipe.wire.rpc import Security, open_channel, serve, token_metadata
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import Hello

SCALAR = TensorSpec((), torch.float32)
METHOD = "/dpipe.wire.v1.Transport/Connect"
OPEN = Security()


@pytest.fixture
def make() -> Iterator[Callable[..., GrpcTransport]]:
    made: list[GrpcTransport] = []

    def make_transport(rank: int, **options: object) -> GrpcTransport:
        made.append(GrpcTransport(rank, **options))
        return made[-1]

    yield make_transport
    for transport in made:
        transport.close()


def address(transport: GrpcTransport) -> str:
    return f"127.0.0.1:{transport.port}"


def connect(*ends: GrpcTransport, hidden: tuple[int, ...] = ()) -> None:
    """Connect all with all; the ranks in `hidden` have no address."""
    addresses = {end.rank: None if end.rank in hidden else address(end) for end in ends}
    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(lambda end: end.connect(addresses, addresses.keys() - {end.rank}), ends))


def assert_link_works(source: GrpcTransport, target: GrpcTransport) -> None:
    source.send(torch.tensor(7.0), target.rank, "check")
    assert target.recv(SCALAR, source.rank, "check").wait().item() == 7.0


def hello(**fields: int) -> bytes:
    return Hello(
        **{"protocol": PROTOCOL, "from_rank": 0, "to_rank": 1, "num_connections": 1, **fields}
    ).SerializeToString()


def first(sequence: int = 0) -> bytes:
    """What a tensor's first message starts with."""
    return framed(Header(sequence, "x", SCALAR).encode())


class Stranger:
    """A client that is no dpipe: opens a stream with whatever hello, and sends whatever messages."""

    def __init__(self, port: int, greeting: bytes | None, security: Security = OPEN) -> None:
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.channel = open_channel(f"127.0.0.1:{port}", security, own_connection=True)
        metadata = token_metadata(security)
        if greeting is not None:
            metadata = (*metadata, ("dpipe-hello-bin", greeting))
        self.call = self.channel.stream_stream(METHOD)(iter(self.messages.get, None), metadata=metadata, timeout=10)

    def answer(self) -> bytes:
        return next(self.call)

    def leave(self) -> None:
        self.messages.put(None)
        self.channel.close()


def refusal(port: int, greeting: bytes | None, security: Security = OPEN) -> tuple[grpc.StatusCode, str]:
    stranger = Stranger(port, greeting, security)
    with pytest.raises(grpc.RpcError) as error:
        stranger.answer()
    stranger.leave()
    return error.value.code(), error.value.details()


# Meeting


@pytest.mark.parametrize("hidden", [(), (0,), (2,)], ids=["all reachable", "lowest behind NAT", "highest behind NAT"])
def test_links_open_whichever_end_can_be_reached(make: Callable[..., GrpcTransport], hidden: tuple[int, ...]) -> None:
    ends = [make(rank) for rank in range(3)]
    connect(*ends, hidden=hidden)
    for source in ends:
        for target in ends:
            if source is not target:
                assert_link_works(source, target)


def test_connect_refuses_two_ranks_without_an_address(make: Callable[..., GrpcTransport]) -> None:
    with pytest.raises(JoinError, match=r"rank 0 and rank 1 cannot meet: .* node\.advertise"):
        make(0).connect({0: None, 1: None}, [1])


def test_connect_names_every_blocked_peer_and_its_address(make: Callable[..., GrpcTransport]) -> None:
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addresses = {peer: f"127.0.0.1:{s.getsockname()[1]}" for peer, s in ((1, closed), (2, silent))}
        with pytest.raises(JoinError) as error:
            make(0, connect_timeout_s=0.5).connect({0: None, **addresses}, [1, 2])
    first, refused, unanswered = str(error.value).splitlines()
    assert first == "rank 0 cannot open every link:"
    assert f"rank 1 ({addresses[1]})" in refused
    assert "refused" in refused
    assert "firewall" in refused
    assert f"rank 2 ({addresses[2]}) did not answer within 0.5 s" in unanswered


def test_connect_names_a_peer_that_does_not_dial(make: Callable[..., GrpcTransport]) -> None:
    end = make(1, connect_timeout_s=0.2)
    with pytest.raises(JoinError, match=r"rank 0 \(10.0.0.1:1\) has not dialled 10.0.0.2:2 within 0.2 s"):
        end.connect({0: "10.0.0.1:1", 1: "10.0.0.2:2"}, [0])


def test_port_in_use_is_refused(make: Callable[..., GrpcTransport]) -> None:
    with pytest.raises(JoinError, match=r"cannot listen on 127\.0\.0\.1"):
        make(1, port=make(0).port)


def test_wrong_token_is_said_to_the_one_who_dials(make: Callable[..., GrpcTransport]) -> None:
    dialler = make(0, security=Security(token="guess"))
    with pytest.raises(JoinError, match=r"rank 1 .*wrong token: node\.token"):
        dialler.connect({0: None, 1: address(make(1, security=Security(token="secret")))}, [1])


def test_connection_counts_that_differ_are_refused(make: Callable[..., GrpcTransport]) -> None:
    ends = make(0, connections=2), make(1, connections=1, connect_timeout_s=0.5)
    with pytest.raises(JoinError, match=r"rank 1 has transport\.connections = 1, rank 0 2"):
        connect(*ends)


def test_server_that_is_no_dpipe_is_refused(make: Callable[..., GrpcTransport]) -> None:
    echo = grpc.stream_stream_rpc_method_handler(lambda messages, context: iter([b"good day"]))
    handler = grpc.method_handlers_generic_handler("dpipe.wire.v1.Transport", {"Connect": echo})
    server, port = serve([handler], "127.0.0.1", 0, OPEN, 2)
    with pytest.raises(JoinError, match=r"rank 1 .* is no dpipe transport"):
        make(0).connect({0: None, 1: f"127.0.0.1:{port}"}, [1])
    server.stop(None).wait(5)


# Refusing


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (None, "speaks dpipe transport 2, not 0"),
        (b"\xff\xff\xff", "speaks dpipe transport 2, not 0"),
        (hello(protocol=9), "speaks dpipe transport 2, not 9"),
        (hello(to_rank=3), "rank 1 listens here, not rank 3"),
        (hello(from_rank=5), "expects no link from rank 5"),
        (hello(connection=7), r"transport.connections = 1"),
        (hello(), "two processes have one number"),
    ],
    ids=["no hello", "garbled hello", "other version", "other rank", "unknown rank", "connection", "duplicate rank"],
)
def test_stranger_is_refused_and_links_go_on(
    make: Callable[..., GrpcTransport], greeting: bytes | None, reason: str
) -> None:
    ends = make(0), make(1)
    connect(*ends)
    code, details = refusal(ends[1].port, greeting)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert reason in details
    assert_link_works(*ends)


def test_stranger_without_the_token_is_refused_and_links_go_on(make: Callable[..., GrpcTransport]) -> None:
    ends = [make(rank, security=Security(token="secret")) for rank in (0, 1)]
    connect(*ends)
    code, _ = refusal(ends[1].port, hello(), Security(token="guess"))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert_link_works(*ends)


def test_random_bytes_to_the_port_are_refused_and_links_go_on(make: Callable[..., GrpcTransport]) -> None:
    ends = make(0), make(1)
    connect(*ends)
    noise = random.Random(0)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", ends[1].port), timeout=5) as stranger:
            stranger.sendall(noise.randbytes(4096))
            while stranger.recv(4096):  # until gRPC hangs up
                pass
    assert_link_works(*ends)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"\xff" * 100], "a message of 4294967295 bytes is announced where at most 65536 make sense"),
        ([framed(b"")[:3]], "a message of 3 bytes stands where a tensor's header belongs"),
        ([first(5)], "sent tensor 5 where 0 belongs"),
        ([first() + b"12345"], "sent 5 bytes where 4 are due"),
        ([first()], "sent 0 bytes where 4 are due"),
        ([first() + b"12", b"345"], "sent 3 bytes where 2 are due"),
        ([first() + b"12", b""], "sent 0 bytes where 2 are due"),
    ],
    ids=["no header", "no size", "wrong number", "too many bytes", "no bytes", "too many later", "none later"],
)
def test_nonsense_on_a_link_breaks_that_link_alone(
    make: Callable[..., GrpcTransport], messages: list[bytes], reason: str
) -> None:
    middle, other = make(1), make(2)
    stranger = Stranger(middle.port, hello())
    addresses = {0: "127.0.0.1:1", 1: address(middle), 2: address(other)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end.connect(addresses, {1: [0, 2], 2: [1]}[end.rank]), (middle, other)))
    pending = middle.recv(SCALAR, 0, "x")
    for message in messages:
        stranger.messages.put(message)
    with pytest.raises(TransferError, match=reason):
        pending.wait()
    assert_link_works(middle, other)
    assert_link_works(other, middle)
    stranger.leave()


def test_stream_that_ends_within_a_tensor_loses_the_peer(make: Callable[..., GrpcTransport]) -> None:
    end = make(1)
    stranger = Stranger(end.port, hello())
    end.connect({0: "127.0.0.1:1", 1: address(end)}, [0])
    pending = end.recv(SCALAR, 0, "x")
    for message in (first() + b"12", None):
        stranger.messages.put(message)
    with pytest.raises(PeerLost, match="within a tensor"):
        pending.wait()
    stranger.leave()


def test_peer_whose_connection_breaks_is_lost_by_name(make: Callable[..., GrpcTransport]) -> None:
    end = make(1)
    stranger = Stranger(end.port, hello())
    end.connect({0: "127.0.0.1:1", 1: address(end)}, [0])
    pending = end.recv(SCALAR, 0, "x")
    stranger.channel.close()
    with pytest.raises(
        PeerLost, match=r"rank 1 lost rank 0 \(127.0.0.1:1\): (the connection broke|it closed the link)"
    ):
        pending.wait()


KILLED = """
import sys, time
from dpipe.transport.grpc import GrpcTransport
end = GrpcTransport(1)
sys.stdout.write(f"{end.port}\\n")
sys.stdout.flush()
end.connect({0: None, 1: f"127.0.0.1:{end.port}"}, [0])
time.sleep(60)
"""


def test_killed_peer_is_lost_at_once_and_by_name(make: Callable[..., GrpcTransport]) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        end = make(0)
        end.connect({0: None, 1: f"127.0.0.1:{port}"}, [1])
        pending = end.recv(SCALAR, 1, "x")
        process.kill()
        start = time.monotonic()
        with pytest.raises(PeerLost, match=rf"rank 0 lost rank 1 \(127\.0\.0\.1:{port}\)"):
            pending.wait()
        assert time.monotonic() - start < 5.0


# Holding back


def test_sender_is_held_back_while_the_buffer_of_its_peer_is_full(make: Callable[..., GrpcTransport]) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32)  # 4 MiB
    like, num_sends = TensorSpec.of(tensor), 48
    ends = make(0), make(1, buffer_bytes=2 * like.num_bytes)
    connect(*ends)
    sends = [ends[0].send(tensor, 1, str(i)) for i in range(num_sends)]
    held_back = -1
    while held_back != (held_back := ends[0].bytes_sent(1)):
        time.sleep(0.5)
    assert held_back < num_sends / 2 * like.num_bytes  # two in the buffer, some in HTTP/2 windows and sockets
    for i in range(num_sends):
        assert torch.equal(ends[1].recv(like, 0, str(i)).wait(), tensor)
    sends[-1].wait()
    assert ends[0].bytes_sent(1) == num_sends * like.num_bytes


def test_tensor_larger_than_the_buffer_waits_for_its_receive(make: Callable[..., GrpcTransport]) -> None:
    ends = make(0), make(1, buffer_bytes=1000)
    connect(*ends)
    tensor = torch.arange(100_000)
    ends[0].send(tensor, 1, "x")
    time.sleep(0.1)
    assert torch.equal(ends[1].recv(TensorSpec.of(tensor), 0, "x").wait(), tensor)


# Leaving


def test_close_leaves_no_thread(make: Callable[..., GrpcTransport]) -> None:
    before = set(threading.enumerate())
    ends = [make(rank, connections=2) for rank in range(3)]
    connect(*ends)
    assert_link_works(ends[0], ends[2])
    for end in ends:
        end.close()
    deadline = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


def test_close_is_bounded_while_the_peer_takes_nothing(
    make: Callable[..., GrpcTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.transport.mesh.CLOSE_S", 0.5)
    ends = make(0), make(1, buffer_bytes=0)
    connect(*ends)
    ends[0].send(torch.zeros(8 << 20), 1, "x")
    start = time.monotonic()
    ends[0].close()
    assert time.monotonic() - start < 4.0


def test_close_after_a_failure_does_not_wait_for_queued_sends(make: Callable[..., GrpcTransport]) -> None:
    ends = make(0), make(1, buffer_bytes=0)
    connect(*ends)
    ends[0].send(torch.zeros(8 << 20), 1, "x")
    ends[0].fail(RuntimeError("out of memory"))
    start = time.monotonic()
    ends[0].close()
    assert time.monotonic() - start < 2.0


def test_sent_tensor_is_let_go_when_its_bytes_are_handed_over(make: Callable[..., GrpcTransport]) -> None:
    ends = make(0), make(1)
    connect(*ends)
    sent = ends[0].send(torch.zeros(10), 1, "x")
    assert sent.view is not None or sent.done()
    sent.wait()
    assert sent.view is None


# TLS


def test_link_with_certificates_of_one_authority_works(make: Callable[..., GrpcTransport], authority) -> None:
    one = authority()
    ends = [make(rank, security=one.security("secret"), connections=2) for rank in (0, 1)]
    connect(*ends)
    assert_link_works(*ends)


def test_certificate_of_another_authority_is_refused(make: Callable[..., GrpcTransport], authority) -> None:
    ends = [make(rank, security=authority().security("secret"), connect_timeout_s=3.0) for rank in (0, 1)]
    with pytest.raises(JoinError, match=r"rank 1 .*certificates of one authority \(node\.tls_\*\)"):
        ends[0].connect({0: None, 1: address(ends[1])}, [1])


def test_peer_without_a_certificate_is_refused(make: Callable[..., GrpcTransport], authority) -> None:
    server = make(1, security=authority().security("secret"))
    with pytest.raises(JoinError, match=r"node\.tls_\*"):
        make(0, connect_timeout_s=3.0).connect({0: None, 1: address(server)}, [1])
