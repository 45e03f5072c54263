"""How much a rank holds at the worst moment of a step: a schedule walked action by action, as
`simulate` does for time.

    F     layers first to last: each leaves what its backward needs, and needs some working memory
    B     layers last to first: each works, gives back what it had left, and has made the gradients
          of its parameters
    I     as B, but what the weight gradients need stays until W
    STEP  the optimizer works

What the schedule holds is read from its programs, so it is its own peak in flight, and no formula
for one schedule. Not counted: what the process needs anyway, and what links buffer
(`transport.buffer_bytes` bounds it).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpipe.errors import ScheduleError
from dpipe.schedule.action import Action, Op
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.two_versions import opening


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer. What is not said to be held is working memory, on top of what is held at
    the worst moment of an action.
    """

    parameter_bytes: int = 0  # as they are stored
    frozen_bytes: int = 0  # of parameters that do not learn
    gradient_bytes: int = 0  # that add up over a step's micro-batches
    optimizer_bytes: int = 0  # of its state, such as AdamW's two moments
    held_bytes: int = 0  # that one micro-batch leaves from F to B, or I
    deferred_bytes: int = 0  # that it leaves from I to W; with none, I does all that B does
    forward_bytes: int = 0  # working memory of F
    backward_bytes: int = 0  # of B
    first_bytes: int = 0  # more in the first B of a step, whose gradients stay as they are made
    input_bytes: int = 0  # of I
    weight_bytes: int = 0  # of W
    first_weight_bytes: int = 0  # of the first W of a step, beside the gradients
    update_bytes: int = 0  # of the optimizer
    # The gradient that a stage's end gets in B and I. It is held until the stage is done, as the
    # stage's output is; while this layer works, both are in its working memory.
    given_bytes: int = 0
    # Of a whole micro-batch whose sequences are cut into slices: keys and values, from the first
    # slice's F to its B; and their gradients, from the last slice's B to the first one's.
    sequence_bytes: int = 0
    shared_bytes: int = 0  # that the layers of a stage have together, always
    keeps_given: bool = False  # whether that gradient is among what is deferred
    exchange_bytes: int = 0  # buffers of the exchange with replicas, held always
    # Copies of the parameters in half precision that it computes with, beside their masters; as
    # much again are their gradients, until they are added to the masters' behind each backward.
    rounded_bytes: int = 0
    within: "LayerMemory | None" = None  # the same where its stage has a layer behind it


StageMemory = Sequence[LayerMemory]


