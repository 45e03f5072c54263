"""The server over real gRPC: who is taken in, what is refused, and what survives."""

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
from dpipe.paramserver.client import ServerAccess, StageClient, reach
from dpipe.paramserver.server import ParameterServer
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_state import StepDecision
from dpipe.run.parameter_servers import FolderSnapshots
from dpipe.wire.v1 import parameters_pb2 as pb

ROW = FlatSpec(
    (ParameterSpec("layers.0.w", 0, 30, True), ParameterSpec("layers.0.b", 0, 3, False)),
    chunk_values=16,
)
RULE = StepRule(ranks=(0, 1), weight_decay=0.1, betas=(0.9, 0.95))
GO = StepDecision(1e-2, 1.0)

Dial = Callable[..., StageClient]


@pytest.fixture
def serving() -> Iterator[ParameterServer]:
    made = ParameterServer()
    yield made
    made.close()


@pytest.fixture
def dial(serving: ParameterServer) -> Iterator[Dial]:
    """`dial(1, connections=2)`: replica 1's line, not opened; keywords are `ServerAccess`'s, or `row`,
    `rule` and `stage`.
    """
    lines: list[StageClient] = []

    def make(
        replica: int, row: FlatSpec = ROW, rule: StepRule = RULE, stage: int = 0, **worker: Any
    ) -> StageClient:
        settings = {"session": "run 1", "connect_s": 2.0, "timeout_s": 10.0} | worker
        who = ServerAccess(f"127.0.0.1:{serving.port}", replica=replica, rank=replica, **settings)
        lines.append(StageClient(who, stage, row, rule))
        return lines[-1]

    yield make
    for line in lines:
        line.close()


def rows(row: FlatSpec = ROW) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(row.length) for name in ("values", "exp_avg", "exp_avg_sq")}


def gradient(replica: int) -> torch.Tensor:
    return torch.randn(ROW.length, generator=torch.Generator().manual_seed(replica))


def outbox(replica: int, values: torch.Tensor | None = None) -> Callable[[int], torch.Tensor]:
    whole = gradient(replica) if values is None else values
    return lambda chunk: whole[ROW.chunk(chunk)]


def pull(line: StageClient, step: int, verdict: StepDecision = GO) -> torch.Tensor:
    got = torch.zeros(ROW.length)

    def put(chunk: int, whole: bool, body: memoryview) -> None:
        got[ROW.chunk(chunk)] = torch.frombuffer(bytearray(body), dtype=torch.float32)

    line.pull(step, verdict, put)
    return got


