"""NCCL's transport beyond the conformance suite: with a fake of cupy, and tests for one GPU."""

import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread, Timer

import pytest
import torch
from directory import prepare
from fakes.fake_cuda import FakeCuda, ThreadedStreams
from fakes.fake_nccl import FakeNccl

from dpipe.errors import ConfigError, JoinError, PeerLost, RunAborted
from dpipe.streams import CudaStreams
from dpipe.transport.nccl import NcclTransport, load_nccl, refuse_shared_gpus
from dpipe.wire.spec import TensorSpec

LIKE = TensorSpec((4,), torch.float32)


def transports(
    num_ranks: int, ids: type = bytes, **options
) -> tuple[list[NcclTransport], FakeNccl]:
    nccl, cuda = FakeNccl(ids), FakeCuda()
    all_transports = [
        NcclTransport(r, ThreadedStreams(cuda), nccl=nccl, **options) for r in range(num_ranks)
    ]
    return all_transports, nccl


def connect(ends: list[NcclTransport]) -> None:
    """All with all."""
    ranks = {end.rank for end in ends}
    offers = {end.rank: end.offer(ranks - {end.rank}) for end in ends}
    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(lambda end: end.connect(offers), ends))


@pytest.fixture
def pair():
    ends, _ = transports(2)
    connect(ends)
    yield ends
    for end in ends:
        end.close()


def test_each_directed_link_has_a_communicator_of_its_own() -> None:
    ends, nccl = transports(3)
    connect(ends)
    assert len(nccl.channels) == 6
    assert len(nccl.communicators) == 12
    for end in ends:
        end.close()


def test_ids_are_returned_to_cupy_in_their_original_type() -> None:
    """Bytes since cupy 14, before that a tuple of signed numbers; JSON turns both into lists."""
    ends, nccl = transports(2, ids=tuple)
    connect(ends)
    assert len(nccl.communicators) == 4
    for end in ends:
        end.close()


def test_error_that_cupy_has_no_name_for_is_a_lost_peer(
    pair: list[NcclTransport], monkeypatch
) -> None:
    link = pair[1]._links[0, 1]
    pending = pair[1].recv(LIKE, 0, "0SEND_F0")
    monkeypatch.setattr(type(link.communicator), "check_async_error", lambda self: {}[7])
    with pytest.raises(PeerLost, match=r"rank 1 lost rank 0: KeyError\(7\)"):
        pending.settle()


def test_communicator_is_not_called_while_it_is_ended(pair: list[NcclTransport]) -> None:
    """The watching thread polls it for errors while another thread aborts it."""
    link = pair[0]._links[0, 1]
    with link._calling:
        asking = Thread(target=link.look)
        asking.start()
        link.error = PeerLost("meanwhile")
        link.communicator.abort()
    asking.join(5)
    with pytest.raises(PeerLost, match="meanwhile"):
        link.launch(type(None), "", link.communicator.send, 1, torch.zeros(4))


def test_closing_does_not_wait_forever_for_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, nccl = transports(2)
    connect(ends)
    peer_closed = Event()
    for communicator in nccl.communicators:
        communicator.destroy = lambda: peer_closed.wait(30)
    monkeypatch.setattr("dpipe.transport.nccl._CLOSE_S", 0.2)
    began = time.monotonic()
    ends[0].close()
    assert time.monotonic() - began < 5
    peer_closed.set()
    ends[1].close()


def test_waiting_for_a_receive_does_not_hold_up_the_host(pair: list[NcclTransport]) -> None:
    streams = pair[1]._streams
    pending = pair[1].recv(LIKE, 0, "0SEND_F0")
    with streams.on(
        streams.stream()
    ):  # otherwise the current stream is the program, whose waits block the host
        tensor = pending.wait()
        used = streams.mark()
    assert not pending.done() and not streams.done(used)
    pair[0].send(torch.arange(4.0), 1, "0SEND_F0")
    pending.settle()
    streams.block(used, 5)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_send_leaves_behind_what_makes_its_tensor(pair: list[NcclTransport]) -> None:
    streams, tensor, compute = pair[0]._streams, torch.zeros(4), pair[0]._streams.stream()
    pending = pair[1].recv(LIKE, 0, "0SEND_F0")
    with streams.on(compute):
        held = streams._cuda.Event(enable_timing=True)
        compute.wait_event(held)
        compute.queue(lambda: tensor.fill_(7))
        sent = pair[0].send(tensor, 1, "0SEND_F0")
    assert not sent.done()
    held._fire()
    received = pending.wait()
    pending.settle()
    assert received.tolist() == [7] * 4


