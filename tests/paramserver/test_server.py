"""The server over real gRPC: which workers may join, what is refused, and what survives."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpipe.errors import (
    JoinError,
    NumericError,
    PeerLost,
    RunAborted,
    RunError,
    TransferError,
    TransferTimeout,
)
from dpipe.paramserver import server
from dpipe.paramserver.server import ParameterServer
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_server import session_of
from dpipe.paramserver.stage_state import StepDecision
from dpipe.paramworker.client import ServerAccess, StageClient, reach
from dpipe.serve.standalone import FolderSnapshots
from dpipe.wire.v1 import parameters_pb2 as pb

SPEC = FlatSpec(
    (ParameterSpec("layers.0.w", 0, 30, True), ParameterSpec("layers.0.b", 0, 3, False)),
    chunk_values=16,
)
RULE = StepRule(ranks=(0, 1), weight_decay=0.1, betas=(0.9, 0.95))
GO = StepDecision(1e-2, 1.0)

Connect = Callable[..., StageClient]


@pytest.fixture
def serving() -> Iterator[ParameterServer]:
    parameter_server = ParameterServer()
    yield parameter_server
    parameter_server.close()


@pytest.fixture
def connect(serving: ParameterServer) -> Iterator[Connect]:
    """`connect(1, connections=2)`: replica 1's client, not opened; keywords are
    those of `ServerAccess`, or `spec`, `rule` and `stage`.
    """
    clients: list[StageClient] = []

    def make(
        replica: int, spec: FlatSpec = SPEC, rule: StepRule = RULE, stage: int = 0, **worker: Any
    ) -> StageClient:
        settings = {"session": "run 1", "connect_s": 2.0, "timeout_s": 10.0} | worker
        who = ServerAccess(f"127.0.0.1:{serving.port}", replica=replica, rank=replica, **settings)
        clients.append(StageClient(who, stage, spec, rule))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def vectors(spec: FlatSpec = SPEC) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(spec.length) for name in ("values", "exp_avg", "exp_avg_sq")}


def gradient(replica: int) -> torch.Tensor:
    return torch.randn(SPEC.length, generator=torch.Generator().manual_seed(replica))


def outbox(replica: int, values: torch.Tensor | None = None) -> Callable[[int], torch.Tensor]:
    whole = gradient(replica) if values is None else values
    return lambda chunk: whole[SPEC.chunk(chunk)]


def pull(client: StageClient, step: int, verdict: StepDecision = GO) -> torch.Tensor:
    got = torch.zeros(SPEC.length)

    def put(chunk: int, whole: bool, body: memoryview) -> None:
        got[SPEC.chunk(chunk)] = torch.frombuffer(bytearray(body), dtype=torch.float32)

    client.pull(step, verdict, put)
    return got


def both(*calls: Callable[[], Any]) -> list[Any]:
    """What they return, called at the same time; raises what one raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


def opened(connect: Connect, **settings: Any) -> tuple[StageClient, StageClient]:
    clients = connect(0, **settings), connect(1, **settings)
    both(*(lambda client=client: client.open(0, 0, vectors) for client in clients))
    return clients


@pytest.mark.parametrize("connections", [1, 2, 5])
def test_workers_get_the_same_parameters_over_any_number_of_connections(
    connections: int, connect: Connect
) -> None:
    clients = opened(connect, connections=connections)
    for replica, client in enumerate(clients):
        client.push(0, outbox(replica))
    first, second = both(*(lambda client=client: pull(client, 0) for client in clients))
    assert torch.equal(first, second)
    assert torch.equal(first[:30].sign(), -(gradient(0) + gradient(1))[:30].sign())


def test_worker_that_dies_in_a_push_leaves_the_server_as_it_was(
    serving: ParameterServer, connect: Connect
) -> None:
    survivor, dying = opened(connect)
    before = survivor.fetch(0)
    survivor.push(0, outbox(0))

    def half(chunk: int) -> torch.Tensor:
        if chunk == 2:
            dying.fail(RunAborted("killed"))
        return outbox(1)(chunk)

    with pytest.raises(RunAborted, match="killed"):
        dying.push(0, half)
    waiting = threading.Timer(0.5, lambda: survivor.fail(RunAborted("rank 1 was lost")))
    waiting.start()
    with pytest.raises(RunAborted, match="rank 1 was lost"):
        pull(survivor, 0)
    assert serving.standing == {0: 0}
    after = serving._stages[0, 0].state.now.by_name()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_worker_that_waits_too_long_learns_for_whom(connect: Connect) -> None:
    survivor, _ = opened(connect, timeout_s=2.5)
    survivor.push(0, outbox(0))
    with pytest.raises(TransferTimeout, match="nothing, or not all, has come from rank 1"):
        pull(survivor, 0)


