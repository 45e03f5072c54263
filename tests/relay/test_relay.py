"""Two ranks that cannot dial each other, and the relay in the coordinator's server between them."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import grpc
import pytest
import torch
from support.certificates import Authority

from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.relay.ends import RelayEnds
from dpipe.relay.server import METHOD, PROTOCOL, STREAMS_A_LINK, proof_of
from dpipe.session.grpc_stream import hello_metadata
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.mesh import Mesh
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.rpc import Security, open_channel
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import Hello

Linked = tuple[Mesh, Mesh]
END_S = 3.0  # by far less than any silence


class Hidden:
    """Ranks that have joined, and have no address that others could dial."""

    def __init__(self, count: int = 2, security: Security = Security()) -> None:  # noqa: B008
        self.server = CoordinatorServer(count, security=security)
        self.security = security
        self.address = f"127.0.0.1:{self.server.port}"
        with ThreadPoolExecutor(count) as pool:
            self.ranks = list(pool.map(lambda rank: self._join(rank, count), range(count)))

    def _join(self, rank: int, count: int) -> Coordinator:
        return Coordinator.join(self.address, rank, count, shared={}, security=self.security)

    def ends(self, rank: int) -> RelayEnds:
        secrets = self.ranks[rank].link_secrets
        return RelayEnds(rank, self.address, self.security, secrets, silence_s=40.0)

    def stream(self, rank: int, peer: int, proof: bytes | None = None):
        """A stream of `rank` to the relay."""
        hello = Hello(protocol=PROTOCOL, from_rank=rank, to_rank=peer)
        if proof is None:
            proof = proof_of(self.ranks[rank].link_secrets[peer], hello)
        channel = open_channel(self.address, self.security, own_connection=True)
        dial = channel.stream_stream(METHOD)
        # It says nothing, until it is cancelled.
        silence = iter(threading.Event().wait, True)
        return dial(silence, metadata=hello_metadata(self.security, hello, proof))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.server.close(wait_s=0.0)


@pytest.fixture
def hidden() -> Iterator[Hidden]:
    with closing(Hidden()) as hidden:
        yield hidden


@pytest.fixture
def pair(hidden: Hidden) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection that rank 0 has dialled, through the relay, to rank 1."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = [stack.enter_context(closing(hidden.ends(rank))) for rank in (0, 1)]
        ends[1].listen(0, f"127.0.0.1:{listener.getsockname()[1]}")
        host, _, port = ends[0].doorway(1).rpartition(":")
        near = stack.enter_context(socket.create_connection((host, int(port)), 10))
        listener.settimeout(10)
        far = stack.enter_context(listener.accept()[0])
        far.settimeout(10)
        yield near, far


@pytest.fixture
def linked() -> Iterator[Callable[..., Linked]]:
    """`linked(kind, security, **options)`: transports of two hidden ranks, with an open link."""
    with ExitStack() as stack:

        def link(kind: type[Mesh], security: Security = Security(), **options) -> Linked:  # noqa: B008
            hidden = stack.enter_context(closing(Hidden(2, security)))
            meshes = [kind(rank, security=security, **options) for rank in (0, 1)]
            for mesh in meshes:
                stack.callback(mesh.close)
            with ThreadPoolExecutor(2) as pool:
                list(
                    pool.map(
                        lambda rank: meshes[rank].prepare(hidden.ranks[rank], [1 - rank]), (0, 1)
                    )
                )
            assert hidden.ranks[0].relayed == hidden.ranks[1].relayed == ((0, 1),)
            return meshes[0], meshes[1]

        yield link


def carries(source: Mesh, target: Mesh, count: int = 8) -> None:
    """Tensors arrive in the order in which they were sent, with every bit."""
    tensors = [torch.randn(300, 1000) for _ in range(count)]
    like = TensorSpec((300, 1000), torch.float32)
    arriving = [target.recv(like, source.rank, f"tag{i}") for i in range(count)]
    for i, tensor in enumerate(tensors):
        source.send(tensor, target.rank, f"tag{i}")
    for receiving, tensor in zip(arriving, tensors, strict=True):
        assert torch.equal(receiving.wait(), tensor)


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("kind", [GrpcTransport, TcpTransport])
def test_link_of_hidden_ranks_carries_tensors_both_ways(
    linked: Callable[..., Linked], kind: type[Mesh], connections: int
) -> None:
    low, high = linked(kind, connections=connections)
    carries(low, high)
    carries(high, low)


@pytest.mark.parametrize("kind", [GrpcTransport, TcpTransport])
def test_relayed_link_has_token_and_tls_end_to_end(
    linked: Callable[..., Linked], kind: type[Mesh]
) -> None:
    security = Authority().security("secret")
    low, high = linked(kind, security)
    carries(low, high)
    carries(high, low)


@pytest.mark.parametrize("kind", [GrpcTransport, TcpTransport])
def test_relayed_link_that_breaks_is_dialled_again(
    linked: Callable[..., Linked], kind: type[Mesh]
) -> None:
    low, high = linked(kind)
    carries(low, high, count=2)
    for connection in low._links[1].connections:
        connection.session.stream.give_up()
    carries(low, high, count=2)
    carries(high, low, count=2)


def test_end_that_has_said_all_still_hears_the_other(pair: tuple[socket.socket, ...]) -> None:
    near, far = pair
    near.sendall(b"all")
    near.shutdown(socket.SHUT_WR)
    assert far.makefile("rb").read() == b"all"
    far.sendall(b"an answer")
    far.close()
    assert near.makefile("rb").read() == b"an answer"


@pytest.mark.parametrize("dying", [0, 1])
def test_end_that_dies_is_noticed_at_once(pair: tuple[socket.socket, ...], dying: int) -> None:
    pair[dying].sendall(b"here")
    assert pair[1 - dying].recv(4) == b"here"
    began = time.monotonic()
    pair[dying].close()
    assert pair[1 - dying].recv(1) == b""
    assert time.monotonic() - began < END_S


def test_rank_whose_relay_ends_die_is_noticed_at_once(hidden: Hidden) -> None:
    with closing(hidden.ends(0)) as ends, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        dying = hidden.ends(1)
        dying.listen(0, f"127.0.0.1:{listener.getsockname()[1]}")
        host, _, port = ends.doorway(1).rpartition(":")
        with socket.create_connection((host, int(port)), 10) as near, listener.accept()[0]:
            dying.close()
            began = time.monotonic()
            assert near.recv(1) == b""
            assert time.monotonic() - began < END_S


def sent_until_held_up(sock: socket.socket) -> int:
    block = bytes(1 << 20)
    sent = 0
    sock.settimeout(1.0)
    with suppress(TimeoutError):
        while sent < 1 << 30:
            sent += sock.send(block)
    sock.settimeout(10)
    return sent


def test_slow_reader_holds_up_the_writer(pair: tuple[socket.socket, ...]) -> None:
    near, far = pair
    sent = sent_until_held_up(near)
    assert sent < 128 << 20  # what the sockets and gRPC's windows of four connections hold
    received = 0
    while received < sent:
        received += len(far.recv(1 << 20))
    near.sendall(b"goes on")
    assert far.recv(7) == b"goes on"


def code_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    return caught.value.code(), caught.value.details()


def test_stranger_without_the_secret_gets_nothing(hidden: Hidden) -> None:
    # It waits to be dialled as rank 1 would, and has not its secret.
    code, why = code_of(hidden.stream(1, 0, proof=b"a guess"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert why == "this is not a rank of this run"


def test_rank_cannot_claim_to_be_another() -> None:
    with closing(Hidden(3)) as hidden:
        own = hidden.ranks[2].link_secrets[0]
        hello = Hello(protocol=PROTOCOL, from_rank=1, to_rank=0)
        code, _ = code_of(hidden.stream(1, 0, proof=proof_of(own, hello)))
        assert code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("ranks", [(0, 0), (0, 7), (7, 0)])
def test_ranks_that_there_are_not_are_refused(hidden: Hidden, ranks: tuple[int, int]) -> None:
    _, why = code_of(hidden.stream(*ranks, proof=b""))
    assert why == "there are no such ranks"


def test_other_version_of_the_relay_is_named(hidden: Hidden) -> None:
    channel = open_channel(hidden.address, hidden.security)
    call = channel.stream_stream(METHOD)(
        iter(()), metadata=hello_metadata(hidden.security, Hello(protocol=9), b"")
    )
    assert code_of(call)[1] == f"this relay speaks protocol {PROTOCOL}, not 9"


def test_streams_of_a_link_are_bounded(hidden: Hidden) -> None:
    calls = [hidden.stream(0, 1) for _ in range(STREAMS_A_LINK + 1)]
    refused = threading.Event()
    for call in calls:
        # False where it is over already.
        if call.add_callback(refused.set) is False:
            refused.set()
    assert refused.wait(20)
    over = [call for call in calls if not call.is_active()]
    assert [call.code() for call in over] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    for call in calls:
        call.cancel()


def test_refusal_by_the_relay_is_logged(hidden: Hidden, caplog: pytest.LogCaptureFixture) -> None:
    secrets = {1: b"of another run"}
    with closing(RelayEnds(0, hidden.address, hidden.security, secrets, 40.0)) as ends:
        host, _, port = ends.doorway(1).rpartition(":")
        with socket.create_connection((host, int(port)), 10) as near:
            assert near.recv(1) == b""
    assert "does not relay a link: this is not a rank of this run" in caplog.text
