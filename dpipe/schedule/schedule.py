"""A `Schedule`: what every rank does, in order, as data. No time, no bubble and no buffer in it.

One value feeds the checker, the simulator, the executor, the viewer and the torch baseline.
"""

from dataclasses import dataclass
from functools import cached_property

from dpipe.schedule.action import BACKWARD, COMPUTE, RECVS, SENDS, Action, Op

Needs = tuple[Action, ...]


def backward_piece(turn: int, num_slices: int) -> int:
    """What a stage's backward pass number `turn` is of: micro-batches in order, the slices of each
    from the last to the first.

        num_slices = 3:    turn   0 1 2   3 4 5
                           piece  2 1 0   5 4 3
    """
    # The pieces of earlier micro-batches are all done.
    done = turn % num_slices
    first = turn - done
    last = first + num_slices - 1
    return last - done


@dataclass(frozen=True)
class Schedule:
    """`programs[rank]` in order; `rank_of_stage[stage]` says where a stage lives.

    A generator's schedule holds F, B, I and W alone; `lower()` adds communication and the end of
    the step, and sets `lowered`. `tied` says that the first and the last stage share a weight,
    whose gradient they exchange. Of the first `frozen` stages nothing learns: no gradient is sent
    to them, and a B of theirs only forgets.

    With `num_slices` the sequences of a micro-batch are cut into as many slices, which follow each
    other through the stages (Sun et al. 2024, Seq1F1B). An action's number is then that of a slice:
    slice s of micro-batch m is m * num_slices + s.

    With `num_versions` = 2 the weights have two versions, so that steps overlap: see
    `two_versions.py`. A number of `num_pieces` or more is the next step's.
    """

    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...]
    name: str = ""
    lowered: bool = False
    tied: bool = False
    frozen: int = 0
    num_slices: int = 1
    num_versions: int = 1

    @cached_property
    def index(self) -> dict[Action, tuple[int, int]]:
        """Where each action is: the rank, and the position in its program."""
        places = {}
        for rank, program in enumerate(self.programs):
            for position, action in enumerate(program):
                places[action] = rank, position
        return places

    @property
    def num_pieces(self) -> int:
        """Micro-batches or, where sequences are cut, slices of them: what actions number."""
        return self.num_microbatches * self.num_slices

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def runs_ahead(self) -> bool:
        """Whether programs have actions of the next step."""
        return self.num_versions > 1

    def in_its_step(self, action: Action) -> tuple[Action, int]:
        """`action` as its own step numbers it, and how many steps ahead of the program that is."""
        number = action.microbatch
        if number is None or number < self.num_pieces:
            return action, 0
        own = Action(action.stage, action.op, number - self.num_pieces)
        return own, 1

    @property
    def num_ranks(self) -> int:
        return len(self.programs)

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    def hops(self, stage: int, other: int) -> bool:
        """Whether what goes from `stage` to `other` crosses a link."""
        rank = self.rank_of_stage[stage]
        return self.rank_of_stage[other] != rank

    @cached_property
    def trains(self) -> bool:
        """Whether there is a backward pass; a schedule without one is for evaluation."""
        # What opens a step may be forwards alone.
        if self.runs_ahead:
            return True
        ops = {action.op for action in self.index}
        return not ops.isdisjoint(BACKWARD)

    def takes_gradient(self, stage: int) -> bool:
        """Whether the next stage sends `stage` the gradient of its output."""
        learns = stage >= self.frozen
        return learns and not self.is_last(stage)

    def passes_back(self, stage: int) -> bool:
        """Whether the stage before `stage` needs the gradient of what it has passed on."""
        return stage > self.frozen

    @property
    def splits(self) -> bool:
        """Whether any backward pass is split into I and W."""
        return any(action.op is Op.I for action in self.index)

    def splits_backward(self, stage: int, microbatch: int) -> bool:
        return Action(stage, Op.I, microbatch) in self.index

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """The action that makes the input gradient: I where the backward pass is split, else B."""
        is_split = self.splits_backward(stage, microbatch)
        op = Op.I if is_split else Op.B
        return Action(stage, op, microbatch)

    def stages_of(self, rank: int) -> list[int]:
        stages = []
        for stage, owner in enumerate(self.rank_of_stage):
            if owner == rank:
                stages.append(stage)
        return stages

    def of_rank(self, rank: int, op: Op) -> Action:
        """The action of a whole rank: `op` is one of `PER_RANK`."""
        first = self.rank_of_stage.index(rank)
        return Action(first, op)

    def vote_and_steps(self, rank: int) -> tuple[Action, ...]:
        """The end of the program of `rank`: VOTE, then its STEPs, which alone change what lasts."""
        program = self.programs[rank]
        ops = (Op.VOTE, Op.STEP)
        return tuple(action for action in program if action.op in ops)

    @property
    def tied_within_rank(self) -> bool:
        """Whether both ends of a tied weight live on one rank."""
        return self.tied and not self.hops(0, self.num_stages - 1)

    def tied_partner(self, stage: int) -> int | None:
        """The other end of a tied weight, where it lives on another rank; None where there is
        nothing to exchange.
        """
        last = self.num_stages - 1
        if not self.tied or not self.hops(0, last):
            return None
        return {0: last, last: 0}.get(stage)

    def requires(self, action: Action) -> Needs:
        """What must be done before `action` may start, here or on another rank: the one statement
        of dependence.

            F            the stage's input: F of the stage before, through SEND_F and RECV_F where
                         a link lies between; and F of the slice before it
            B, I         F of the same micro-batch, and the output's gradient: B or I of the next
                         stage, through SEND_B and RECV_B, and the same of the slice behind it,
                         whose attention gives gradients to this one's keys and values; of a
                         frozen stage F alone
            W            I of the same micro-batch
            SEND, RECV   what makes the message; its send
            COMPLETE     all gradients of the stage; of a tied weight the other end's, too
            REDUCE_GRAD  COMPLETE of the stage
            AGREE        REDUCE_GRAD of each stage of the rank
            VOTE         AGREE where there are replicas, else COMPLETE of each stage of the rank
            STEP         VOTE of the rank

        Messages are named whether or not `lower()` has put them in yet; COMPLETE, AGREE and VOTE
        where they are in, else what they would wait for.
        """
        own, ahead = self.in_its_step(action)
        if ahead:
            needs = self.requires(own)
            return tuple(self._later(need) for need in needs)
        if action.op in COMPUTE:
            return self._needs_of_compute(action)
        if action.op in SENDS:
            return self._needs_of_send(action)
        if action.op in RECVS:
            return (self._send_of(action),)
        return self._needs_of_end(action)

    def _later(self, action: Action) -> Action:
        """The same of the next step."""
        assert action.microbatch is not None
        return action._replace(microbatch=action.microbatch + self.num_pieces)

    def final_gradients(self, stage: int) -> Needs:
        """The actions after which the weight gradients of `stage` are complete: B or W of every
        micro-batch.
        """
        needs = []
        for microbatch in range(self.num_pieces):
            is_split = self.splits_backward(stage, microbatch)
            op = Op.W if is_split else Op.B
            needs.append(Action(stage, op, microbatch))
        return tuple(needs)

    def _needs_of_compute(self, action: Action) -> Needs:
        stage, op, microbatch = action
        assert microbatch is not None
        if op is Op.W:
            input_gradient = Action(stage, Op.I, microbatch)
            return (input_gradient,)
        if op is Op.F:
            activation = self._input_of(stage, microbatch)
            return activation + self._slice_before(action)
        forward = Action(stage, Op.F, microbatch)
        later_slice = self._slice_behind(stage, microbatch)
        if not self.takes_gradient(stage):
            return (forward, *later_slice)
        later = self.backward_of(stage + 1, microbatch)
        receive = Action(stage, Op.RECV_B, microbatch)
        gradient = self._through(later, receive)
        # In this order: the executor takes the second.
        return (forward, gradient, *later_slice)

    def _input_of(self, stage: int, microbatch: int) -> Needs:
        if stage == 0:
            return ()
        before = Action(stage - 1, Op.F, microbatch)
        receive = Action(stage, Op.RECV_F, microbatch)
        activation = self._through(before, receive)
        return (activation,)

    def _slice_before(self, forward: Action) -> Needs:
        stage, op, piece = forward
        assert piece is not None
        if piece % self.num_slices == 0:
            return ()
        before = Action(stage, op, piece - 1)
        return (before,)

    def _slice_behind(self, stage: int, microbatch: int) -> Needs:
        behind = microbatch + 1
        if behind % self.num_slices == 0:
            return ()
        backward = self.backward_of(stage, behind)
        return (backward,)

    def _needs_of_send(self, send: Action) -> Needs:
        stage, op, microbatch = send
        if op is Op.SEND_TIED:
            return self.final_gradients(stage)
        if op is Op.SEND_F:
            forward = Action(stage, Op.F, microbatch)
            return (forward,)
        assert microbatch is not None
        backward = self.backward_of(stage, microbatch)
        return (backward,)

    def _send_of(self, receive: Action) -> Action:
        stage, op, microbatch = receive
        if op is Op.RECV_TIED:
            other_end = self.num_stages - 1 - stage
            return Action(other_end, Op.SEND_TIED)
        if op is Op.RECV_F:
            return Action(stage - 1, Op.SEND_F, microbatch)
        return Action(stage + 1, Op.SEND_B, microbatch)

    def _needs_of_end(self, action: Action) -> Needs:
        rank = self.rank_of_stage[action.stage]
        if action.op is Op.COMPLETE:
            return self._all_gradients(action.stage)
        if action.op is Op.REDUCE_GRAD:
            return self._completed(action.stage)
        if action.op is Op.AGREE:
            return self._reduced(rank)
        if action.op is Op.VOTE:
            return self._agreed(rank)
        assert action.op is Op.STEP
        vote = self.of_rank(rank, Op.VOTE)
        return self._present([vote]) or self._agreed(rank)

    def _through(self, source: Action, receive: Action) -> Action:
        """`receive`, where a link lies between its stage and that of `source`."""
        if self.hops(source.stage, receive.stage):
            return receive
        return source

    def _present(self, actions: list[Action]) -> Needs:
        return tuple(action for action in actions if action in self.index)

    def _agreed(self, rank: int) -> Needs:
        """After these the gradients of all stages of `rank` are what its step will use."""
        agree = self.of_rank(rank, Op.AGREE)
        agreed = self._present([agree]) or self._reduced(rank)
        if agreed:
            return agreed
        completed: list[Action] = []
        for stage in self.stages_of(rank):
            completed += self._completed(stage)
        return tuple(completed)

    def _reduced(self, rank: int) -> Needs:
        stages = self.stages_of(rank)
        exchanges = [Action(stage, Op.REDUCE_GRAD) for stage in stages]
        return self._present(exchanges)

    def _completed(self, stage: int) -> Needs:
        """The gradients of a weight that is tied within the rank are added at COMPLETE of the last
        stage.
        """
        end = stage
        if self.tied_within_rank and stage == 0:
            end = self.num_stages - 1
        complete = Action(end, Op.COMPLETE)
        return self._present([complete]) or self._all_gradients(stage)

    def _all_gradients(self, stage: int) -> Needs:
        gradients = self.final_gradients(stage)
        if self.tied_partner(stage) is not None:
            receive = Action(stage, Op.RECV_TIED)
            return (*gradients, receive)
        # It adds the first stage's gradient to its own, and so is complete behind that.
        if self.tied_within_rank and self.is_last(stage) and stage > 0:
            first = Action(0, Op.COMPLETE)
            return gradients + self._present([first])
        return gradients
