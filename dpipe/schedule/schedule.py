"""A `Schedule`: what every rank does, in order, as data. No time, no bubble and no buffer in it.

One value feeds the checker, the simulator, the executor, the viewer and the torch baseline.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import assert_never

from dpipe.schedule.action import BACKWARD, Action, Op


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

    @cached_property
    def trains(self) -> bool:
        """Whether there is a backward pass; a schedule without one is for evaluation."""
        return any(action.op in BACKWARD for action in self.index)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]

    def of_rank(self, rank: int, op: Op) -> Action:
        """The action of a whole rank: `op` is one of `PER_RANK`."""
        return Action(self.rank_of_stage.index(rank), op)

    def vote_and_steps(self, rank: int) -> tuple[Action, ...]:
        """The end of the program of `rank`: VOTE, then all that changes what lasts, its STEPs."""
        return tuple(a for a in self.programs[rank] if a.op in (Op.VOTE, Op.STEP))

    @property
    def tied_within_rank(self) -> bool:
        """Whether both ends of a tied weight live on one rank."""
        return self.tied and not self.hops(0, self.num_stages - 1)

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

            F            the stage's input: F of the stage before, through SEND_F and RECV_F where
                         a link lies between
            B, I         F of the same micro-batch, and the output's gradient: B or I of the next
                         stage, through SEND_B and RECV_B
            W            I of the same micro-batch
            COMPLETE     all gradients of the stage; of a tied weight the other end's, too
            REDUCE_GRAD  COMPLETE of the stage
            AGREE        REDUCE_GRAD of each stage of the rank
            VOTE         AGREE where there are replicas, else COMPLETE of each stage of the rank
            STEP         VOTE of the rank

        Messages are named whether or not `lower()` has put them in yet; COMPLETE, AGREE and VOTE
        where they are in, else what they would wait for.
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
            case Op.COMPLETE:
                return self._summed_gradients(stage)
            case Op.REDUCE_GRAD:
                return self._complete(stage)
            case Op.AGREE:
                return self._reduced(self.rank_of_stage[stage])
            case Op.VOTE:
                return self._agreed(self.rank_of_stage[stage])
            case Op.STEP:
                rank = self.rank_of_stage[stage]
                return self._present(self.of_rank(rank, Op.VOTE)) or self._agreed(rank)
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

    def _present(self, *actions: Action) -> tuple[Action, ...]:
        return tuple(action for action in actions if action in self.index)

    def _agreed(self, rank: int) -> tuple[Action, ...]:
        """After these the gradients of all stages of `rank` are what its step will use."""
        agree = self._present(self.of_rank(rank, Op.AGREE))
        if agree:
            return agree
        stages = self.stages_of(rank)
        return self._reduced(rank) or tuple(chain(*(self._complete(stage) for stage in stages)))

    def _reduced(self, rank: int) -> tuple[Action, ...]:
        return self._present(*(Action(stage, Op.REDUCE_GRAD) for stage in self.stages_of(rank)))

    def _complete(self, stage: int) -> tuple[Action, ...]:
        """The gradients of a weight that is tied within the rank are added at COMPLETE of the last
        stage.
        """
        last = self.num_stages - 1
        end = last if self.tied_within_rank and stage == 0 else stage
        return self._present(Action(end, Op.COMPLETE)) or self._summed_gradients(stage)

    def _summed_gradients(self, stage: int) -> tuple[Action, ...]:
        gradients = self.final_gradients(stage)
        if self.tied_partner(stage) is not None:
            return (*gradients, Action(stage, Op.RECV_TIED))
        if self.tied_within_rank and stage == self.num_stages - 1 and stage > 0:
            return (*gradients, *self._present(Action(0, Op.COMPLETE)))
        return gradients
