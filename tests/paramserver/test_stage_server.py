"""The waits of the server, without a network."""

import threading

import pytest
import torch

from dpipe.errors import RunAborted, TransferTimeout
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_server import CallerGone, Session, StageServer
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision

SPEC = FlatSpec((ParameterSpec("layers.0.w", 0, 8, True),), chunk_values=4)


class Caller:
    def __init__(self, *, active: bool = True, seconds: float | None = None) -> None:
        self.active, self.seconds = active, seconds

    def is_active(self) -> bool:
        return self.active

    def time_remaining(self) -> float | None:
        return self.seconds


@pytest.fixture
def stage():
    rule = StepRule(ranks=(3,), weight_decay=0.1, betas=(0.9, 0.95))
    made = StageServer(
        Session("run", 0),
        StageState(SPEC, rule, StageTensors.zeros(8, lossy=False), step=0, num_updates=0),
        None,
    )
    yield made
    made.close(RunAborted("the test is over"))


def test_chunk_is_waited_for_until_it_is_final(stage: StageServer) -> None:
    def push() -> None:
        stage.decide(0, 0, StepDecision(1e-2, 1.0))
        stage.add(0, 0, 0, torch.ones(4))

    threading.Timer(0.05, push).start()
    assert (stage.give(0, 0, 0, Caller(seconds=20)).wire < 0).all()


def test_step_is_committed_when_all_of_it_has_gone_out(stage: StageServer) -> None:
    stage.decide(0, 0, StepDecision(1e-2, 1.0))
    for chunk in range(2):
        stage.add(0, 0, chunk, torch.ones(4))
        stage.give(0, 0, chunk, Caller())
    assert stage.committed(0, Caller(seconds=20)) == 1


def test_step_is_committed_when_its_chunks_went_out_before_a_restart(stage: StageServer) -> None:
    """A worker that has them all asks for none: it only waits for the commit, and must not wait for
    ever.
    """
    stage.decide(0, 0, StepDecision(1e-2, 1.0))
    for chunk in range(2):
        stage.add(0, 0, chunk, torch.ones(4))
    assert stage.committed(0, Caller(seconds=5)) == 1
    assert (stage.state.now.values < 0).all()


def test_server_does_not_wait_for_a_caller_that_is_gone(stage: StageServer) -> None:
    with pytest.raises(CallerGone):
        stage.give(0, 0, 0, Caller(active=False))


def test_caller_learns_in_time_which_ranks_are_missing(stage: StageServer) -> None:
    with pytest.raises(
        TransferTimeout,
        match="chunk 1 of step 0 of stage 0: nothing, or not all, has come from rank 3",
    ):
        stage.give(0, 0, 1, Caller(seconds=0.5))


def test_closed_stage_says_why_to_whoever_waits_or_comes(stage: StageServer) -> None:
    threading.Timer(0.05, lambda: stage.close(RunAborted("taken over"))).start()
    with pytest.raises(RunAborted, match="taken over"):
        stage.norms(0, Caller())
    with pytest.raises(RunAborted, match="taken over"):
        stage.add(0, 0, 0, torch.ones(4))