def both(*calls: Callable[[], Any]) -> list[Any]:
    """What they return, made at the same time; raises what one raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


def opened(dial: Dial, **settings: Any) -> tuple[StageClient, StageClient]:
    lines = dial(0, **settings), dial(1, **settings)
    both(*(lambda line=line: line.open(0, 0, rows) for line in lines))
    return lines


@pytest.mark.parametrize("connections", [1, 2, 5])
def test_workers_get_the_same_parameters_over_any_number_of_connections(
    connections: int, dial: Dial
) -> None:
    lines = opened(dial, connections=connections)
    for replica, line in enumerate(lines):
        line.push(0, outbox(replica))
    first, second = both(*(lambda line=line: pull(line, 0) for line in lines))
    assert torch.equal(first, second)
    assert torch.equal(first[:30].sign(), -(gradient(0) + gradient(1))[:30].sign())


def test_worker_that_dies_in_a_push_leaves_the_server_as_it_was(
    serving: ParameterServer, dial: Dial
) -> None:
    survivor, dying = opened(dial)
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


def test_worker_that_waits_too_long_is_told_for_whom(dial: Dial) -> None:
    survivor, _ = opened(dial, timeout_s=2.5)
    survivor.push(0, outbox(0))
    with pytest.raises(TransferTimeout, match="nothing, or not all, has come from rank 1"):
        pull(survivor, 0)


def test_norms_come_when_all_have_pushed(dial: Dial) -> None:
    first, second = opened(dial)
    first.push(0, outbox(0))
    squares, _ = both(lambda: first.norms(0), lambda: second.push(0, outbox(1)))
    assert squares == pytest.approx(
        {0: float(((gradient(0) + gradient(1)) / 2).double().square().sum())}
    )


def test_gradient_that_is_not_finite_names_its_rank(dial: Dial) -> None:
    first, second = opened(dial)
    bad = gradient(1)
    bad[31] = torch.nan
    first.push(0, outbox(0))
    second.push(0, outbox(1, bad))
    with pytest.raises(NumericError, match=r"the gradient of layers\.0\.b on rank 1 is not finite"):
        pull(first, 0)


def test_sizes_that_differ_are_refused(dial: Dial) -> None:
    line = dial(0)
    line.open(0, 0, rows)
    other = FlatSpec((replace(ROW.parameters[0], num_values=31), ROW.parameters[1]), 16)
    with pytest.raises(
        JoinError, match=r"layers\.0\.w of 31 values where layers\.0\.w of 30 is known"
    ):
        dial(1, row=other).open(0, 0, rows)


def test_rules_that_differ_are_refused(dial: Dial) -> None:
    line = dial(0)
    line.open(0, 0, rows)
    with pytest.raises(JoinError, match="the replicas of stage 0 do not agree"):
        dial(1, rule=replace(RULE, wire="int8")).open(0, 0, rows)


def test_wrong_step_is_refused(dial: Dial) -> None:
    line, _ = opened(dial)
    with pytest.raises(TransferError, match="gradient of step 3 came where step 0 is under way"):
        line.push(3, outbox(0))


def test_too_few_bytes_are_refused(dial: Dial) -> None:
    line, _ = opened(dial)
    with pytest.raises(
        TransferError, match=r"chunk 0 of replica 0's gradient of step 0 came in 28 bytes"
    ):
        line.push(0, lambda chunk: torch.zeros(7))


def test_refused_push_ends_the_pull_beside_it(dial: Dial) -> None:
    line, _ = opened(dial)
    line.keep(0, lambda chunk: torch.zeros(7))
    with pytest.raises(TransferError, match="came in 28 bytes"):
        line.pull(0, GO, lambda chunk, whole, body: None, push=True)


def test_rows_that_do_not_belong_are_refused(dial: Dial) -> None:
    with pytest.raises(TransferError, match=r"rows \['values'\] came where"):
        dial(0).open(0, 0, lambda: {"values": torch.zeros(ROW.length)})


def test_rows_of_somebody_who_has_not_attended_are_refused(dial: Dial) -> None:
    line = dial(0)
    line._connect()
    with pytest.raises(TransferError, match="has not attended"):
        line._load(rows())


def test_new_run_takes_over_and_the_old_one_is_told(serving: ParameterServer, dial: Dial) -> None:
    old, _ = opened(dial)
    dial(0, session="run 2").open(0, 0, rows)
    with pytest.raises(TransferError, match="no stage 0 of run run 1; has another run taken over"):
        old.push(0, outbox(0))


def test_parts_of_a_stage_are_kept_apart(serving: ParameterServer, dial: Dial) -> None:
    """Each is stepped by its own gradients; `standing` tells of the one furthest behind."""
    lines = [opened(dial, part=part) for part in (0, 1)]
    for part, replicas in enumerate(lines):
        for line in replicas:
            line.push(0, outbox(part))
    first, again = both(*(lambda line=line: pull(line, 0) for line in lines[1]))
    assert serving.standing == {0: 0}
    other, _ = both(*(lambda line=line: pull(line, 0) for line in lines[0]))
    assert torch.equal(first, again)
    assert torch.equal(first[:30].sign(), -gradient(1)[:30].sign())
    assert torch.equal(other[:30].sign(), -gradient(0)[:30].sign())
    assert serving.standing == {0: 1}


def test_server_does_not_wait_for_what_an_older_run_left_behind(
    serving: ParameterServer, dial: Dial
) -> None:
    """One of more stages: the new run has no use for those that it does not take over."""
    old = dial(0, stage=1)
    old.open(0, 0, rows)
    lines = opened(dial, session="run 2")
    assert not serving.wait_until_left(0.1)
    for line in lines:
        line.leave()
    assert serving.wait_until_left(5)
    assert serving.standing == {0: 0}


def test_run_that_has_only_looked_is_not_waited_for(serving: ParameterServer, dial: Dial) -> None:
    """It may have ended before its first step."""
    lines = opened(dial)
    reach(ServerAccess(f"127.0.0.1:{serving.port}", "run 2", 0, 0))
    for line in lines:
        line.leave()
    assert serving.wait_until_left(5)


def test_new_run_takes_all_parts_of_a_stage(serving: ParameterServer, dial: Dial) -> None:
    _, (old, _) = opened(dial), opened(dial, part=1)
    dial(0, session="run 2").open(0, 0, rows)
    with pytest.raises(
        TransferError, match="no stage 0, part 1 of run run 1; has another run taken over"
    ):
        old.push(0, outbox(0))


def test_run_that_waits_when_another_takes_over_is_told(dial: Dial) -> None:
    old, _ = opened(dial)
    old.push(0, outbox(0))
    taking = threading.Timer(0.5, lambda: dial(0, session="run 2").open(0, 0, rows))
    taking.start()
    with pytest.raises(TransferError, match="another run .* has taken its place"):
        pull(old, 0)
    taking.join(10)


def test_other_version_is_refused(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PROTOCOL", 7)
    with pytest.raises(JoinError, match="it speaks protocol 7, the worker 2"):
        dial(0).open(0, 0, rows)


def test_server_that_never_was_is_named_with_what_to_do(serving: ParameterServer) -> None:
    serving.close()
    with pytest.raises(
        JoinError, match=rf"no parameter server at 127\.0\.0\.1:{serving.port} .*`dpipe serve`"
    ):
        reach(ServerAccess(f"127.0.0.1:{serving.port}", "run 1", 0, 0, connect_s=0.2))


def test_server_that_stays_away_is_named_with_what_to_do(
    serving: ParameterServer, dial: Dial
) -> None:
    line, _ = opened(dial, timeout_s=1.0)
    serving.close()
    with pytest.raises(
        PeerLost, match=r"rank 0 lost the parameter server .* while pushing the gradient of step 0"
    ):
        line.push(0, outbox(0))


def test_chunk_out_of_turn_is_refused(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = opened(dial)
    for replica, line in enumerate(lines):
        line.push(0, outbox(replica))
    plain = server.piece
    monkeypatch.setattr(server, "piece", lambda head, tensor=None: plain(pb.Piece(chunk=2), tensor))
    with pytest.raises(
        TransferError, match="chunk 2 came from the parameter server where 0 was due"
    ):
        pull(lines[0], 0)


def test_failed_journal_ends_the_run_with_its_reason(
    dial: Dial, serving: ParameterServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, in a line: the log had two tracebacks of it."""
    lines = opened(dial)

    class Full:
        def wait_for_snapshot(self) -> None: ...
        def close(self) -> None: ...
        def write(self, step: int, verdict: StepDecision, average: torch.Tensor) -> None:
            raise RunError("No space left on device")

    serving._stages[0, 0]._journal = Full()  # type: ignore[assignment]
    for replica, line in enumerate(lines):
        line.push(0, outbox(replica))
    with pytest.raises(
        TransferError, match="cannot keep step 0 of stage 0: No space left on device"
    ):
        both(*(lambda line=line: pull(line, 0) for line in lines))
    assert str(serving.failure) == "cannot keep step 0 of stage 0: No space left on device"
    assert not caplog.records


