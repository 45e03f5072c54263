"""A rank's side, against a real server on loopback; the ranks are threads of one process."""

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dpipe.coordinator import client, limits
from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.membership import Membership
from dpipe.coordinator.server import CoordinatorServer
from dpipe.errors import JoinError, RunAborted, RunError, TransferError
from dpipe.wire.rpc import Security, serve
from dpipe.wire.schema import Schema

ANY = Schema[Any](Any)


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Joining


def test_join_tells_all_addresses(run):
    run.serve(3)
    first, second, third = run.at_once(
        lambda: run.join(0, 3, advertised="10.0.0.1:4000"),
        lambda: run.join(1, 3),
        lambda: run.join(2, 3, advertised="10.0.0.3:4000"),
    )
    expected = {0: "10.0.0.1:4000", 1: None, 2: "10.0.0.3:4000"}
    assert [c.addresses for c in (first, second, third)] == [expected] * 3
    assert [(c.rank, c.world_size) for c in (first, second, third)] == [(0, 3), (1, 3), (2, 3)]


def test_join_tells_each_pair_a_secret_that_no_other_rank_hears(run):
    run.serve(3)
    ranks = run.at_once(*(lambda rank=rank: run.join(rank, 3) for rank in range(3)))
    for rank in ranks:
        for other in ranks:
            assert rank.link_secrets[other.rank] == other.link_secrets[rank.rank]
    of_pairs = {ranks[0].link_secrets[1], ranks[0].link_secrets[2], ranks[1].link_secrets[2]}
    assert len(of_pairs) == 3
    assert min(map(len, of_pairs)) == 32


def test_join_says_for_whom_it_waits(run, monkeypatch):
    monkeypatch.setattr(client, "_PATIENCE_S", 0.05)
    run.serve(2)
    messages: list[str] = []
    waits = threading.Event()

    def on_wait(text: str) -> None:
        messages.append(text)
        waits.set()

    def second() -> Coordinator:
        assert waits.wait(10)
        return run.join(1, 2)

    run.at_once(lambda: run.join(0, 2, on_wait=on_wait), second)
    assert messages == [f"waiting at 127.0.0.1:{run.servers[0].port} for rank 1 of 2 to join"]


def test_ranks_that_join_one_after_the_other_are_not_waited_for_with_words(run, monkeypatch):
    """A run of four said three times for whom it waited, each time for one rank fewer."""
    monkeypatch.setattr(client, "_PATIENCE_S", 20.0)
    run.serve(3)
    messages: list[str] = []
    takes = client.Coordinator._take_missing
    heard = {(1, 2): threading.Event(), (2,): threading.Event()}

    def take_missing(self: Coordinator, missing: Any) -> None:
        takes(self, missing)
        heard[tuple(missing.ranks)].set()

    def after(missing: tuple[int, ...], rank: int) -> Coordinator:
        assert heard[missing].wait(10)
        return run.join(rank, 3)

    monkeypatch.setattr(client.Coordinator, "_take_missing", take_missing)
    run.at_once(
        lambda: run.join(0, 3, on_wait=messages.append),
        lambda: after((1, 2), 1),
        lambda: after((2,), 2),
    )
    assert len(run.ranks) == 3
    assert messages == []


def test_join_waits_for_the_coordinator_to_come_up(run):
    port = _unused_port()
    messages: list[str] = []
    waits = threading.Event()

    def on_wait(text: str) -> None:
        messages.append(text)
        waits.set()

    def serve_later() -> None:
        assert waits.wait(10)
        run.serve(1, port=port)

    run.at_once(lambda: run.join(0, 1, address=f"127.0.0.1:{port}", on_wait=on_wait), serve_later)
    assert len(run.ranks) == 1
    assert messages[0].startswith(f"waiting for the coordinator at 127.0.0.1:{port} (")


def test_rank_that_has_left_waits_for_the_next_coordinator(run):
    """A measurement before a run meets at the run's address: one rank comes for the run while
    others still leave.
    """
    run.serve(2)
    _, second = run.at_once(lambda: run.join(0, 2), lambda: run.join(1, 2))
    second.leave()
    with pytest.raises(JoinError, match="no coordinator at .* after 1 s .*the run before this"):
        run.join(1, 2, join_s=1.0)


def test_what_is_waited_for_is_said_now_and_then(monkeypatch):
    """Two reasons that alternated filled the log."""
    now, messages = 0.0, []
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now))
    say = client._now_and_then(lambda text: messages.append((now, text)))
    for now in range(60):
        say("refused" if now % 2 else "no answer")
    assert messages == [(0, "no answer"), (1, "refused"), (30, "no answer"), (31, "refused")]


