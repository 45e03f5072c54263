"""A `Schedule`: what every rank does, in order, as data. No time, no bubble and no buffer in it.

One value feeds the checker, the simulator, the executor, the viewer and the torch baseline.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from dpipe.schedule.action import Action, Op


@dataclass(frozen=True)
class Schedule:
    """`programs[rank]` in order; `rank_of_stage[stage]` says where a stage lives.

    A generator's schedule holds F, B, I and W alone; `lower()` adds communication, reduction and
    step and sets `lowered`. `tied` says that the first and the last stage share a weight, whose
    gradient they exchange.
    """

    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...]
    name: str = ""
    lowered: bool = False
    tied: bool = False

    @cached_property
    def index(self) -> dict[Action, tuple[int, int]]:
        """Where each action is: the rank, and the position in its program."""
        return {a: (r, i) for r, program in enumerate(self.programs) for i, a in enumerate(program)}

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return len(self.programs)

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    def hops(self, stage: int, other: int) -> bool:
        """Whether what goes from `stage` to `other` crosses a link."""
        return self.rank_of_stage[stage] != self.rank_of_stage[other]

    @property
    def splits(self) -> bool:
        """Whether any backward pass is split into I and W."""
        return any(action.op is Op.I for action in self.index)

    def splits_backward(self, stage: int, microbatch: int) -> bool:
        return Action(stage, Op.I, microbatch) in self.index

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """The action that makes the input gradient: I where the backward pass is split, else B."""
        op = Op.I if self.splits_backward(stage, microbatch) else Op.B
        return Action(stage, op, microbatch)

    def tied_partner(self, stage: int) -> int | None:
        """The other end of a tied weight, where it lives on another rank; None where there is
        nothing to exchange.
        """
        ends = (0, self.num_stages - 1)
        if not self.tied or stage not in ends or not self.hops(*ends):
            return None
        return ends[1] if stage == ends[0] else ends[0]

    def requires(self, action: Action) -> tuple[Action, ...]:
        """What must be done before `action` may start, here or on another rank: the one statement
        of dependence.

            F     the stage's input:  F of the stage before, through RECV_F and SEND_F where a link lies between
            B, I  F of the same micro-batch, and the output's gradient: B or I of the next stage, through RECV_B
            W     I of the same micro-batch
            STEP  every gradient of the stage is final, exchanged where tied, reduced where there are replicas

        Communication is named whether or not `lower()` has put it in yet.
        """
        stage = action.stage
        microbatch = action.microbatch
        match action.op:
            case Op.F:
                return (
                    self._input(stage, Op.RECV_F, stage - 1, Op.F, microbatch) if stage > 0 else ()
                )
            case Op.B | Op.I:
                forward = Action(stage, Op.F, microbatch)
                if self.is_last(stage):
                    return (forward,)
                assert microbatch is not None
                later = self.backward_of(stage + 1, microbatch).op
                return (forward, *self._input(stage, Op.RECV_B, stage + 1, later, microbatch))
            case Op.W:
                return (Action(stage, Op.I, microbatch),)
            case Op.SEND_F:
                return (Action(stage, Op.F, microbatch),)
            case Op.RECV_F:
                return (Action(stage - 1, Op.SEND_F, microbatch),)
            case Op.SEND_B:
                assert microbatch is not None
                return (self.backward_of(stage, microbatch),)
            case Op.RECV_B:
                return (Action(stage + 1, Op.SEND_B, microbatch),)
            case Op.SEND_TIED:
                return self.final_gradients(stage)
            case Op.RECV_TIED:
                return (Action(self.num_stages - 1 - stage, Op.SEND_TIED),)
            case Op.REDUCE_GRAD:
                return self._agreed_gradients(stage)
            case Op.STEP:
                reduce = Action(stage, Op.REDUCE_GRAD)
                return (reduce,) if reduce in self.index else self._agreed_gradients(stage)
        assert_never(action.op)

    def final_gradients(self, stage: int) -> tuple[Action, ...]:
        """The actions after which the weight gradients of `stage` are complete: B or W of every
        micro-batch.
        """
        return tuple(
            Action(stage, Op.W if self.splits_backward(stage, m) else Op.B, m)
            for m in range(self.num_microbatches)
        )

    def _input(
        self, stage: int, recv: Op, source: int, made_by: Op, microbatch: int | None
    ) -> tuple[Action, ...]:
        if self.hops(source, stage):
            return (Action(stage, recv, microbatch),)
        return (Action(source, made_by, microbatch),)

    def _agreed_gradients(self, stage: int) -> tuple[Action, ...]:
        if self.tied_partner(stage) is None:
            return self.final_gradients(stage)
        return (*self.final_gradients(stage), Action(stage, Op.RECV_TIED))
