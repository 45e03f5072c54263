"""Which connection of a link sends what: no sockets, no threads."""

import pytest
import torch

from dpipe.errors import TransferError
from dpipe.transport.link import LinkEnd
from dpipe.transport.mesh import Connection, MeshLink
from dpipe.wire.message import Header
from dpipe.wire.spec import TensorSpec

SPEC = TensorSpec((4 << 12,), torch.float32)  # 64 KiB: four of the smallest pieces


class Lane(Connection):
    """Keeps what it is given, and can send when the test says so."""

    def __init__(self, end: LinkEnd, index: int, num_connections: int = 2) -> None:
        super().__init__(end, index, num_connections, 1 << 20)
        self.broken = False
        self.outruns = False
        self.given: list[int | None] = []

    def enqueue(self, piece) -> None:
        self.given.append(None if piece is None else piece.number)

    def is_broken(self) -> bool:
        return self.broken

    def outruns_loss(self) -> bool:
        return self.outruns

    def cancel(self) -> None:
        pass

    def join(self, timeout_s: float) -> None:
        pass


class Lanes:
    def __init__(self, one_outruns_loss: bool = False) -> None:
        self.end = LinkEnd(0, 1, num_connections=2)
        self.first, self.second = Lane(self.end, 0), Lane(self.end, 1)
        self.link = MeshLink(self.end, [self.first, self.second], one_outruns_loss)

    def send(self) -> None:
        self.end.send(SPEC.empty(), "x", self.link.enqueue)


@pytest.fixture
def lanes() -> Lanes:
    return Lanes()


def test_connection_that_is_quicker_sends_more_of_a_tensor(lanes: Lanes) -> None:
    lanes.first.on_ready()
    lanes.send()
    for _ in range(3):
        lanes.second.on_ready()
    assert (lanes.first.given, lanes.second.given) == ([0], [1, 2, 3])


def test_connection_that_is_broken_sends_nothing_while_another_can(lanes: Lanes) -> None:
    lanes.first.broken = True
    lanes.first.on_ready()
    lanes.send()
    assert lanes.first.given == []
    lanes.second.on_ready()
    assert lanes.second.given == [0]
    lanes.second.broken = True
    lanes.second.on_change()
    assert lanes.first.given == [1]


def test_connection_that_outruns_losses_sends_all_and_cuts_nothing() -> None:
    lanes = Lanes(one_outruns_loss=True)
    lanes.first.outruns = True
    lanes.second.on_ready()
    lanes.send()
    lanes.send()
    assert lanes.second.given == []
    lanes.first.on_ready()
    lanes.first.on_ready()
    assert lanes.first.given == [0, 0]


def test_all_connections_send_while_the_first_does_not_outrun_losses() -> None:
    lanes = Lanes(one_outruns_loss=True)
    lanes.second.outruns = True
    lanes.second.on_ready()
    lanes.send()
    lanes.first.on_ready()
    assert (lanes.first.given, lanes.second.given) == ([1], [0])


def test_another_takes_the_place_of_a_broken_one_that_had_sent_all() -> None:
    lanes = Lanes(one_outruns_loss=True)
    lanes.first.outruns = lanes.second.outruns = True
    lanes.second.on_ready()
    lanes.send()
    lanes.first.broken = True
    lanes.first.on_change()
    assert lanes.second.given == [0]


def test_link_of_broken_connections_goes_on_sending(lanes: Lanes) -> None:
    lanes.first.broken = lanes.second.broken = True
    lanes.first.on_ready()
    lanes.send()
    assert lanes.first.given == [0]


def test_connections_end_behind_all_pieces(lanes: Lanes) -> None:
    lanes.send()
    lanes.link.enqueue(None)
    for _ in range(4):
        lanes.first.on_ready()
    lanes.second.on_ready()
    lanes.first.on_ready()
    assert (lanes.first.given, lanes.second.given) == ([0, 1, 2, 3, None], [None])


def test_piece_that_a_tensor_does_not_have_is_refused(lanes: Lanes) -> None:
    with pytest.raises(TransferError, match="rank 1 sent piece 4 of tensor 0, which has 4"):
        lanes.first.arrive(Header(0, "x", SPEC, piece=4), 0)


def test_connection_that_goes_back_to_an_earlier_tensor_is_refused(lanes: Lanes) -> None:
    assert lanes.first.arrive(Header(3, "x", SPEC, piece=1), 0) is not None
    with pytest.raises(TransferError, match="sent tensor 2 where 3 belongs"):
        lanes.first.arrive(Header(2, "x", SPEC), 3)
