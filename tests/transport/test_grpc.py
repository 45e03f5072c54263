"""How a gRPC transport refuses strangers and invalid messages, over real sockets. For both kinds:
test_mesh.py.
"""

import queue
import struct
import threading

import grpc
import pytest
import torch
from ends import SCALAR, Make, address, assert_link_works, connect, connect_between

from dpipe.errors import JoinError, PeerLost, TransferError
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.mesh import PROTOCOL
from dpipe.wire.message import Header, framed
from dpipe.wire.rpc import Security, open_channel, serve, token_metadata
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import Hello

METHOD = "/dpipe.wire.v1.Transport/Connect"
OPEN = Security()


@pytest.fixture
def kind() -> type[GrpcTransport]:
    return GrpcTransport


def hello(**fields: int) -> bytes:
    return Hello(
        **{"protocol": PROTOCOL, "from_rank": 0, "to_rank": 1, "num_connections": 1, **fields}
    ).SerializeToString()


def first(sequence: int = 0) -> bytes:
    """The start of a tensor's first message."""
    return framed(Header(sequence, "x", SCALAR).encode())


def frame(payload: bytes, *, arrived: int = 0) -> bytes:
    return struct.pack(">IQ", len(payload), arrived) + payload


class Stranger:
    """A client that is not dpipe: it opens a stream with any hello and sends any messages."""

    def __init__(self, port: int, greeting: bytes | None, security: Security = OPEN) -> None:
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.channel = open_channel(f"127.0.0.1:{port}", security, own_connection=True)
        metadata = token_metadata(security)
        if greeting is not None:
            metadata = (*metadata, ("dpipe-hello-bin", greeting))
        self.call = self.channel.stream_stream(METHOD)(
            iter(self.messages.get, None), metadata=metadata, timeout=10
        )

    def answer(self) -> bytes:
        return next(self.call)

    def leave(self) -> None:
        self.messages.put(None)
        self.channel.close()


def refusal(
    port: int, greeting: bytes | None, security: Security = OPEN
) -> tuple[grpc.StatusCode, str]:
    stranger = Stranger(port, greeting, security)
    with pytest.raises(grpc.RpcError) as error:
        stranger.answer()
    stranger.leave()
    return error.value.code(), error.value.details()


def test_server_that_is_no_dpipe_is_refused(make: Make) -> None:
    echo = grpc.stream_stream_rpc_method_handler(lambda messages, context: iter([b"good day"]))
    handler = grpc.method_handlers_generic_handler("dpipe.wire.v1.Transport", {"Connect": echo})
    server = serve([handler], "127.0.0.1", 0, OPEN, 2)
    with pytest.raises(JoinError, match=r"rank 1 .* is no dpipe transport"):
        make(0).connect({0: None, 1: f"127.0.0.1:{server.port}"}, [1])
    server.stop(0)
    server.join(5)


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (None, "speaks dpipe transport 7, not 0"),
        (b"\xff\xff\xff", "speaks dpipe transport 7, not 0"),
        (hello(protocol=9), "speaks dpipe transport 7, not 9"),
        (hello(to_rank=3), "rank 1 listens here, not rank 3"),
        (hello(from_rank=5), "expects no link from rank 5"),
        (hello(connection=7), r"transport.connections = 1"),
        (hello(), "two processes have one number"),
    ],
    ids=[
        "no hello",
        "garbled hello",
        "other version",
        "other rank",
        "unknown rank",
        "connection",
        "duplicate rank",
    ],
)
def test_stranger_is_refused_and_links_go_on(
    make: Make, greeting: bytes | None, reason: str
) -> None:
    ends = make(0), make(1)
    connect(*ends)
    code, details = refusal(ends[1].port, greeting)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert reason in details
    assert_link_works(*ends)