def test_norms_come_when_all_have_pushed(connect: Connect) -> None:
    first, second = opened(connect)
    first.push(0, outbox(0))
    squares, _ = both(lambda: first.norms(0), lambda: second.push(0, outbox(1)))
    assert squares == pytest.approx(
        {0: float(((gradient(0) + gradient(1)) / 2).double().square().sum())}
    )


def test_gradient_that_is_not_finite_names_its_rank(connect: Connect) -> None:
    first, second = opened(connect)
    bad = gradient(1)
    bad[31] = torch.nan
    first.push(0, outbox(0))
    second.push(0, outbox(1, bad))
    with pytest.raises(NumericError, match=r"the gradient of layers\.0\.b on rank 1 is not finite"):
        pull(first, 0)


def test_sizes_that_differ_are_refused(connect: Connect) -> None:
    client = connect(0)
    client.open(0, 0, vectors)
    other = FlatSpec((replace(SPEC.parameters[0], num_values=31), SPEC.parameters[1]), 16)
    with pytest.raises(
        JoinError, match=r"layers\.0\.w of 31 values where layers\.0\.w of 30 is known"
    ):
        connect(1, spec=other).open(0, 0, vectors)


def test_rules_that_differ_are_refused(connect: Connect) -> None:
    client = connect(0)
    client.open(0, 0, vectors)
    with pytest.raises(JoinError, match="the replicas of stage 0 do not agree"):
        connect(1, rule=replace(RULE, wire="int8")).open(0, 0, vectors)


def test_wrong_step_is_refused(connect: Connect) -> None:
    client, _ = opened(connect)
    with pytest.raises(TransferError, match="gradient of step 3 came where step 0 is in progress"):
        client.push(3, outbox(0))


def test_too_few_bytes_are_refused(connect: Connect) -> None:
    client, _ = opened(connect)
    with pytest.raises(
        TransferError, match=r"chunk 0 of replica 0's gradient of step 0 came in 28 bytes"
    ):
        client.push(0, lambda chunk: torch.zeros(7))


def test_refused_push_ends_the_pull_beside_it(connect: Connect) -> None:
    client, _ = opened(connect)
    client.keep(0, lambda chunk: torch.zeros(7))
    with pytest.raises(TransferError, match="came in 28 bytes"):
        client.pull(0, GO, lambda chunk, whole, body: None, push=True)


def test_vectors_that_do_not_belong_are_refused(connect: Connect) -> None:
    with pytest.raises(TransferError, match=r"\['values'\] came where"):
        connect(0).open(0, 0, lambda: {"values": torch.zeros(SPEC.length)})


def test_vectors_of_a_worker_that_has_not_joined_are_refused(connect: Connect) -> None:
    client = connect(0)
    client._connect()
    with pytest.raises(TransferError, match="has not attended"):
        client._load(vectors())


def test_new_run_takes_over_and_the_old_one_is_notified(
    serving: ParameterServer, connect: Connect
) -> None:
    old, _ = opened(connect)
    connect(0, session="run 2").open(0, 0, vectors)
    with pytest.raises(TransferError, match="no stage 0 of run run 1; has another run taken over"):
        old.push(0, outbox(0))


def test_parts_of_a_stage_are_kept_apart(serving: ParameterServer, connect: Connect) -> None:
    """Each is stepped by its own gradients; `standing` tells of the one furthest behind."""
    clients = [opened(connect, part=part) for part in (0, 1)]
    for part, replicas in enumerate(clients):
        for client in replicas:
            client.push(0, outbox(part))
    first, again = both(*(lambda client=client: pull(client, 0) for client in clients[1]))
    assert serving.standing == {0: 0}
    other, _ = both(*(lambda client=client: pull(client, 0) for client in clients[0]))
    assert torch.equal(first, again)
    assert torch.equal(first[:30].sign(), -gradient(1)[:30].sign())
    assert torch.equal(other[:30].sign(), -gradient(0)[:30].sign())
    assert serving.standing == {0: 1}