def test_traffic_tells_what_was_pushed_and_pulled(dial: Dial) -> None:
    lines = opened(dial)
    for replica, line in enumerate(lines):
        line.push(0, outbox(replica))
    both(*(lambda line=line: pull(line, 0) for line in lines))
    for line in lines:
        told = [
            (message.peer, message.received, message.moved.num_bytes) for message in line.traffic
        ]
        assert sorted(told) == [
            ("server", False, 4),
            ("server", False, 64),
            ("server", False, 64),
            ("server", True, 132),
        ]
        assert all(message.moved.start_ns <= message.moved.end_ns for message in line.traffic)


def test_server_that_is_left_by_all_says_so(serving: ParameterServer, dial: Dial) -> None:
    lines = opened(dial)
    lines[0].leave()
    assert not serving.wait_until_left(0.1)
    lines[1].leave()
    assert serving.wait_until_left(5)


def test_server_that_is_killed_while_it_is_left_does_not_wait_for_who_has(tmp_path: Path) -> None:
    """Who has left does not come again; when all have, the folder is for whoever comes next."""

    def started(port: int = 0) -> ParameterServer:
        return ParameterServer(port=port, folder=tmp_path, snapshots=FolderSnapshots())

    first = started()
    address = f"127.0.0.1:{first.port}"
    lines = [
        StageClient(ServerAccess(address, "run 1", replica, replica), 0, ROW, RULE)
        for replica in (0, 1)
    ]
    both(*(lambda line=line: line.open(0, 0, rows) for line in lines))
    lines[0].leave()
    first.close()
    second = started(first.port)
    assert not second.wait_until_left(0.1)
    lines[1].leave()
    assert second.wait_until_left(5)
    second.close()
    third = started(first.port)
    assert not third.wait_until_left(0.1)
    third.close()
    for line in lines:
        line.close()


def test_row_without_values_is_kept_as_well(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"folder": tmp_path, "snapshots": FolderSnapshots()}
    first, empty = ParameterServer(**kept), FlatSpec((), 16)
    line = StageClient(
        ServerAccess(f"127.0.0.1:{first.port}", "run 1", 0, 0), 0, empty, replace(RULE, ranks=(0,))
    )
    line.open(0, 0, lambda: rows(empty))
    line.push(0, lambda chunk: torch.zeros(0))
    line.pull(0, GO, lambda chunk, whole, body: None)
    first.close()
    second = ParameterServer(**kept)
    assert second.standing == {0: 1}
    second.close()
    line.close()


def test_folder_needs_somebody_who_can_read_it(tmp_path: Path) -> None:
    (tmp_path / "stage-0").mkdir()
    with pytest.raises(AssertionError, match="a folder goes with"):
        ParameterServer(folder=tmp_path)


def test_port_in_use_is_refused(serving: ParameterServer) -> None:
    with pytest.raises(JoinError, match="cannot listen"):
        ParameterServer(port=serving.port)


def test_worker_that_waits_for_the_row_is_let_go_when_the_server_closes(
    serving: ParameterServer, dial: Dial
) -> None:
    closing = threading.Timer(0.3, serving.close)
    closing.start()
    with pytest.raises(JoinError, match="no parameter server"):
        dial(1, connect_s=0.5).open(0, 0, rows)
    closing.join(10)
