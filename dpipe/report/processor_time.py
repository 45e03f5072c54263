"""Where the processor time of a rank's steps went: what a prediction on shared cores starts from.

    the rank's own thread   [F][B] ...  [VOTE][STEP] [between]   spans have their own
                            the rest: Python's, ahead of each computation
    its other threads       what its tensor-parallel group exchanges, in TENSOR spans
                            the rest: messages, a part for each end of one and a part for its bytes

A message is everything that one process tells another: tensors between stages, gradients between
replicas, ballots and verdicts. Nobody can see in a thread of gRPC for which of them it runs, so
that the two parts of a message are what explains the ranks' sums best: ranks in the middle of a
pipeline have twice as many messages as those at its ends.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dpipe.schedule.action import COMPUTE, Op
from dpipe.timeline.span import Lane, Span
from dpipe.timeline.votes import COORDINATOR

_MOVED = (Lane.SEND, Lane.RECV, Lane.REDUCE)
_BALLOT_AND_VERDICT = 2


@dataclass(frozen=True)
class StepCpu:
    """Processor time of one rank in a step, microseconds."""

    own_us: float  # of the thread that trains
    others_us: float  # of the process's other threads

    def since(self, began: "StepCpu") -> "StepCpu":
        return StepCpu(self.own_us - began.own_us, self.others_us - began.others_us)


def cpu_now() -> StepCpu:
    """So far, by the thread that asks and by all others of its process."""
    own_ns = time.thread_time_ns()
    others_ns = time.process_time_ns() - own_ns
    return StepCpu(own_ns / 1e3, others_ns / 1e3)


@dataclass(frozen=True)
class MessageCpu:
    """Processor time at either end of a message."""

    message_us: float  # of any
    us_per_mb: float  # of a megabyte


@dataclass(frozen=True)
class Ends:
    """The messages of a rank in a step, counted at its end, and what its threads did for them."""

    count: int
    megabytes: float
    cpu_us: float


def ends_of(rank: int, num_ranks: int, spans: Sequence[Span], cpu: StepCpu) -> Ends:
    """Of the messages in `spans`, which are those of one step of `rank`, and of its vote."""
    moved = [span for span in spans if span.lane in _MOVED]
    votes = _BALLOT_AND_VERDICT
    if rank == COORDINATOR:
        # Whoever counts the ballots is in this process.
        votes += _BALLOT_AND_VERDICT * num_ranks
    megabytes = sum(span.num_bytes for span in moved) / 1e6
    exchanged_us = sum(span.cpu_us for span in spans if span.lane is Lane.TENSOR)
    return Ends(len(moved) + votes, megabytes, max(0.0, cpu.others_us - exchanged_us))


def message_cpu(ends: Sequence[Ends]) -> MessageCpu:
    """What explains the processor time of all `ends` best: by least squares, neither below zero."""
    squares = sum(end.count**2 for end in ends)
    mixed = sum(end.count * end.megabytes for end in ends)
    mb_squares = sum(end.megabytes**2 for end in ends)
    by_count = sum(end.count * end.cpu_us for end in ends)
    by_mb = sum(end.megabytes * end.cpu_us for end in ends)
    determinant = squares * mb_squares - mixed**2
    # All ranks alike: the two parts cannot be told apart, and one number says as much.
    if determinant > 1e-6 * squares * mb_squares:
        message_us = (by_count * mb_squares - by_mb * mixed) / determinant
        us_per_mb = (by_mb * squares - by_count * mixed) / determinant
        if message_us >= 0 and us_per_mb >= 0:
            return MessageCpu(message_us, us_per_mb)
        if message_us < 0:
            return MessageCpu(0.0, by_mb / mb_squares)
    return MessageCpu(by_count / squares, 0.0)


def python_us(spans: Sequence[Span], cpu: StepCpu) -> float:
    """Of a rank's own thread ahead of each computation of a step: what no span has, shared out."""
    in_spans_us = sum(span.cpu_us for span in spans if _is_own(span))
    computations = sum(span.lane is Lane.COMPUTE for span in spans)
    return max(0.0, cpu.own_us - in_spans_us) / max(1, computations)


def between_us(spans: Sequence[Span]) -> float:
    return sum(span.cpu_us for span in spans if span.lane is Lane.BETWEEN)


def in_vote(span: Span) -> bool:
    """Whether its processor time belongs to the vote, or the update, of its action."""
    # A tensor-parallel group exchanges there, too; a ballot is written in the wait for a verdict.
    exchanges = span.lane is Lane.TENSOR and span.action.op not in COMPUTE
    return exchanges or _casts_ballot(span)


def _casts_ballot(span: Span) -> bool:
    return span.lane is Lane.WAIT and span.action.op is Op.VOTE


def _is_own(span: Span) -> bool:
    return span.lane in (Lane.COMPUTE, Lane.UPDATE, Lane.BETWEEN) or _casts_ballot(span)
