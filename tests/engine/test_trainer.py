"""The training loop of a whole run in this process."""

from collections.abc import Callable
from pathlib import Path

from dpipe.config.load import Config
from dpipe.report.trace import load_trace
from dpipe.schedule.action import Op
from dpipe.timeline.span import Lane, Timeline


def parts_of(timeline: Timeline) -> set[tuple[int, Lane, str]]:
    """The actions of each rank, without its waits."""
    spans = [span for span in timeline.spans if span.lane is not Lane.WAIT]
    return {(span.rank, span.lane, str(span.action)) for span in spans}


def waits_for_vote(timeline: Timeline, rank: int) -> bool:
    """Whether `rank` waits at VOTE for more than its own messages, which have to leave first."""
    waits = [span for span in timeline.on(rank, Lane.WAIT) if span.action.op is Op.VOTE]
    sent_us = [span.end_us for span in timeline.on(rank, Lane.SEND)]
    return any(wait.end_us not in sent_us for wait in waits)


def test_measured_and_predicted_step_have_the_same_parts(
    tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    config = tiny(pipeline__stages=2, run__trace_steps=1)
    assert config.train.waits_for_verdict
    losses(config)
    trace = load_trace(Path(config.run.folder))
    _, _, measured = trace.steps[-1]
    assert parts_of(measured) == parts_of(trace.predicted)
    assert (1, Lane.UPDATE, "1VOTE") in parts_of(measured)
    assert waits_for_vote(measured, rank=1)
    assert waits_for_vote(trace.predicted, rank=1)


def test_run_that_needs_no_vote_is_predicted_without_one(
    tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    config = tiny(pipeline__stages=2, train__clip_norm=0.0, run__trace_steps=1)
    losses(config)
    predicted = load_trace(Path(config.run.folder)).predicted
    assert not waits_for_vote(predicted, rank=0)
    assert not waits_for_vote(predicted, rank=1)
