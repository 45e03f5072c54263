"""Who may join, who is lost and which cause wins, without a network: each message to each rank."""

import json

import pytest

from dpipe.coordinator.frame import PROTOCOL
from dpipe.coordinator.membership import SYMPTOM_GRACE_S, Member, Membership, host_of
from dpipe.wire.v1 import coordinator_pb2 as pb


class Room:
    """A membership, its clock, and the messages to each process that has asked to join."""

    def __init__(self, world_size: int) -> None:
        self.now = 100.0
        self.membership = Membership(world_size, heartbeat_s=8.0, join_s=120.0, now=self.now)
        self.heard: list[list[str]] = []

    def knock(
        self, rank: int, world_size: int = 3, protocol: int = PROTOCOL, shared: object = None
    ) -> Member | None:
        lines: list[str] = []
        self.heard.append(lines)
        join = pb.Join(
            protocol=protocol,
            rank=rank,
            world_size=world_size,
            advertised=f"10.0.0.{rank}:4000",
            shared=json.dumps(shared or {"train.steps": 100}),
        )
        return self.membership.join(
            join, f"ipv4:10.0.0.{rank}:5555", lambda m: lines.append(_text(m)), self.now
        )

    def fill(self) -> list[Member]:
        members = [self.knock(rank) for rank in range(3)]
        for lines in self.heard:
            lines.clear()
        assert all(members)
        return [m for m in members if m]

    def tick(self, seconds: float) -> None:
        """Let time pass with a tick a second, as the server does."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            self.membership.tick(self.now)


def _text(message: pb.FromCoordinator | None) -> str:
    match message and message.WhichOneof("kind"):
        case None:
            return "end"
        case "missing":
            return f"missing {list(message.missing.ranks)}"
        case "welcome":
            return "welcome " + " ".join(a.advertised for a in message.welcome.addresses)
        case "whole":
            return f"whole {message.whole.key} {list(message.whole.parts)}"
        case "abort":
            return f"abort: {message.abort.reason}"
        case kind:
            return str(kind)


def test_join_makes_all_wait_for_the_last():
    room = Room(3)
    for rank in (2, 0, 1):
        room.knock(rank)
    welcome = "welcome 10.0.0.0:4000 10.0.0.1:4000 10.0.0.2:4000"
    assert room.heard == [
        ["missing [0, 1]", "missing [1]", welcome],
        ["missing [1]", welcome],
        [welcome],
    ]


@pytest.mark.parametrize(
    ("knock", "reason"),
    [
        ({"rank": 3}, "rank 3 is not one of 0..2"),
        ({"rank": -1}, "rank -1 is not one of 0..2"),
        ({"rank": 1, "world_size": 4}, "it is one of 4 ranks, the coordinator has 3"),
        (
            {"rank": 1, "protocol": 0},
            "it speaks protocol 0, the coordinator 1; install one dpipe version everywhere",
        ),
        ({"rank": 1, "shared": [1]}, "its configuration is not a JSON object"),
        (
            {"rank": 0},
            "rank 0 has already joined from 10.0.0.0; two processes were given the same rank",
        ),
    ],
)
def test_join_refused_reaches_those_who_wait(knock, reason):
    room = Room(3)
    room.knock(0)
    assert room.knock(**knock) is None
    waiting, refused = room.heard
    assert refused == [f"abort: {reason}", "end"]
    assert waiting[1:] == [
        f"abort: rank {knock['rank']} at 10.0.0.{knock['rank']} could not join: {reason}",
        "end",
    ]


def test_join_refused_after_the_start_leaves_the_run_alone():
    room = Room(3)
    room.fill()
    room.knock(1)
    reason = "rank 1 has already joined from 10.0.0.1; two processes were given the same rank"
    assert room.heard == [[], [], [], [f"abort: {reason}", "end"]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_configuration_that_differs_is_measured_against_rank_0_in_any_order(order):
    room = Room(3)
    for rank in order:
        room.knock(
            rank, shared={"train.steps": 200, "run.keep": 2} if rank == 2 else {"train.steps": 100}
        )
    expected = (
        "abort: the configuration of rank 2 (10.0.0.2:4000) differs from rank 0's: "
        "run.keep is 2, on rank 0 absent; train.steps is 200, on rank 0 100"
    )
    assert [lines[-2:] for lines in room.heard] == [[expected, "end"]] * 3


def test_configuration_that_differs_a_lot_is_shown_in_part():
    room = Room(3)
    room.knock(0, shared={f"train.{i}": 0 for i in range(10)})
    room.knock(1, shared={f"train.{i}": 1 for i in range(10)})
    assert room.heard[0][-2].endswith("train.7 is 1, on rank 0 0; and 2 more")


def test_join_deadline_names_the_missing():
    room = Room(3)
    joined = room.knock(1)
    for _ in range(121):
        joined.heard_at = room.now
        room.tick(1.0)
    assert room.heard[0][-2:] == ["abort: ranks 0, 2 of 3 did not join within 120 s", "end"]


def test_late_rank_hears_why_the_others_are_gone():
    room = Room(3)
    room.fill()
    room.membership.end("rank 1 failed: no memory")
    room.knock(2)
    assert room.heard[-1] == ["abort: rank 1 failed: no memory", "end"]


def test_gather_is_told_to_all_once_whole():
    room = Room(3)
    first, second, third = room.fill()
    room.membership.part(third, pb.Part(key="step/1", payload=b"c"))
    room.membership.part(first, pb.Part(key="step/1", payload=b"a"))
    assert room.heard == [[], [], []]
    room.membership.ask(first, "step/1")
    assert room.heard[0] == ["missing [1]"]
    room.membership.part(second, pb.Part(key="step/1", payload=b"b"))
    assert [lines[-1] for lines in room.heard] == ["whole step/1 [b'a', b'b', b'c']"] * 3


def test_gather_leaves_nothing_behind():
    room = Room(3)
    for member in room.fill():
        room.membership.part(member, pb.Part(key="step/1", payload=b""))
    room.membership.ask(room.membership.members[0], "step/1")
    assert room.heard[0][-1] == "missing [0, 1, 2]"


def test_broken_stream_is_a_lost_rank():
    room = Room(3)
    _, second, _ = room.fill()
    room.membership.broken(second, "its process ended or its connection broke")
    lost = "abort: lost rank 1 (10.0.0.1:4000): its process ended or its connection broke"
    assert room.heard == [[lost, "end"]] * 3


def test_rank_that_left_is_not_lost():
    room = Room(3)
    _, second, _ = room.fill()
    room.membership.leave(second)
    room.membership.broken(second, "its stream ended")
    assert room.heard == [[], ["end"], []]


def test_silent_rank_is_lost_after_a_heartbeat():
    room = Room(3)
    first, second, third = room.fill()
    for _ in range(9):
        first.heard_at = third.heard_at = room.now
        room.tick(1.0)
    lost = "abort: lost rank 1 (10.0.0.1:4000): no sign of life for 8 s"
    assert room.heard == [[lost, "end"]] * 3
    assert second.heard_at == 100.0


def test_stopped_coordinator_blames_nobody_when_it_wakes():
    room = Room(3)
    room.fill()
    room.now += 3600
    room.membership.tick(room.now)
    assert room.heard == [[], [], []]


def test_cause_ends_the_run_at_once():
    room = Room(3)
    room.membership.failure(room.fill()[2], pb.Failure(reason="loss is nan at step 7"), room.now)
    assert room.heard == [["abort: rank 2 failed: loss is nan at step 7", "end"]] * 3


def _lost(room: Room, members: list[Member]) -> None:
    room.membership.broken(members[2], "its process ended or its connection broke")


def _failed(room: Room, members: list[Member]) -> None:
    room.membership.failure(members[2], pb.Failure(reason="no memory"), room.now)


def _nothing(room: Room, members: list[Member]) -> None:
    pass


@pytest.mark.parametrize(
    ("what_rank_2_does", "verdict"),
    [
        (_lost, "lost rank 2 (10.0.0.2:4000): its process ended or its connection broke"),
        (_failed, "rank 2 failed: no memory"),
        (_nothing, "rank 1 failed: lost rank 2 on 1RECV_B3"),
    ],
)
def test_symptom_waits_a_moment_for_its_cause(what_rank_2_does, verdict):
    room = Room(3)
    members = room.fill()
    room.membership.failure(
        members[1], pb.Failure(reason="lost rank 2 on 1RECV_B3", symptom=True), room.now
    )
    room.membership.failure(members[0], pb.Failure(reason="lost rank 1", symptom=True), room.now)
    assert room.heard == [[], [], []]
    what_rank_2_does(room, members)
    room.tick(SYMPTOM_GRACE_S)
    assert room.heard == [[f"abort: {verdict}", "end"]] * 3


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:10.0.0.7:51234", "10.0.0.7"), ("ipv6:%5B::1%5D:51234", "[::1]")]
)
def test_host_of_reads_grpc_peers(peer, host):
    assert host_of(peer) == host
