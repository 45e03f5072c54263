"""The exchange itself, and its behaviour when the other end fails."""

import threading

import pytest
import torch
from support.layered import ADAM, Layered, in_threads, one_step, train

from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.errors import PeerLost, TransferError
from dpipe.transport.base import Transport
from dpipe.transport.local import LocalHub
from dpipe.wire.codec import codec
from dpipe.wire.feedback import FeedbackWire, wire


def ends(replicas: int, wire_name: str = "none", part_bytes: int = 40) -> list[DirectExchange]:
    hub = LocalHub(replicas, transfer_timeout_s=10)
    return [
        DirectExchange(hub.transport(r), r, range(replicas), wire(wire_name), part_bytes=part_bytes)
        for r in range(replicas)
    ]


def rows(replicas: int, length: int) -> list[torch.Tensor]:
    return [
        torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(replicas)
    ]


@pytest.mark.parametrize("length", [0, 1, 3, 64, 1001])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_average_is_the_mean_added_in_replica_order(replicas: int, length: int) -> None:
    own, before = rows(replicas, length), rows(replicas, length)
    exchanges = ends(replicas)
    in_threads(replicas, lambda r: exchanges[r].average(own[r], 0, lambda piece: None))
    mean = sum(before[1:], start=before[0]) / replicas
    assert all(torch.equal(row, mean) for row in own)


def test_parts_are_prepared_just_before_they_are_sent() -> None:
    """So that encoding and copying of later parts overlap with sending the earlier ones."""
    exchanges, own = ends(2, part_bytes=4 * 10), rows(2, 100)
    pieces: list[slice] = []
    in_threads(
        2,
        lambda r: exchanges[r].average(own[r], 0, pieces.append if r == 0 else lambda piece: None),
    )
    assert sorted((p.start, p.stop) for p in pieces) == [
        (start, start + 5) for start in range(0, 100, 5)
    ]
    assert [p.start for p in pieces[:3]] == [
        50,
        55,
        60,
    ]  # the part of the other replica is sent first


def test_error_feedback_compensates_rounding() -> None:
    """Without it the error of the sum grows with each encoded gradient; with it it stays that of
    one.
    """
    values = torch.linspace(-1, 1, 256) * 1e-3 + torch.nn.functional.one_hot(torch.tensor(7), 256)
    feedback, plain = FeedbackWire(codec("int8")), codec("int8")
    like = feedback.wire_spec
    total, drifted = torch.zeros(256), torch.zeros(256)
    from dpipe.wire.spec import TensorSpec

    spec = TensorSpec.of(values)
    assert like(spec) == plain.wire_spec(spec)
    for _ in range(50):
        total += feedback.decode(feedback.encode(values, ("key",)), spec)
        drifted += plain.decode(plain.encode(values), spec)
    assert (total - 50 * values).abs().max() < 0.01
    assert (drifted - 50 * values).abs().max() > 0.04


def test_vectors_of_different_sizes_are_refused_naming_both() -> None:
    exchanges, own = ends(2, part_bytes=4000), [torch.zeros(100), torch.zeros(90)]

    def average(replica: int) -> None:
        try:
            exchanges[replica].average(own[replica], 0, lambda piece: None)
        except Exception as error:
            exchanges[replica].fail(error)
            raise

    errors = in_threads(2, average)
    messages = [str(error) for error in errors if isinstance(error, TransferError)]
    assert messages
    assert "float32[50]" in messages[0]
    assert "float32[45]" in messages[0]


class Dying:
    """Links that break after `sends` messages, like those of a killed process."""

    def __init__(self, inner: Transport, sends: int) -> None:
        self._inner, self._left = inner, sends

    def send(self, tensor, peer, tag):
        self._left -= 1
        if self._left < 0:
            self._inner.close()
            raise SystemError("killed")
        return self._inner.send(tensor, peer, tag)

    def recv(self, like, peer, tag, into=None):
        return self._inner.recv(like, peer, tag, into)

    def fail(self, error):
        self._inner.fail(error)


@pytest.mark.parametrize("sends", [0, 3, 20])
def test_replica_that_dies_in_the_middle_of_a_push_is_named_and_nothing_is_applied(
    sends: int,
) -> None:
    hub, stages = LocalHub(3, transfer_timeout_s=10), [Layered() for _ in range(3)]

    def replica_main(replica: int) -> None:
        links = hub.transport(replica) if replica != 1 else Dying(hub.transport(replica), sends)
        exchange = DirectExchange(links, replica, range(3), wire("none"), part_bytes=40)
        kind = AllReduce({0: stages[replica]}, ADAM, exchange)
        try:
            stages[replica].set_gradients(0, replica)
            one_step(kind, stages[replica], 0)
        finally:
            kind.close()

    errors = in_threads(3, replica_main)
    assert isinstance(errors[0], PeerLost)
    assert isinstance(errors[2], PeerLost)
    assert any("lost rank 1" in str(error) for error in (errors[0], errors[2]))
    for stage in stages:
        for parameter, untouched in zip(stage.parameters, Layered().parameters, strict=True):
            assert torch.equal(parameter, untouched)


def test_threads_end_with_their_kind() -> None:
    def make(stage, links, replica):
        return AllReduce({0: stage}, ADAM, DirectExchange(links, replica, range(2), wire("none")))

    train(make, 2)
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("dpipe-reduce")
    ]