def test_peer_that_goes_after_the_host_ran_ahead_is_found_when_it_settles(
    pair: list[NcclTransport],
) -> None:
    streams = pair[1]._streams
    pending = pair[1].recv(LIKE, 0, "0SEND_F0")
    with streams.on(streams.stream()):
        pending.wait()
    pair[0].fail(RuntimeError("this rank failed"))
    with pytest.raises(PeerLost, match="rank 1 lost rank 0: .*NCCL_ERROR_REMOTE_ERROR"):
        pending.settle()


def test_missing_rank_is_named() -> None:
    (end, absent), _ = transports(2, connect_timeout_s=0.2)
    offers = {0: end.offer([1]), 1: absent.offer([0])}
    with pytest.raises(
        JoinError, match="rank 0 cannot open its NCCL link with rank 1: no answer within 0.2 s"
    ):
        end.connect(offers)


def test_abort_before_links_are_opened_is_raised_in_their_place() -> None:
    (end, absent), _ = transports(2, connect_timeout_s=0.2)
    end.fail(RunAborted("rank 2 failed"))
    with pytest.raises(RunAborted, match="rank 2 failed"):
        end.connect({0: end.offer([1]), 1: absent.offer([0])})


def test_abort_while_links_are_opened_is_raised_and_ends_the_one_that_opens_late() -> None:
    (end, absent), nccl = transports(2)
    offers = {0: end.offer([1]), 1: absent.offer([0])}
    Timer(0.2, end.fail, [RunAborted("rank 2 failed")]).start()
    start = time.monotonic()
    with pytest.raises(RunAborted, match="rank 2 failed"):
        end.connect(offers)
    assert time.monotonic() - start < 10  # and not the 20 s in which links must open
    nccl.NcclCommunicator(2, bytes(offers[0][1]), 1)
    channel = nccl.channels[bytes(offers[0][1])]
    with channel.changed:
        assert channel.changed.wait_for(lambda: 0 in channel.ended, 5)


def test_communicator_that_cannot_be_made_is_an_error_that_says_why() -> None:
    (end, other), _ = transports(2)
    with pytest.raises(JoinError, match="with rank 1: .*NCCL_SOCKET_IFNAME"):
        end.connect({0: {1: list(b"unknown")}, 1: other.offer([0])})


def test_error_names_the_extra_where_cupy_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r'pip install "dpipe\[cuda\]"'):
        load_nccl()


def test_error_names_the_library_that_cupy_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = types.SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with pytest.raises(ConfigError, match="pip install nvidia-nccl-cu13"):
        load_nccl()


@pytest.mark.gpu(real="it is about NCCL itself")
def test_bytes_go_through_nccl_itself() -> None:
    """From one GPU to itself, the only transfer that NCCL has on one GPU, queued like those of a
    link.
    """
    pytest.importorskip("cupy", reason='needs cupy: pip install "dpipe[cuda]"')
    nccl, streams = load_nccl(), CudaStreams(torch.device("cuda"))
    stream, source = (
        streams.stream(),
        torch.randn(1 << 20, device=streams.device, dtype=torch.bfloat16),
    )
    target = torch.zeros_like(source)
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    written = streams.mark()
    with streams.on(stream):
        streams.wait(written)
        nccl.groupStart()
        communicator.send(source.data_ptr(), source.nbytes, nccl.NCCL_UINT8, 0, stream.cuda_stream)
        communicator.recv(target.data_ptr(), target.nbytes, nccl.NCCL_UINT8, 0, stream.cuda_stream)
        nccl.groupEnd()
        moved = streams.mark()
    streams.block(moved, 30)
    communicator.check_async_error()
    communicator.destroy()
    assert torch.equal(source, target)


def test_ranks_that_share_a_gpu_are_named() -> None:
    with pytest.raises(
        ConfigError, match="ranks 1 and 3 share the GPU b, and NCCL needs one for each rank"
    ):
        refuse_shared_gpus(["a", "b", "c", "b"])


def test_ranks_that_share_a_gpu_are_refused_before_a_link_is_opened(monkeypatch) -> None:
    ends, nccl = transports(2)
    monkeypatch.setattr(ThreadedStreams, "gpu", "GPU-1")
    with pytest.raises(ConfigError, match="ranks 0 and 1 share the GPU GPU-1"):
        prepare(ends)
    assert not nccl.communicators


def test_rehearsal_runs_the_step_whose_receives_are_zeros(pair: list[NcclTransport]) -> None:
    arrived: list[torch.Tensor] = []

    def step() -> None:
        pending = pair[1].recv(LIKE, 0, "0SEND_F0")
        pending.settle()
        arrived.append(pending.wait())

    pair[1].rehearse(step)
    assert torch.equal(arrived[0], torch.zeros(4))