def test_join_gives_up_naming_what_to_check(run):
    address = f"127.0.0.1:{_unused_port()}"
    started = time.monotonic()
    with pytest.raises(
        JoinError, match=rf"no coordinator at {address} after 3 s .*refused.*node.bind.*firewall"
    ):
        run.join(0, 2, address=address, join_s=3.0)
    assert time.monotonic() - started < 8


def test_join_gives_up_on_one_who_listens_and_never_answers(run):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(JoinError, match=rf"no coordinator at {address} after 1 s"):
            run.join(0, 2, address=address, join_s=1.0, heartbeat_s=1.0)


def test_join_gives_up_when_the_others_do_not_come(run):
    run.serve(3, join_s=0.5)
    with pytest.raises(
        JoinError, match=r"rank 1 cannot join at .*: ranks 0, 2 of 3 did not join within 0.5 s"
    ):
        run.join(1, 3)


def test_join_gives_up_by_itself_before_the_coordinator_does(run, monkeypatch):
    monkeypatch.setattr("dpipe.coordinator.client._SLACK_S", 0.0)
    run.serve(2, join_s=60.0)
    with pytest.raises(JoinError, match=r"gave up waiting at .* for rank 0 to join"):
        run.join(1, 2, join_s=0.5)


def test_refused_join_reaches_all(run):
    run.serve(3)
    errors = run.at_once(
        lambda: run.join(0, 3, shared={"train.steps": 100}),
        lambda: run.join(1, 3, shared={"train.steps": 200}),
    )
    for rank, error in enumerate(errors):
        assert isinstance(error, JoinError)
        assert f"rank {rank} cannot join" in str(error)
        assert "train.steps is 200, on rank 0 100" in str(error)


def test_coordinator_that_stops_while_joining_reaches_all(run):
    server = run.serve(2)
    waits = threading.Event()

    def stop() -> None:
        assert waits.wait(10)
        server.close()

    waiting, _ = run.at_once(lambda: run.join(1, 2, on_wait=lambda text: waits.set()), stop)
    assert isinstance(waiting, JoinError)
    assert "the coordinator (rank 0) stopped before all ranks had joined" in str(waiting)


def test_port_of_another_service_is_told_apart(run):
    other = serve([], "127.0.0.1", 0, Security(), max_workers=2)
    refused = rf"what listens at .*:{other.port} is not dpipe's coordinator; check the port"
    with pytest.raises(JoinError, match=refused):
        run.join(0, 1, address=f"127.0.0.1:{other.port}")
    other.stop(0)
    other.join(5)


# Security


def test_wrong_token_is_refused_at_once(run):
    run.serve(1, security=Security("open sesame"))
    with pytest.raises(JoinError, match=r"wrong token: node.token must be the same on every rank"):
        run.join(0, 1, security=Security("guess"))
    run.join(0, 1, security=Security("open sesame"))


def test_certificates_of_one_authority_meet(run, authority):
    ca = authority()
    first, second = run.meet(2, server={"security": ca.security("t")}, security=ca.security("t"))
    run.at_once(lambda: first.barrier("start", 5), lambda: second.barrier("start", 5))


def test_certificate_of_another_authority_is_refused_at_once(run, authority):
    run.serve(1, security=authority().security())
    with pytest.raises(
        JoinError, match=r"no secure connection .*node.tls_ca come from one authority on all ranks"
    ):
        run.join(0, 1, security=authority().security())


def test_certificate_where_the_coordinator_has_none_is_refused_at_once(run, authority):
    run.serve(1)
    with pytest.raises(JoinError, match="no secure connection"):
        run.join(0, 1, security=authority().security())


def test_no_certificate_where_the_coordinator_has_one_says_so(run, authority):
    run.serve(1, security=authority().security())
    with pytest.raises(JoinError, match=r"something listens there and hangs up; are node.tls_cert"):
        run.join(0, 1, join_s=2.0)


# Running


def test_gather_brings_all_parts_by_rank(run):
    ranks = run.meet(3)
    under_way = [c.gather("step/1", f"from {c.rank}".encode()) for c in ranks]
    assert [g.wait(5) for g in under_way] == [(b"from 0", b"from 1", b"from 2")] * 3


def test_gather_does_not_block(run):
    first, second = run.meet(2)
    under_way = [first.gather(f"step/{i}", bytes([i])) for i in range(10)]
    assert not any(g.done() for g in under_way)
    for i in reversed(range(10)):
        second.gather(f"step/{i}", b"!")
    assert [g.wait(5) for g in under_way] == [(bytes([i]), b"!") for i in range(10)]
    assert all(g.done() for g in under_way)