def test_server_does_not_wait_for_what_an_older_run_left_behind(
    serving: ParameterServer, connect: Connect
) -> None:
    """The older run had more stages, which the new run does not take over."""
    old = connect(0, stage=1)
    old.open(0, 0, vectors)
    clients = opened(connect, session="run 2")
    assert not serving.wait_until_left(0.1)
    for client in clients:
        client.leave()
    assert serving.wait_until_left(5)
    assert serving.standing == {0: 0}


def test_run_that_took_no_step_is_not_waited_for(
    serving: ParameterServer, connect: Connect
) -> None:
    """Such a run may have ended before its first step."""
    clients = opened(connect)
    reach(ServerAccess(f"127.0.0.1:{serving.port}", "run 2", 0, 0))
    for client in clients:
        client.leave()
    assert serving.wait_until_left(5)


def test_new_run_takes_all_parts_of_a_stage(serving: ParameterServer, connect: Connect) -> None:
    _, (old, _) = opened(connect), opened(connect, part=1)
    connect(0, session="run 2").open(0, 0, vectors)
    with pytest.raises(
        TransferError, match="no stage 0, part 1 of run run 1; has another run taken over"
    ):
        old.push(0, outbox(0))


def test_waiting_run_is_notified_when_another_takes_over(connect: Connect) -> None:
    old, _ = opened(connect)
    old.push(0, outbox(0))
    taking = threading.Timer(0.5, lambda: connect(0, session="run 2").open(0, 0, vectors))
    taking.start()
    with pytest.raises(TransferError, match="another run .* has taken its place"):
        pull(old, 0)
    taking.join(10)


