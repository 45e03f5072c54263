"""The alphabet of a schedule: one thing a rank does, in text form such as `2F0` or `1SEND_B3`.

The text form is the one of `torch.distributed.pipelining`, so that its CSV files and ours are the
same.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from dpipe.errors import ScheduleError


class Op(StrEnum):
    """What is done: for each micro-batch (F, B, I, W and their messages), once a stage, or once a
    rank (AGREE, VOTE).
    """

    F = "F"  # forward
    B = "B"  # backward: input and weight gradients together
    I = "I"  # backward, input gradient only  # noqa: E741 - the literature's letter
    W = "W"  # backward, weight gradient only
    SEND_F = "SEND_F"  # the output of this stage to the next
    RECV_F = "RECV_F"  # the input of this stage from the one before
    SEND_B = "SEND_B"  # the input gradient of this stage to the one before
    RECV_B = "RECV_B"  # the output gradient of this stage from the next
    SEND_TIED = "SEND_TIED"  # the gradient of a weight that first and last stage share: this end's
    RECV_TIED = "RECV_TIED"  # and the other end's
    COMPLETE = "COMPLETE"  # add what other ranks have made of this stage's gradients
    REDUCE_GRAD = "REDUCE_GRAD"  # begin to exchange this stage's gradients with its replicas
    AGREE = "AGREE"  # wait until the replicas of all stages of this rank have exchanged theirs
    VOTE = "VOTE"  # tell all ranks of this step, and where the update needs it, hear from them
    STEP = "STEP"  # optimizer step of this stage


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARD = frozenset({Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.SEND_TIED})
RECVS = frozenset({Op.RECV_F, Op.RECV_B, Op.RECV_TIED})
TIED = frozenset({Op.SEND_TIED, Op.RECV_TIED})
PER_MICROBATCH = COMPUTE | {Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B}
PER_RANK = frozenset({Op.AGREE, Op.VOTE})

_OPS = "|".join(sorted(Op, key=len, reverse=True))
_TEXT = re.compile(rf"(\d{{1,9}})({_OPS})(\d{{0,9}})")


class Action(NamedTuple):
    """`op` of `stage` for `microbatch`, which is None for what is done once a step. An action of a
    whole rank (`PER_RANK`) has the rank's first stage.
    """

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


def parse_action(text: str) -> Action:
    """Read `2F0`; raises `ScheduleError` on anything else."""
    match = _TEXT.fullmatch(text.strip())
    if match is not None:
        stage = int(match[1])
        op = Op(match[2])
        microbatch = int(match[3]) if match[3] else None
        if (microbatch is not None) == (op in PER_MICROBATCH):
            return Action(stage, op, microbatch)
    raise ScheduleError(f"{text!r:.100} is not an action; one looks like 2F0, 1SEND_B3 or 0STEP")