@dataclass(frozen=True)
class RankMemory:
    """What a rank holds at its worst moment, in bytes, by kind."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    exchange: int = 0

    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.working
            + self.exchange
        )


def peak_memory(
    schedule: Schedule,
    stages: Sequence[StageMemory],
    *,
    keeps_gradients: bool = False,
) -> tuple[RankMemory, ...]:
    """By rank, the moment of a step at which it holds most; `stages[s]` are the layers of stage s.

    Gradients appear with the first backward of a step, unless `keeps_gradients` says that they have
    buffers of their own. Raises `ScheduleError` where the stages are not as many as the schedule's.
    """
    if len(stages) != schedule.num_stages:
        raise ScheduleError(
            f"the schedule has {schedule.num_stages} stages, the memory {len(stages)}"
        )
    worst = []
    for rank, program in enumerate(schedule.programs):
        begun: tuple[Action, ...] = ()
        if schedule.runs_ahead:
            begun = opening(schedule).programs[rank]
        walk = _Walk(schedule, stages, rank, keeps_gradients)
        worst.append(walk.worst((*begun, *program)))
    return tuple(worst)


class _Walk:
    """One rank through its program: what it holds now, and what it held when it held most."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageMemory],
        rank: int,
        keeps_gradients: bool,
    ) -> None:
        own = [stages[stage] for stage in schedule.stages_of(rank)]
        # Such as masks: they are made once, and not given back.
        shared = [_shared(stage) for stage in own]
        self._schedule = schedule
        self._stages = stages
        self._keeps_gradients = keeps_gradients
        # Layers whose gradients are not with their masters yet: stage, index in it, layer.
        self._rounded: list[tuple[int, int, LayerMemory]] = []
        # Layers that have gradients: stage, index in it, of this step (0) or the next (1).
        self._made: set[tuple[int, int, int]] = set()
        self._ahead = 0
        parameters = ("parameter_bytes", "frozen_bytes", "rounded_bytes")
        self._now = RankMemory(
            parameters=schedule.num_versions * sum(_total(own, kind) for kind in parameters),
            gradients=_total(own, "gradient_bytes") if keeps_gradients else 0,
            optimizer=_total(own, "optimizer_bytes"),
            activations=sum(shared),
            working=0,
            exchange=_total(own, "exchange_bytes"),
        )
        # Of one layer: the optimizer works on one parameter after the other.
        self._update = 0
        for stage in own:
            for layer in stage:
                self._update = max(self._update, layer.update_bytes)
        self._worst = self._now

    def worst(self, program: Sequence[Action]) -> RankMemory:
        for action in program:
            self._do(action)
        # Behind the last action: no micro-batch is held then.
        self._see(self._update)
        return self._worst

    def _do(self, action: Action) -> None:
        _, self._ahead = self._schedule.in_its_step(action)
        layers = self._stages[action.stage]
        self._begin_slice(action, layers)
        self._compute(action, layers)
        self._end_slice(action, layers)

    def _compute(self, action: Action, layers: StageMemory) -> None:
        if action.op is Op.F:
            for layer in layers:
                # In this order: a peak in forward is above what the layer holds at its end.
                self._hold(layer.held_bytes)
                self._see(layer.forward_bytes)
        elif action.op in (Op.B, Op.I):
            # What `with_ends` has put behind the layers: the output and its gradient. The model's
            # last stage has none.
            end = layers[-1] if layers[-1].given_bytes else LayerMemory()
            kept = action.op is Op.I and any(layer.keeps_given for layer in layers[-2:-1])
            ends = end.held_bytes
            if not kept:  # else it is counted with what is deferred
                ends += end.given_bytes
            for place in reversed(range(len(layers))):
                self._backward(action, place, layers[place])
                # Held from here: while the last layer worked, they were in its working memory.
                if place == len(layers) - 2:
                    self._hold(ends)
            self._hold(-ends)
            self._collect()
        elif action.op is Op.W:
            for place in reversed(range(len(layers))):
                layer = layers[place]
                if layer.deferred_bytes:
                    first = self._make_gradients(action.stage, place, layer)
                    self._see(layer.first_weight_bytes if first else layer.weight_bytes)
            # Together: the factors of a micro-batch are in one list until all are made.
            self._hold(-sum(layer.deferred_bytes for layer in layers))
            self._collect()

    def _begin_slice(self, action: Action, layers: StageMemory) -> None:
        """Make room for keys and values in the first F of a micro-batch, and for their gradients in
        its first B.
        """
        number = self._slice(action)
        # Backward goes from the last slice to the first.
        last = self._schedule.num_slices - 1
        first_of = {Op.F: 0, Op.B: last, Op.I: last}
        if number == first_of.get(action.op):
            more = _of_sequence(layers)
            self._hold(more)

    def _end_slice(self, action: Action, layers: StageMemory) -> None:
        """Both are free behind the last B, which is of the first slice."""
        is_backward = action.op in (Op.B, Op.I)
        if is_backward and self._slice(action) == 0:
            both = 2 * _of_sequence(layers)
            self._hold(-both)

    def _slice(self, action: Action) -> int | None:
        if action.microbatch is None:
            return None
        num_slices = self._schedule.num_slices
        return action.microbatch % num_slices

    def _backward(
        self,
        action: Action,
        place: int,
        layer: LayerMemory,
    ) -> None:
        whole = action.op is Op.B or layer.deferred_bytes == 0
        if not whole:
            self._see(layer.input_bytes)
            self._hold(layer.deferred_bytes - layer.held_bytes)
            return
        made = action.stage, place, self._ahead
        first = made not in self._made and not self._keeps_gradients
        working = layer.backward_bytes
        if first:
            working += layer.first_bytes
        self._see(working)
        self._hold(-layer.held_bytes)
        self._make_gradients(action.stage, place, layer)

    def _make_gradients(
        self,
        stage: int,
        place: int,
        layer: LayerMemory,
    ) -> bool:
        """Whether they are the first of the step; of parameters in half precision they stay beside
        the masters'.
        """
        if not layer.rounded_bytes:
            return self._have_gradients(stage, place, layer)
        self._hold(layer.rounded_bytes)
        self._rounded.append((stage, place, layer))
        return False

    def _collect(self) -> None:
        """One after the other they go to the masters' gradients."""
        for stage, place, layer in self._rounded:
            self._have_gradients(stage, place, layer)
            self._hold(-layer.rounded_bytes)
            self._see(0)
        self._rounded.clear()

    def _have_gradients(
        self,
        stage: int,
        place: int,
        layer: LayerMemory,
    ) -> bool:
        """Allocate them where this is the first micro-batch of a step to give it any; whether it
        was.
        """
        made = stage, place, self._ahead
        if self._keeps_gradients or made in self._made:
            return False
        self._made.add(made)
        gradients = self._now.gradients + layer.gradient_bytes
        self._now = replace(self._now, gradients=gradients)
        return True

    def _hold(self, more: int) -> None:
        self._now = replace(
            self._now,
            activations=self._now.activations + more,
        )

    def _see(self, working: int) -> None:
        if self._now.total + working > self._worst.total:
            self._worst = replace(self._now, working=working)


def _shared(layers: StageMemory) -> int:
    # Equal in all layers that use it, and 0 in the others.
    sizes = [layer.shared_bytes for layer in layers]
    return max(sizes)


def _of_sequence(layers: StageMemory) -> int:
    # Keys and values of an attention, or their gradients: as much again.
    sizes = [layer.sequence_bytes for layer in layers]
    return sum(sizes)


def _total(stages: Sequence[StageMemory], kind: str) -> int:
    return sum(getattr(layer, kind) for stage in stages for layer in stage)
