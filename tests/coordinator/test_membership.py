"""Who may join, who is lost, and which cause is reported: every message to every rank, without a
network.
"""

import json

import pytest

from dpipe.coordinator.frame import PROTOCOL
from dpipe.coordinator.membership import SYMPTOM_GRACE_S, Member, Membership, host_of
from dpipe.wire.v1 import coordinator_pb2 as pb


class Processes:
    """A membership, its clock, and the messages to each process that asks to join."""

    def __init__(self, world_size: int) -> None:
        self.now = 100.0
        self.membership = Membership(world_size, heartbeat_s=8.0, join_s=120.0, now=self.now)
        self.messages: list[list[str]] = []

    def knock(
        self, rank: int, world_size: int = 3, protocol: int = PROTOCOL, shared: object = None
    ) -> Member | None:
        lines: list[str] = []
        self.messages.append(lines)
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
        for lines in self.messages:
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
    processes = Processes(3)
    for rank in (2, 0, 1):
        processes.knock(rank)
    welcome = "welcome 10.0.0.0:4000 10.0.0.1:4000 10.0.0.2:4000"
    assert processes.messages == [
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
            "it speaks protocol 0, the coordinator 3; install one dpipe version everywhere",
        ),
        ({"rank": 1, "shared": [1]}, "its configuration is not a JSON object"),
        (
            {"rank": 0},
            "rank 0 has already joined from 10.0.0.0; two processes were given the same rank",
        ),
    ],
)
def test_join_refused_reaches_those_who_wait(knock, reason):
    processes = Processes(3)
    processes.knock(0)
    assert processes.knock(**knock) is None
    waiting, refused = processes.messages
    assert refused == [f"abort: {reason}", "end"]
    assert waiting[1:] == [
        f"abort: rank {knock['rank']} at 10.0.0.{knock['rank']} could not join: {reason}",
        "end",
    ]


def test_join_refused_after_the_start_leaves_the_run_alone():
    processes = Processes(3)
    processes.fill()
    processes.knock(1)
    reason = "rank 1 has already joined from 10.0.0.1; two processes were given the same rank"
    assert processes.messages == [[], [], [], [f"abort: {reason}", "end"]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_configuration_that_differs_is_measured_against_rank_0_in_any_order(order):
    processes = Processes(3)
    for rank in order:
        processes.knock(
            rank, shared={"train.steps": 200, "run.keep": 2} if rank == 2 else {"train.steps": 100}
        )
    expected = (
        "abort: the configuration of rank 2 (10.0.0.2:4000) differs from rank 0's: "
        "run.keep is 2, on rank 0 absent; train.steps is 200, on rank 0 100"
    )
    assert [lines[-2:] for lines in processes.messages] == [[expected, "end"]] * 3


def test_configuration_that_differs_a_lot_is_shown_in_part():
    processes = Processes(3)
    processes.knock(0, shared={f"train.{i}": 0 for i in range(10)})
    processes.knock(1, shared={f"train.{i}": 1 for i in range(10)})
    assert processes.messages[0][-2].endswith("train.7 is 1, on rank 0 0; and 2 more")


def test_join_deadline_names_the_missing():
    processes = Processes(3)
    joined = processes.knock(1)
    for _ in range(121):
        joined.heard_at = processes.now
        processes.tick(1.0)
    assert processes.messages[0][-2:] == ["abort: ranks 0, 2 of 3 did not join within 120 s", "end"]


def test_late_rank_hears_why_the_others_are_gone():
    processes = Processes(3)
    processes.fill()
    processes.membership.end("rank 1 failed: no memory")
    processes.knock(2)
    assert processes.messages[-1] == ["abort: rank 1 failed: no memory", "end"]


def test_gather_is_told_to_all_once_whole():
    processes = Processes(3)
    first, second, third = processes.fill()
    processes.membership.part(third, pb.Part(key="step/1", payload=b"c"))
    processes.membership.part(first, pb.Part(key="step/1", payload=b"a"))
    assert processes.messages == [[], [], []]
    processes.membership.ask(first, "step/1")
    assert processes.messages[0] == ["missing [1]"]
    processes.membership.part(second, pb.Part(key="step/1", payload=b"b"))
    assert [lines[-1] for lines in processes.messages] == ["whole step/1 [b'a', b'b', b'c']"] * 3


def test_gather_leaves_nothing_behind():
    processes = Processes(3)
    for member in processes.fill():
        processes.membership.part(member, pb.Part(key="step/1", payload=b""))
    processes.membership.ask(processes.membership.members[0], "step/1")
    assert processes.messages[0][-1] == "missing [0, 1, 2]"


def test_broken_stream_is_a_lost_rank():
    processes = Processes(3)
    _, second, _ = processes.fill()
    processes.membership.broken(second, "its process ended or its connection broke")
    lost = "abort: lost rank 1 (10.0.0.1:4000): its process ended or its connection broke"
    assert processes.messages == [[lost, "end"]] * 3


def test_rank_that_left_is_not_lost():
    processes = Processes(3)
    _, second, _ = processes.fill()
    processes.membership.leave(second)
    processes.membership.broken(second, "its stream ended")
    assert processes.messages == [[], ["end"], []]


def test_silent_rank_is_lost_after_a_heartbeat():
    processes = Processes(3)
    first, second, third = processes.fill()
    for _ in range(9):
        first.heard_at = third.heard_at = processes.now
        processes.tick(1.0)
    lost = "abort: lost rank 1 (10.0.0.1:4000): no sign of life for 8 s"
    assert processes.messages == [[lost, "end"]] * 3
    assert second.heard_at == 100.0


def test_stopped_coordinator_blames_nobody_when_it_wakes():
    processes = Processes(3)
    processes.fill()
    processes.now += 3600
    processes.membership.tick(processes.now)
    assert processes.messages == [[], [], []]


def test_cause_ends_the_run_at_once():
    processes = Processes(3)
    processes.membership.failure(
        processes.fill()[2], pb.Failure(reason="loss is nan at step 7"), processes.now
    )
    assert processes.messages == [["abort: rank 2 failed: loss is nan at step 7", "end"]] * 3


def _lost(processes: Processes, members: list[Member]) -> None:
    processes.membership.broken(members[2], "its process ended or its connection broke")


def _failed(processes: Processes, members: list[Member]) -> None:
    processes.membership.failure(members[2], pb.Failure(reason="no memory"), processes.now)


def _nothing(processes: Processes, members: list[Member]) -> None:
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
    processes = Processes(3)
    members = processes.fill()
    processes.membership.failure(
        members[1], pb.Failure(reason="lost rank 2 on 1RECV_B3", symptom=True), processes.now
    )
    processes.membership.failure(
        members[0], pb.Failure(reason="lost rank 1", symptom=True), processes.now
    )
    assert processes.messages == [[], [], []]
    what_rank_2_does(processes, members)
    processes.tick(SYMPTOM_GRACE_S)
    assert processes.messages == [[f"abort: {verdict}", "end"]] * 3


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:10.0.0.7:51234", "10.0.0.7"), ("ipv6:%5B::1%5D:51234", "[::1]")]
)
def test_host_of_reads_grpc_peers(peer, host):
    assert host_of(peer) == host