def test_stranger_without_the_token_is_refused_and_links_go_on(make: Make) -> None:
    ends = [make(rank, security=Security(token="secret")) for rank in (0, 1)]
    connect(*ends)
    code, _ = refusal(ends[1].port, hello(), Security(token="guess"))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert_link_works(*ends)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [frame(b"\xff" * 100)],
            "a message of 4294967295 bytes is announced where at most 65536 make sense",
        ),
        (
            [frame(framed(b"\xff" * 100))],
            "a message of 100 bytes stands where a tensor's header belongs",
        ),
        ([frame(first(5))], "sent tensor 5 where 0 belongs"),
        ([frame(first(5))[:7], b"", frame(first(5))[7:]], "sent tensor 5 where 0 belongs"),
        ([frame(b"", arrived=5)], "it says that 5 bytes have arrived, of 0 that were sent"),
    ],
    ids=["huge header", "no header", "wrong number", "in pieces", "forged count"],
)
def test_nonsense_on_a_link_breaks_that_link_alone(
    make: Make, messages: list[bytes], reason: str
) -> None:
    middle, other = make(1), make(2)
    stranger = Stranger(middle.port, hello())
    connect_between(middle, other)
    pending = middle.recv(SCALAR, 0, "x")
    for message in messages:
        stranger.messages.put(message)
    with pytest.raises(TransferError, match=reason):
        pending.wait()
    assert_link_works(middle, other)
    assert_link_works(other, middle)
    stranger.leave()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([frame(first() + b"12"), None], "no other was opened in 0.5 s"),
        ([frame(bytes(4)), None], "it closed the link"),
    ],
    ids=["half a tensor", "a farewell"],
)
def test_peer_whose_stream_ends_is_lost_by_name_and_told_apart(
    make: Make, messages: list[bytes | None], reason: str
) -> None:
    end = make(1, heartbeat_s=0.5)
    stranger = Stranger(end.port, hello())
    end.connect({0: "127.0.0.1:1", 1: address(end)}, [0])
    pending = end.recv(SCALAR, 0, "x")
    for message in messages:
        stranger.messages.put(message)
    with pytest.raises(PeerLost, match=rf"rank 1 lost rank 0 \(127.0.0.1:1\): .*{reason}$"):
        pending.wait()
    stranger.leave()


def test_peer_whose_connection_breaks_is_lost_by_name(make: Make) -> None:
    end = make(1, heartbeat_s=0.5)
    stranger = Stranger(end.port, hello())
    end.connect({0: "127.0.0.1:1", 1: address(end)}, [0])
    pending = end.recv(SCALAR, 0, "x")
    stranger.channel.close()
    with pytest.raises(
        PeerLost,
        match=r"rank 1 lost rank 0 \(127.0.0.1:1\): the connection broke: .*, and no other was",
    ):
        pending.wait()


def test_no_thread_stands_between_a_tensor_and_that_of_grpc(make: Make) -> None:
    """It was woken for each tensor, and waited for the interpreter behind what computes."""
    ends = (make(0), make(1))
    connect(*ends)
    assert_link_works(*ends)
    names = [thread.name for thread in threading.enumerate()]
    assert "dpipe-read-0-1.0" in names
    assert not any(name.startswith("dpipe-write-") for name in names)


def test_stream_that_ends_first_cuts_no_other_short(make: Make) -> None:
    near, far = make(0, connections=3), make(1, connections=3)
    connect(near, far)
    tensor = torch.randn(1 << 20)
    receiving = near.recv(TensorSpec.of(tensor), 1, "x")
    held = near._links[1].connections[1].session  # its stripe is read last
    late = far._links[0].connections[2]  # ends last
    read, enqueue = held.read, late.enqueue
    ended = threading.Event()

    def read_late(view: memoryview) -> None:
        ended.wait(5.0)
        read(view)

    held.read = read_late
    late.enqueue = lambda sending: threading.Timer(0.3, enqueue, [sending]).start()
    far.send(tensor, 0, "x")
    threading.Timer(0.6, ended.set).start()
    far.close()
    assert torch.equal(receiving.wait(), tensor)