def test_other_version_is_refused(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PROTOCOL", 7)
    with pytest.raises(JoinError, match="it speaks protocol 7, the worker 2"):
        connect(0).open(0, 0, vectors)


def test_missing_server_is_named_with_a_remedy(serving: ParameterServer) -> None:
    serving.close()
    with pytest.raises(
        JoinError, match=rf"no parameter server at 127\.0\.0\.1:{serving.port} .*`dpipe serve`"
    ):
        reach(ServerAccess(f"127.0.0.1:{serving.port}", "run 1", 0, 0, connect_s=0.2))


def test_server_that_does_not_come_back_is_named_with_a_remedy(
    serving: ParameterServer, connect: Connect
) -> None:
    client, _ = opened(connect, timeout_s=1.0)
    serving.close()
    with pytest.raises(
        PeerLost, match=r"rank 0 lost the parameter server .* while pushing the gradient of step 0"
    ):
        client.push(0, outbox(0))


def test_chunk_out_of_turn_is_refused(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = opened(connect)
    for replica, client in enumerate(clients):
        client.push(0, outbox(replica))
    plain = server.piece
    monkeypatch.setattr(server, "piece", lambda head, tensor=None: plain(pb.Piece(chunk=2), tensor))
    with pytest.raises(
        TransferError, match="chunk 2 came from the parameter server where 0 was due"
    ):
        pull(clients[0], 0)


def test_failed_journal_ends_the_run_with_its_reason(
    connect: Connect, serving: ParameterServer, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line, without a traceback."""
    clients = opened(connect)

    class Full:
        def wait_for_snapshot(self) -> None: ...
        def close(self) -> None: ...
        def write(self, step: int, verdict: StepDecision, average: torch.Tensor) -> None:
            raise RunError("No space left on device")

    serving._stages[0, 0]._journal = Full()  # type: ignore[assignment]
    for replica, client in enumerate(clients):
        client.push(0, outbox(replica))
    with pytest.raises(
        TransferError, match="cannot keep step 0 of stage 0: No space left on device"
    ):
        both(*(lambda client=client: pull(client, 0) for client in clients))
    assert str(serving.failure) == "cannot keep step 0 of stage 0: No space left on device"
    assert not caplog.records


def test_traffic_counts_pushed_and_pulled_bytes(connect: Connect) -> None:
    clients = opened(connect)
    for replica, client in enumerate(clients):
        client.push(0, outbox(replica))
    both(*(lambda client=client: pull(client, 0) for client in clients))
    for client in clients:
        messages = [
            (message.peer, message.received, message.moved.num_bytes) for message in client.traffic
        ]
        assert sorted(messages) == [
            ("server", False, 4),
            ("server", False, 64),
            ("server", False, 64),
            ("server", True, 132),
        ]
        assert all(message.moved.start_ns <= message.moved.end_ns for message in client.traffic)


def test_server_that_all_workers_have_left_reports_it(
    serving: ParameterServer, connect: Connect
) -> None:
    clients = opened(connect)
    clients[0].leave()
    assert not serving.wait_until_left(0.1)
    clients[1].leave()
    assert serving.wait_until_left(5)


def test_worker_that_waits_for_others_brings_a_server_started_again_its_gradient(
    tmp_path: Path,
) -> None:
    """It asks nothing, and others wait for its gradient there: all would wait for each other."""

    def started(port: int = 0) -> ParameterServer:
        return ParameterServer(port=port, folder=tmp_path, snapshots=FolderSnapshots())

    first = started()
    address = f"127.0.0.1:{first.port}"
    clients = [
        StageClient(ServerAccess(address, "run 1", replica, replica, timeout_s=20), 0, SPEC, RULE)
        for replica in (0, 1)
    ]
    both(*(lambda client=client: client.open(0, 0, vectors) for client in clients))
    for replica, client in enumerate(clients):
        client.push(0, outbox(replica))
    known = clients[1].norms(0)
    first.close()
    second = started(first.port)
    try:
        assert both(lambda: clients[0].norms(0)) == [known]
        pulled = both(*(lambda client=client: pull(client, 0) for client in clients))
        assert torch.equal(*pulled)
    finally:
        for client in clients:
            client.close()
        second.close()


def test_server_killed_during_the_end_does_not_wait_for_workers_that_have_left(
    tmp_path: Path,
) -> None:
    """A worker that has left does not come back; when all have left, the folder is free for the
    next run.
    """

    def started(port: int = 0) -> ParameterServer:
        return ParameterServer(port=port, folder=tmp_path, snapshots=FolderSnapshots())

    first = started()
    address = f"127.0.0.1:{first.port}"
    clients = [
        StageClient(ServerAccess(address, "run 1", replica, replica), 0, SPEC, RULE)
        for replica in (0, 1)
    ]
    both(*(lambda client=client: client.open(0, 0, vectors) for client in clients))
    clients[0].leave()
    first.close()
    second = started(first.port)
    assert not second.wait_until_left(0.1)
    clients[1].leave()
    assert second.wait_until_left(5)
    second.close()
    third = started(first.port)
    assert not third.wait_until_left(0.1)
    third.close()
    for client in clients:
        client.close()


def test_worker_of_an_earlier_epoch_takes_nothing_over(serving: ParameterServer) -> None:
    """A machine that was stopped for long goes on with what it was about to do."""
    alone = replace(RULE, ranks=(0,))

    def client(epoch: int, stage: int) -> StageClient:
        access = ServerAccess(f"127.0.0.1:{serving.port}", session_of("run", epoch), 0, 0)
        return StageClient(access, stage, SPEC, alone)

    clients = [client(9, 0), client(9, 1), client(10, 0), client(9, 0), client(9, 1)]
    for one in clients[:3]:
        one.open(0, 0, vectors)
    assert serving.standing == {0: 0}, "the epoch before had a stage more"
    for one in clients[3:]:
        with pytest.raises(JoinError, match=r"has gone on without this worker: run\.10"):
            one.open(0, 0, vectors)
    clients[2].push(0, outbox(0))
    pull(clients[2], 0)
    assert serving.standing == {0: 1}
    for one in clients:
        one.close()


def test_empty_vector_is_also_stored(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"folder": tmp_path, "snapshots": FolderSnapshots()}
    first, empty = ParameterServer(**kept), FlatSpec((), 16)
    client = StageClient(
        ServerAccess(f"127.0.0.1:{first.port}", "run 1", 0, 0), 0, empty, replace(RULE, ranks=(0,))
    )
    client.open(0, 0, lambda: vectors(empty))
    client.push(0, lambda chunk: torch.zeros(0))
    client.pull(0, GO, lambda chunk, whole, body: None)
    first.close()
    second = ParameterServer(**kept)
    assert second.standing == {0: 1}
    second.close()
    client.close()


def test_folder_needs_a_reader(tmp_path: Path) -> None:
    (tmp_path / "stage-0").mkdir()
    with pytest.raises(AssertionError, match="a folder goes with"):
        ParameterServer(folder=tmp_path)


def test_port_in_use_is_refused(serving: ParameterServer) -> None:
    with pytest.raises(JoinError, match="cannot listen"):
        ParameterServer(port=serving.port)


def test_worker_that_waits_for_parameters_is_released_when_the_server_closes(
    serving: ParameterServer, connect: Connect
) -> None:
    closing = threading.Timer(0.3, serving.close)
    closing.start()
    with pytest.raises(JoinError, match="no parameter server"):
        connect(1, connect_s=0.5).open(0, 0, vectors)
    closing.join(10)