def test_gather_takes_more_than_one_grpc_message(run):
    first, second = run.meet(2)
    large = bytes(range(256)) * 20_000
    under_way = first.gather("plan", large)
    second.gather("plan", b"")
    assert under_way.wait(10) == (large, b"")


def test_gather_that_times_out_names_who_is_missing(run):
    first, second, _ = run.meet(3)
    second.gather("step/9", b"")
    under_way = first.gather("step/9", b"")
    for _ in range(2):
        with pytest.raises(RunError, match=r"waited 0.05 s for 'step/9': no word from rank 2"):
            under_way.wait(0.05)


def test_gather_twice_under_one_key_is_a_mistake(run):
    first, _ = run.meet(2)
    first.gather("step/1", b"")
    with pytest.raises(ValueError, match="has already given its part of 'step/1'"):
        first.gather("step/1", b"")


def test_share_gives_every_rank_the_values_of_all_by_rank(run):
    ranks = run.meet(3)
    values = [{"port": 1}, [2.5, None], "three"]
    shared = run.at_once(
        *(lambda rank=rank: rank.share("where", values[rank.rank], 5, ANY) for rank in ranks)
    )
    assert shared == [values] * 3


def test_share_names_the_rank_whose_payload_is_not_json(run):
    first, second = run.meet(2)
    second.gather("where", b"\xff{")
    with pytest.raises(
        TransferError,
        match=r"rank 1 sent 2 bytes for 'where' that do not belong there \(Invalid JSON",
    ):
        first.share("where", 1, 5, ANY)


def test_share_that_times_out_names_who_is_missing(run):
    first, _ = run.meet(2)
    with pytest.raises(RunError, match=r"waited 0.05 s for 'where': no word from rank 1"):
        first.share("where", 1, 0.05, ANY)


def test_barrier_waits_for_the_last(run):
    first, second = run.meet(2)
    with pytest.raises(RunError, match="'barrier/start': no word from rank 1"):
        first.barrier("start", 0.05)
    run.at_once(lambda: first.barrier("end", 5), lambda: second.barrier("end", 5))


def test_clock_offset_of_one_machine_is_about_nothing(run):
    first, second = run.meet(2)
    assert abs(first.clock_offset_ns) < 50_000_000
    assert abs(second.clock_offset_ns) < 50_000_000


def test_clock_offset_is_the_one_of_the_fastest_round_trip(run):
    (alone,) = run.meet(1)
    alone._clock.clear()
    for round_trip, offset in [(900, 70), (200, 42), (500, 10)]:
        alone._clock.append((round_trip, offset))
    assert alone.clock_offset_ns == 42


def test_upload_arrives_whole_before_leave_returns(run):
    uploads: dict[tuple[int, str], bytes] = {}
    first, second = run.meet(
        2, server={"on_upload": lambda rank, kind, payload: uploads.update({(rank, kind): payload})}
    )
    large = bytes(range(256)) * 40_000
    second.upload("trace", large)
    first.upload("trace", b"{}")
    run.at_once(first.leave, second.leave)
    assert uploads == {(1, "trace"): large, (0, "trace"): b"{}"}


def test_upload_beyond_all_bounds_is_refused_here(run, monkeypatch):
    (alone,) = run.meet(1)
    monkeypatch.setitem(limits.UPLOADS, "trace", 999)
    with pytest.raises(
        ValueError, match=r"rank 0 may not .*: upload of 1000 bytes; the most is 999"
    ):
        alone.upload("trace", bytes(1000))


# Ending


def test_abort_tells_all_the_same(run):
    ranks = run.meet(3)
    reasons: list[str] = []
    notified = threading.Semaphore(0)
    for c in ranks[:2]:
        c.on_abort(lambda error: (reasons.append(str(error)), notified.release()))
    error = ranks[2].abort("loss is nan at step 7")
    assert str(error) == "rank 2 failed: loss is nan at step 7"
    assert all(notified.acquire(timeout=5) for _ in range(2))
    assert reasons == [str(error)] * 2


def test_abort_ends_what_waits_and_what_comes_after(run):
    first, second = run.meet(2)
    under_way = first.gather("step/1", b"")
    second.abort("no memory")
    with pytest.raises(RunAborted, match="rank 1 failed: no memory"):
        under_way.wait(5)
    with pytest.raises(RunAborted, match="no memory"):
        first.gather("step/2", b"").wait(5)
    with pytest.raises(RunAborted, match="no memory"):
        first.upload("trace", b"")
    late: list[str] = []
    first.on_abort(lambda error: late.append(str(error)))
    assert late == ["rank 1 failed: no memory"]
    first.leave()


