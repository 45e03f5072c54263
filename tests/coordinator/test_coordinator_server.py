"""The coordinator's side: ports, strangers, ranks that go silent, and processes that are killed."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import grpc
import pytest
from support.coordinator_stranger import Stranger
from support.warm_python import program_of

from dpipe.coordinator import frame
from dpipe.errors import JoinError, RunAborted
from dpipe.wire.v1 import coordinator_pb2 as pb


def _frames(message: pb.ToCoordinator) -> bytes:
    return b"".join(frame.cut(message))


def test_port_in_use_is_a_join_error(run):
    first = run.serve(1)
    with pytest.raises(
        JoinError, match=f"cannot listen on 127.0.0.1:{first.port}: the port is in use"
    ):
        run.serve(1, port=first.port)


def test_garbage_to_the_port_leaves_the_run_alone(run):
    first, second = run.meet(2)
    with socket.create_connection(("127.0.0.1", run.servers[0].port), timeout=5) as garbage:
        garbage.sendall(os.urandom(100_000))
        answer = iter(lambda: garbage.recv(65536), b"")
        with contextlib.suppress(ConnectionResetError):
            assert sum(map(len, answer)) < 1000
    run.at_once(lambda: first.barrier("still here", 5), lambda: second.barrier("still here", 5))


def _join(rank: int, world_size: int) -> bytes:
    return _frames(
        pb.ToCoordinator(
            join=pb.Join(protocol=frame.PROTOCOL, rank=rank, world_size=world_size, shared="{}")
        )
    )


PING = pb.ToCoordinator(ping=pb.Ping(sent_ns=1))
LEAVE = pb.ToCoordinator(leave=pb.Leave())


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ([b"\2 not a frame"], []),
        ([b"\0\xff\xff\xff"], []),
        ([_frames(LEAVE)], []),
        ([_frames(PING), b"\0"], ["pong"]),
        ([_join(0, 1), _frames(LEAVE)], ["abort"]),
    ],
)
def test_stranger_is_shown_out_and_the_run_goes_on(run, words, answers):
    (alone,) = run.meet(1)
    assert Stranger(run.servers[0].port, *words).hears() == answers
    alone.barrier("still here", 5)


def test_strangers_who_come_and_go_are_so_many_at_most(run):
    """Each left a session with two threads behind, which it might have dialled again."""
    server = run.serve(1, heartbeat_s=8.0)
    num_threads = threading.active_count()

    def visit() -> grpc.StatusCode | None:
        with contextlib.closing(Stranger(server.port)) as stranger:
            try:
                stranger.greeting()
            except grpc.RpcError as refusal:
                return refusal.code()

    assert grpc.StatusCode.RESOURCE_EXHAUSTED in (visit() for _ in range(300))
    assert threading.active_count() - num_threads < 100
    run.join(0, 1)  # once they are forgotten


def test_stream_that_breaks_while_the_coordinator_stops_is_not_waited_for(run):
    server = run.serve(1)
    stranger = Stranger(server.port)
    stranger.greeting()
    server._stopped.set()
    stranger.close()
    deadline = time.monotonic() + 4  # and not the 5 s in which it might dial again
    while server._guests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server._guests


@pytest.mark.parametrize("nonsense", [b"\2 not a frame", _join(0, 1), b"\0"])
def test_rank_that_talks_nonsense_is_lost(run, nonsense):
    server = run.serve(1)
    stranger = Stranger(server.port, _join(0, 1), nonsense)
    assert stranger.hears() == ["welcome", "abort"]
    with pytest.raises(JoinError, match=r"rank 0 .* was put out: it sent what dpipe does not send"):
        run.join(0, 1)


@pytest.mark.waits  # a busy machine looks late, and forgives itself
def test_silent_rank_is_lost_within_a_heartbeat(run):
    server = run.serve(2, heartbeat_s=0.5)
    silent = Stranger(server.port, _join(0, 2))
    first = run.join(1, 2, heartbeat_s=0.5)
    with pytest.raises(RunAborted, match=r"lost rank 0 \(127.0.0.1\): no sign of life for 0.5 s"):
        first.gather("step/1", b"").wait(5)
    silent.close()


def test_upload_that_cannot_be_kept_ends_the_run(run):
    def full(rank: int, kind: str, payload: bytes) -> None:
        raise OSError(28, "No space left on device")

    first, second = run.meet(2, server={"on_upload": full})
    under_way = first.gather("step/1", b"")
    second.upload("trace", b"spans")
    with pytest.raises(
        RunAborted, match=r"rank 0 failed: cannot take 'trace' from rank 1: .*No space left"
    ):
        under_way.wait(5)


def test_slow_upload_is_no_silence(run):
    def slow(rank: int, kind: str, payload: bytes) -> None:
        time.sleep(2.0)

    (alone,) = run.meet(1, heartbeat_s=1.0, server={"on_upload": slow, "heartbeat_s": 1.0})
    aborts: list[RunAborted] = []
    alone.on_abort(aborts.append)
    alone.upload("trace", b"spans")
    alone.barrier("still here", 5)
    assert aborts == []


def test_upload_that_nobody_wants_is_dropped(run):
    (alone,) = run.meet(1)
    alone.upload("trace", b"spans")
    alone.leave()


def test_close_waits_for_those_who_are_leaving(run):
    first, second = run.meet(2)
    aborts: list[RunAborted] = []
    second.on_abort(aborts.append)
    closing = threading.Thread(target=run.servers[0].close)
    first.leave()
    closing.start()
    second.upload("trace", b"the last ones")
    second.leave()
    closing.join(5)
    assert not closing.is_alive()
    assert aborts == []


class _SlowToEnd(queue.SimpleQueue):
    """An outbox whose reader ends some time after the last message."""

    def put(self, message, *rest):
        super().put(message, *rest)
        if message is None:
            time.sleep(0.5)


def test_close_outlasts_the_readers(run, monkeypatch):
    monkeypatch.setattr("dpipe.coordinator.line.queue", SimpleNamespace(SimpleQueue=_SlowToEnd))
    (alone,) = run.meet(1)
    alone.close()
    run.servers[0].close()
    assert "coordinator reader" not in [thread.name for thread in threading.enumerate()]


def test_close_tells_those_who_stay(run):
    first, _ = run.meet(2)
    run.servers[0].close(wait_s=0.1)
    with pytest.raises(
        RunAborted, match=r"the coordinator \(rank 0\) stopped while other ranks were still at work"
    ):
        first.gather("step/1", b"").wait(5)


JOIN_AND_WAIT = """
import sys, time
from dpipe.coordinator.client import Coordinator
Coordinator.join(sys.argv[1], 1, 3, shared={}, heartbeat_s=float(sys.argv[2]))
print("joined", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "heartbeat_s", "why"),
    [
        (signal.SIGKILL, 8.0, "its process ended or its connection broke"),
        (signal.SIGSTOP, 3.0, "no sign of life for 3 s"),
    ],
)
def test_killed_process_is_named_by_all_others_in_time(run, number, heartbeat_s, why, warm_python):
    server = run.serve(3, heartbeat_s=heartbeat_s)
    argv = [warm_python, "-c", JOIN_AND_WAIT, f"127.0.0.1:{server.port}", str(heartbeat_s)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            first, third = run.at_once(
                lambda: run.join(0, 3, heartbeat_s=heartbeat_s),
                lambda: run.join(2, 3, heartbeat_s=heartbeat_s),
            )
            assert process.stdout.readline() == b"joined\n"
            waiting = [first.gather("step/1", b""), third.gather("step/1", b"")]
            killed_at = time.monotonic()
            os.kill(program_of(warm_python, process.pid), number)
            for gather in waiting:
                with pytest.raises(RunAborted, match=rf"lost rank 1 \(127.0.0.1\): {why}"):
                    gather.wait(10)
            assert time.monotonic() - killed_at < 10
        finally:
            process.kill()
