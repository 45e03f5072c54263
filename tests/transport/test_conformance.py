"""The conformance suite of all transports, on two ranks in this process: rank 0 and rank 1.

A new transport joins by adding a function to `PAIRS` that returns both ends of a connected pair.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch
from directory import prepare
from fakes.fake_cuda import FakeCuda, ThreadedStreams
from fakes.fake_nccl import FakeNccl, Settling

from dpipe.errors import PeerLost, RunAborted, RunError, TransferError, TransferTimeout
from dpipe.network.link import Link, Network
from dpipe.transport.base import Transport
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.local import LocalHub
from dpipe.transport.nccl import NcclTransport
from dpipe.transport.shaped import ShapedTransport
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.spec import TensorSpec

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
Pair = tuple[Transport, Transport]


def local_pair(transfer_timeout_s: float) -> Pair:
    hub = LocalHub(2, transfer_timeout_s=transfer_timeout_s)
    return hub.transport(0), hub.transport(1)


def mesh_pair(
    transfer_timeout_s: float, kind: type[GrpcTransport | TcpTransport], connections: int
) -> Pair:
    ends = [
        kind(rank, connections=connections, transfer_timeout_s=transfer_timeout_s)
        for rank in (0, 1)
    ]
    return ends[0], ends[1]


def shaped_pair(transfer_timeout_s: float, make: Callable[[float], Pair]) -> Pair:
    near = Network(default=Link(delay_ms=2, bandwidth_gbps=10))
    first, second = (ShapedTransport(end, near) for end in make(transfer_timeout_s))
    return first, second


def nccl_pair(transfer_timeout_s: float) -> Pair:
    nccl, cuda = FakeNccl(), FakeCuda()
    streams = [ThreadedStreams(cuda) for _ in (0, 1)]
    ends = [
        NcclTransport(r, streams[r], transfer_timeout_s=transfer_timeout_s, nccl=nccl)
        for r in (0, 1)
    ]
    return Settling(ends[0]), Settling(ends[1])


PAIRS: dict[str, Callable[[float], Pair]] = {
    "local": local_pair,
    "grpc-1": partial(mesh_pair, kind=GrpcTransport, connections=1),
    "grpc-3": partial(mesh_pair, kind=GrpcTransport, connections=3),
    "tcp-1": partial(mesh_pair, kind=TcpTransport, connections=1),
    "tcp-3": partial(mesh_pair, kind=TcpTransport, connections=3),
    "nccl-fake": nccl_pair,
    "shaped-local": partial(shaped_pair, make=local_pair),
    "shaped-grpc": partial(shaped_pair, make=partial(mesh_pair, kind=GrpcTransport, connections=1)),
}


@pytest.fixture(params=PAIRS)
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[[float], Pair]]:
    transports: list[Transport] = []

    def make(transfer_timeout_s: float) -> Pair:
        pair = PAIRS[request.param](transfer_timeout_s)
        transports.extend(pair)
        prepare(pair)
        return pair

    yield make
    for transport in transports:
        transport.close()


@pytest.fixture
def pair(make_pair: Callable[[float], Pair]) -> Pair:
    return make_pair(30.0)


@pytest.fixture
def tagged_pair(pair: Pair) -> Pair:
    if isinstance(pair[0], Settling):
        pytest.skip(
            "NCCL has no tags: the order is checked before a run, at both ends of each link"
        )
    return pair


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 100).to(dtype)


def move(pair: Pair, tensor: torch.Tensor) -> torch.Tensor:
    sent = pair[0].send(tensor, 1, "0SEND_F0")
    received = pair[1].recv(TensorSpec.of(tensor), 0, "0SEND_F0").wait()
    sent.wait()
    return received


def test_rehearsed_step_moves_nothing(pair: Pair) -> None:
    """The transport may choose not to run it; in any case the first step is unaffected."""
    like = TensorSpec((3,), torch.float32)
    arrived: list[torch.Tensor] = []

    def step() -> None:
        pair[0].send(torch.ones(3), 1, "0SEND_F0").wait()
        arrived.append(pair[0].recv(like, 1, "0RECV_B0").wait())

    pair[0].rehearse(step)
    assert all(torch.equal(tensor, torch.zeros(3)) for tensor in arrived)
    assert torch.equal(move(pair, torch.full((3,), 7.0)), torch.full((3,), 7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_each_dtype_arrives_bit_for_bit(pair: Pair, dtype: torch.dtype) -> None:
    tensor = random_tensor((5, 7), dtype)
    assert torch.equal(move(pair, tensor), tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5), (1 << 21,)], ids=str)
def test_tensor_of_each_shape_arrives_bit_for_bit(pair: Pair, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape, torch.float32)
    received = move(pair, tensor)
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)


def test_tensor_with_gaps_and_a_gradient_arrives_as_values(pair: Pair) -> None:
    tensor = torch.arange(12.0).view(3, 4).requires_grad_().t()
    assert move(pair, tensor).tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_receive_may_be_posted_before_the_send(pair: Pair) -> None:
    pending = pair[1].recv(TensorSpec((2,), torch.float32), 0, "0SEND_F0")
    assert not pending.done()
    pair[0].send(torch.tensor([1.0, 2.0]), 1, "0SEND_F0")
    assert pending.wait().tolist() == [1.0, 2.0]
    assert pending.done()


@pytest.mark.parametrize("early", [True, False])
def test_tensor_comes_to_where_the_receive_wants_it(pair: Pair, early: bool) -> None:
    first, second = pair
    if isinstance(first, Settling):
        pytest.skip("NCCL fills the memory of GPUs; replicas on it agree through torch.distributed")
    sent, row = torch.arange(6.0), torch.zeros(10)
    if early:
        pending = second.recv(TensorSpec.of(sent), 0, "0F0", row[2:8])
        first.send(sent, 1, "0F0")
    else:
        first.send(sent, 1, "0F0").wait()
        pending = second.recv(TensorSpec.of(sent), 0, "0F0", row[2:8])
    assert pending.wait().data_ptr() == row[2:].data_ptr()
    assert row.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 0, 0]


def test_receives_get_tensors_in_the_order_sent(pair: Pair) -> None:
    like = TensorSpec((), torch.int64)
    early = [pair[1].recv(like, 0, f"0SEND_F{i}") for i in range(20)]
    for i in range(40):
        pair[0].send(torch.tensor(i), 1, f"0SEND_F{i}")
    late = [pair[1].recv(like, 0, f"0SEND_F{i}") for i in range(20, 40)]
    waited_backwards = [pending.wait().item() for pending in reversed(early + late)]
    assert waited_backwards == list(reversed(range(40)))


def test_tensors_of_different_sizes_keep_their_order(pair: Pair) -> None:
    tensors = [random_tensor((n,), torch.float32) for n in (300_000, 1, 0, 70_000, 3)]
    for i, tensor in enumerate(tensors):
        pair[0].send(tensor, 1, str(i))
    for i, tensor in enumerate(tensors):
        assert torch.equal(pair[1].recv(TensorSpec.of(tensor), 0, str(i)).wait(), tensor)


def test_both_directions_move_at_once(pair: Pair) -> None:
    down, up = random_tensor((500_000,), torch.float32), random_tensor((500_000,), torch.float32)
    pendings = [
        pair[0].recv(TensorSpec.of(up), 1, "1SEND_B0"),
        pair[1].recv(TensorSpec.of(down), 0, "0SEND_F0"),
    ]
    pair[0].send(down, 1, "0SEND_F0")
    pair[1].send(up, 0, "1SEND_B0")
    assert torch.equal(pendings[0].wait(), up)
    assert torch.equal(pendings[1].wait(), down)


def test_send_does_not_block_while_the_peer_does_not_receive(pair: Pair) -> None:
    tensor = random_tensor((1 << 18,), torch.float32)
    start = time.monotonic()
    for i in range(20):
        pair[0].send(tensor, 1, str(i))
    assert time.monotonic() - start < 10.0  # and not 30
    for i in range(20):
        assert torch.equal(pair[1].recv(TensorSpec.of(tensor), 0, str(i)).wait(), tensor)


def test_moved_says_when_and_how_much_at_both_ends(pair: Pair) -> None:
    before = time.perf_counter_ns()
    sent = pair[0].send(torch.zeros(1000), 1, "x")
    received = pair[1].recv(TensorSpec((1000,), torch.float32), 0, "x")
    received.wait()
    sent.wait()
    for moved in (sent.moved, received.moved):
        assert moved is not None
        assert before <= moved.start_ns <= moved.end_ns <= time.perf_counter_ns()
        assert moved.num_bytes == 4000


def test_moved_is_none_before_it_is_done(pair: Pair) -> None:
    assert pair[1].recv(TensorSpec((), torch.float32), 0, "x").moved is None


@pytest.mark.parametrize("posted", ["before", "after"])
@pytest.mark.parametrize(
    ("tag", "like", "named"),
    [
        ("0SEND_F1", TensorSpec((2,), torch.float32), ["0SEND_F1", "0SEND_F0"]),
        ("0SEND_F0", TensorSpec((3,), torch.float32), [r"float32\[3\]", r"float32\[2\]"]),
        ("0SEND_F0", TensorSpec((2,), torch.int32), [r"int32\[2\]", r"float32\[2\]"]),
    ],
    ids=["tag", "shape", "dtype"],
)
def test_unexpected_tensor_raises_and_names_both(
    tagged_pair: Pair, posted: str, tag: str, like: TensorSpec, named: list[str]
) -> None:
    pair = tagged_pair
    if posted == "before":
        pending = pair[1].recv(like, 0, tag)
        pair[0].send(torch.zeros(2), 1, "0SEND_F0")
    else:
        pair[0].send(torch.zeros(2), 1, "0SEND_F0").wait()
        time.sleep(0.05)
        pending = pair[1].recv(like, 0, tag)
    with pytest.raises(TransferError, match="rank 1 expected .*" + ".* from rank 0.*".join(named)):
        pending.wait()


def test_link_is_dead_after_a_mismatch(tagged_pair: Pair) -> None:
    pair = tagged_pair
    pending = pair[1].recv(TensorSpec((2,), torch.float32), 0, "a")
    with suppress(RunError):
        pair[0].send(torch.zeros(2), 1, "b")
    with pytest.raises(TransferError):
        pending.wait()
    with pytest.raises(TransferError):
        pair[1].recv(TensorSpec((2,), torch.float32), 0, "b")
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        pair[0].recv(TensorSpec((), torch.float32), 1, "c").wait()


def test_waiting_receive_raises_peer_lost_at_once_when_the_peer_closes(pair: Pair) -> None:
    pending = pair[1].recv(TensorSpec((), torch.float32), 0, "x")
    threading.Timer(0.1, pair[0].close).start()
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 lost rank 0"):
        pending.wait()
    assert time.monotonic() - start < 10.0  # and not 30


def test_later_calls_raise_peer_lost_when_the_peer_has_closed(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(PeerLost):
        pair[1].recv(TensorSpec((), torch.float32), 0, "x").wait()
    with pytest.raises(PeerLost):
        pair[1].send(torch.zeros(()), 0, "x")


@pytest.mark.parametrize("sender", [0, 1])
def test_tensor_sent_before_closing_still_arrives(pair: Pair, sender: int) -> None:
    if isinstance(pair[0], Settling):
        pytest.skip("NCCL may need the receiver to be there; a step waits for what it has sent")
    tensor = random_tensor((1 << 20,), torch.float32)
    pair[sender].send(tensor, 1 - sender, "x")
    pair[sender].close()
    assert torch.equal(pair[1 - sender].recv(TensorSpec.of(tensor), sender, "x").wait(), tensor)


def test_own_receive_raises_when_its_transport_is_closed(pair: Pair) -> None:
    pending = pair[0].recv(TensorSpec((), torch.float32), 1, "x")
    pair[0].close()
    with pytest.raises(PeerLost, match="rank 0 has closed its link with rank 1"):
        pending.wait()


def test_late_receive_raises_timeout_naming_peer_and_action(
    make_pair: Callable[[float], Pair],
) -> None:
    pair = make_pair(0.2)
    with pytest.raises(TransferTimeout, match=r"rank 1 has waited 0.2 s for 0SEND_F7 from rank 0"):
        pair[1].recv(TensorSpec((), torch.float32), 0, "0SEND_F7").wait()
    with pytest.raises(TransferTimeout):
        pair[1].recv(TensorSpec((), torch.float32), 0, "0SEND_F8")


def test_close_twice_and_from_another_thread_is_safe(pair: Pair) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: pair[0].close(), range(3)))
    pair[0].close()


@pytest.mark.parametrize("state", ["pending", "done"])
def test_every_wait_raises_the_error_that_the_transport_was_failed_with(
    pair: Pair, state: str
) -> None:
    pending = pair[1].recv(TensorSpec((), torch.float32), 0, "x")
    if state == "done":
        pair[0].send(torch.zeros(()), 1, "x")
        pending.wait()
    pair[1].fail(RunAborted("rank 3 was lost"))
    with pytest.raises(RunAborted, match="rank 3"):
        pending.wait()
    with pytest.raises(RunAborted, match="rank 3"):
        pair[1].send(torch.zeros(()), 0, "x")


def test_tensor_may_change_once_its_send_is_done(pair: Pair) -> None:
    tensor = torch.ones(1000)
    pair[0].send(tensor, 1, "x").wait()
    tensor.zero_()
    assert pair[1].recv(TensorSpec.of(tensor), 0, "x").wait().sum() == 1000