def test_rank_that_vanishes_is_named_by_all(run):
    first, second, third = run.meet(3)
    under_way = first.gather("step/1", b"")
    third.close()
    error = second.abort("lost rank 2 on 1SEND_F4", symptom=True)
    with pytest.raises(RunAborted) as raised:
        under_way.wait(5)
    expected = "lost rank 2 (127.0.0.1): its process ended or its connection broke"
    assert [str(error), str(raised.value)] == [expected, expected]


def test_rank_that_leaves_is_not_lost(run):
    first, second = run.meet(2)
    aborts: list[RunAborted] = []
    first.on_abort(aborts.append)
    second.leave()
    with pytest.raises(RunError, match="no word from rank 1"):
        first.barrier("alone now", 0.2)
    assert aborts == []


def test_closed_line_ends_what_waits(run):
    first, _ = run.meet(2)
    under_way = first.gather("step/1", b"")
    first.close()
    first.close()
    with pytest.raises(RunAborted, match="rank 0 has closed its line to the coordinator"):
        under_way.wait(5)


def test_lost_coordinator_is_named(run):
    first, second = run.meet(2)
    under_way = second.gather("step/1", b"")
    server = run.servers[0]
    server._server.stop(0)
    server._server.join(5)
    lost = rf"lost the coordinator \(rank 0 at 127.0.0.1:{server.port}\)"
    with pytest.raises(RunAborted, match=lost):
        under_way.wait(5)
    assert "lost the coordinator" in str(first.abort("what now"))


def _deafen(monkeypatch) -> None:
    """A coordinator that reads, but sends no answer and no sign of life."""
    monkeypatch.setattr(CoordinatorServer, "_take", lambda self, message, guest: None)
    monkeypatch.setattr(Membership, "tick", lambda self, now: self.members.clear())


@pytest.mark.waits  # a busy machine looks late, and forgives itself
def test_silent_coordinator_is_lost(run, monkeypatch):
    (alone,) = run.meet(1, heartbeat_s=1.6)
    _deafen(monkeypatch)
    with pytest.raises(RunAborted, match="lost the coordinator"):
        alone.gather("step/1", b"").wait(20)


def test_silent_coordinator_lets_no_question_wait_for_ever(run, monkeypatch):
    (alone,) = run.meet(1)
    _deafen(monkeypatch)
    monkeypatch.setattr("dpipe.coordinator.base._ANSWER_S", 0.05)
    monkeypatch.setattr("dpipe.coordinator.client._VERDICT_S", 0.05)
    with pytest.raises(
        RunError,
        match=r"waited 0.05 s for 'step/1': and the coordinator does not say who is missing",
    ):
        alone.gather("step/1", b"").wait(0.05)
    assert str(alone.abort("no memory")) == "rank 0 failed: no memory"


def test_coordinator_that_falls_silent_in_the_join_is_refused(run, monkeypatch):
    take = CoordinatorServer._take

    def deaf_to_pings(self, message, guest):
        if message.WhichOneof("kind") != "ping":
            take(self, message, guest)

    monkeypatch.setattr(CoordinatorServer, "_take", deaf_to_pings)
    with pytest.raises(JoinError, match="let us in and fell silent"):
        # It beats every second, and would give a silent rank up in four.
        run.meet(1, heartbeat_s=2.0, server={"heartbeat_s": 4.0})


def test_run_that_ends_as_it_starts_is_a_join_error(run, monkeypatch):
    monkeypatch.setattr(
        Coordinator, "_note_clock", lambda self, pong, now_ns: self._end(RunAborted("no memory"))
    )
    with pytest.raises(JoinError, match="no memory"):
        run.meet(1)


def test_leave_says_when_the_coordinator_did_not_hear_it(run, monkeypatch):
    (alone,) = run.meet(1, heartbeat_s=0.4)
    _deafen(monkeypatch)
    with pytest.raises(RunAborted, match="lost the coordinator"):
        alone.leave()


def test_end_between_two_pings_ends_the_join(run):
    """It was waited for as long as the coordinator may be silent."""
    run.serve(1)
    start = time.monotonic()

    def give_up_before_it_is_cleared(client: Coordinator) -> None:
        clear = client._ponged.clear

        def cleared() -> None:
            client.give_up(RunAborted("a machine is gone"))
            clear()

        client._ponged.clear = cleared

    with pytest.raises(JoinError, match="a machine is gone"):
        run.join(0, 1, heartbeat_s=60.0, on_attempt=give_up_before_it_is_cleared)
    assert time.monotonic() - start < 20
