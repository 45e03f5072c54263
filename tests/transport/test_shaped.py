"""Shaping of a transport: slots, delay, a shared egress, and ends that do not wait in vain for a
slot.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes.fake_cuda import FakeCuda, FakeEvent, ThreadedStreams
from support.settled import settled

from dpipe.errors import PeerLost, ProfileError, TransferTimeout
from dpipe.network.link import Interface, Link, Network
from dpipe.transport.local import LocalHub
from dpipe.transport.shaped import ShapedTransport
from dpipe.wire.spec import TensorSpec
from dpipe.wire.staging import Staging
from dpipe.wire.transfer import Moved

MEGABIT = torch.zeros(125_000, dtype=torch.uint8)  # 10 ms at 100 Mbit/s
LATE_MS = 15  # a thread of a busy machine may wake this late

Make = Callable[..., list[ShapedTransport]]


@pytest.fixture
def make() -> Iterator[Make]:
    transports: list[ShapedTransport] = []

    def make_ranks(network: Network, num_ranks: int = 2, **options: Any) -> list[ShapedTransport]:
        hub = LocalHub(num_ranks)
        transports.extend(
            ShapedTransport(hub.transport(rank), network, **options) for rank in range(num_ranks)
        )
        return transports

    yield make_ranks
    for transport in transports:
        transport.close()


def arrivals_ms(
    sends: list[tuple[ShapedTransport, int]], ranks: list[ShapedTransport]
) -> list[float]:
    """Send a megabit on each (sender, peer) at once; returns when each has arrived."""
    expected = [
        ranks[peer].recv(TensorSpec.of(MEGABIT), sender.rank, "x") for sender, peer in sends
    ]
    start = time.perf_counter()
    for sender, peer in sends:
        sender.send(MEGABIT, peer, "x")
    arrived = [0.0] * len(sends)

    def wait(i: int) -> None:
        expected[i].wait()
        arrived[i] = (time.perf_counter() - start) * 1e3

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(sends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return arrived


def arrive_about(
    sends: list[tuple[ShapedTransport, int]], ranks: list[ShapedTransport], *expected_ms: float
) -> bool:
    """Never earlier, and no later than a thread of a busy machine may wake; a late result is
    measured again.
    """

    def look() -> list[float]:
        arrived = arrivals_ms(sends, ranks)
        assert all(ms > due - 0.1 for ms, due in zip(arrived, expected_ms, strict=True)), arrived
        return arrived

    def in_time(arrived: list[float]) -> bool:
        return all(ms < due + LATE_MS for ms, due in zip(arrived, expected_ms, strict=True))

    return in_time(settled(look, in_time))


def test_tensor_takes_its_slot_and_the_delay(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=30, bandwidth_gbps=0.1)))
    assert arrive_about([(ranks[0], 1)], ranks, 40)


def test_delay_of_one_tensor_does_not_hold_up_the_next(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=50, bandwidth_gbps=0.1)))
    assert arrive_about([(ranks[0], 1)] * 4, ranks, 60, 70, 80, 90)


def test_links_of_a_rank_send_one_after_another(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=0, bandwidth_gbps=0.1)), num_ranks=3)
    assert arrive_about([(ranks[0], 1), (ranks[0], 2)], ranks, 10, 20)


def test_both_directions_of_a_link_are_full_duplex(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=0, bandwidth_gbps=0.1)))
    assert arrive_about([(ranks[0], 1), (ranks[1], 0)], ranks, 10, 10)


def test_links_may_differ(make: Make) -> None:
    far = Network(default=Link(0, 0.1), links={(0, 1): Link(delay_ms=60, bandwidth_gbps=0.1)})
    ranks = make(far)
    assert arrive_about([(ranks[0], 1), (ranks[1], 0)], ranks, 70, 10)


def test_moved_is_the_slot_without_the_delay(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=20, bandwidth_gbps=0.1)))

    def look() -> list[Moved]:
        sent = [ranks[0].send(MEGABIT, 1, str(i)) for i in range(2)]
        for pending in sent:
            pending.wait()
        return [pending.moved for pending in sent if pending.moved]

    def one_behind_the_other(slots: list[Moved]) -> bool:
        return slots[1].start_ns == slots[0].end_ns

    first, second = settled(look, one_behind_the_other)
    assert (first.end_ns - first.start_ns) / 1e6 == pytest.approx(10, rel=1e-3)
    assert one_behind_the_other([first, second])


def test_tensor_in_flight_is_not_done(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=300, bandwidth_gbps=0.1)))

    def look() -> tuple[bool, object]:
        pending = ranks[0].send(MEGABIT, 1, "x")
        time.sleep(0.03)
        return pending.done(), pending.moved

    assert settled(look, (False, None).__eq__) == (False, None)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> FakeEvent:
    """An event that a device has not reached; until then tensors of more than one value are not on
    the host.
    """
    event = FakeEvent(enable_timing=True)
    monkeypatch.setattr(Staging, "fetch", lambda staging, t: (t, event if t.numel() > 1 else None))
    return event


def test_slot_begins_once_the_device_has_made_the_tensor(make: Make, written: FakeEvent) -> None:
    ranks = make(
        Network(default=Link(delay_ms=0, bandwidth_gbps=0.1)), streams=ThreadedStreams(FakeCuda())
    )
    pending = ranks[0].send(MEGABIT, 1, "x")
    time.sleep(0.05)
    assert not pending.done()
    made_ns = time.perf_counter_ns()
    written._fire()
    pending.wait()
    assert pending.moved is not None and pending.moved.start_ns >= made_ns


def test_tensor_that_is_not_made_yet_holds_up_its_own_link_alone(
    make: Make, written: FakeEvent
) -> None:
    network = Network(default=Link(delay_ms=0, bandwidth_gbps=0.1))
    ranks = make(network, num_ranks=3, transfer_timeout_s=5, streams=ThreadedStreams(FakeCuda()))
    one, late = TensorSpec((), torch.float32), ranks[0].send(MEGABIT, 1, "late")
    behind, beside = (ranks[0].send(torch.tensor(7.0), peer, "x") for peer in (1, 2))
    beside.wait()
    assert ranks[2].recv(one, 0, "x").wait() == 7 and not (late.done() or behind.done())
    written._fire()
    assert ranks[1].recv(TensorSpec.of(MEGABIT), 0, "late").wait().shape == MEGABIT.shape
    assert ranks[1].recv(one, 0, "x").wait() == 7


def test_tensor_that_waits_for_its_slot_raises_peer_lost(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=0, bandwidth_gbps=0.0001)))  # a slot of 10 s
    pending, receive = (
        ranks[0].send(MEGABIT, 1, "x"),
        ranks[0].recv(TensorSpec((), torch.float32), 1, "y"),
    )
    ranks[1].close()
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        receive.wait()
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        pending.wait()
    assert time.monotonic() - start < 5.0


def test_error_of_a_handover_is_raised_by_who_waits_for_the_tensor(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=50, bandwidth_gbps=0.1)))
    pending = ranks[0].send(MEGABIT, 1, "x")
    ranks[1].close()
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        pending.wait()


def test_error_of_the_shaping_thread_is_raised_by_who_waits(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=0, bandwidth_gbps=1)))
    nobody = ranks[0].send(MEGABIT, 7, "x")
    with pytest.raises(KeyError):
        nobody.wait()
    assert arrive_about([(ranks[0], 1)], ranks, 1)


def test_tensor_is_let_go_once_it_is_handed_over(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=0, bandwidth_gbps=1)))
    tensor = torch.zeros(1000)
    alive = weakref.ref(tensor.untyped_storage())
    pending = ranks[0].send(tensor, 1, "x")
    del tensor
    pending.wait()
    assert alive() is None


def test_tensor_that_waits_for_too_long_raises_timeout_and_ends_the_transport(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=0, bandwidth_gbps=0.0001)), transfer_timeout_s=0.1)
    with pytest.raises(
        TransferTimeout,
        match="rank 0 has waited 0.1 s for its shaped network to take 0SEND_F3 to rank 1",
    ):
        ranks[0].send(MEGABIT, 1, "0SEND_F3").wait()
    with pytest.raises(TransferTimeout):
        ranks[0].send(MEGABIT, 1, "0SEND_F4")


def test_closing_waits_for_what_is_under_way(make: Make) -> None:
    ranks = make(Network(default=Link(delay_ms=200, bandwidth_gbps=0.1)))
    ranks[0].send(MEGABIT, 1, "x")
    ranks[0].close()
    assert ranks[1].recv(TensorSpec.of(MEGABIT), 0, "x").wait().shape == MEGABIT.shape
    with pytest.raises(PeerLost, match="rank 0 has closed its link with rank 1"):
        ranks[0].send(MEGABIT, 1, "y")


@pytest.mark.parametrize(
    "network",
    [
        Network(default=Link(10, 1, jitter_ms=1)),
        Network(default=Link(10, 1, loss_percent=1)),
        Network(default=Link(10, 1, reorder_percent=1)),
        Network(default=None, links={(0, 1): Link(10, 1, loss_percent=1)}),
    ],
    ids=["jitter", "loss", "reordering", "loss on one link"],
)
def test_profile_that_needs_tc_is_refused(network: Network) -> None:
    with pytest.raises(
        ProfileError,
        match="has jitter, loss or reordering, and the shaped transport imitates",
    ):
        ShapedTransport(LocalHub(2).transport(0), network)


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        (Interface((0, 1), machine="a"), "several ranks share the interface of machine 'a'"),
        (Interface((1,), ingress_gbps=1, machine="a"), "machine 'a' has ingress_gbps, and the"),
    ],
)
def test_what_ranks_cannot_shape_by_themselves_is_refused(interface: Interface, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        ShapedTransport(LocalHub(2).transport(0), Network(interfaces=(interface,)))
