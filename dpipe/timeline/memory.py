"""How much a rank holds at the worst moment of a step: a schedule walked action by action, as
`simulate` does for time.

    F     layers first to last: each leaves what its backward needs, and needs some working memory while it runs
    B     layers last to first: each works, gives back what it had left, and has made its parameters' gradients
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


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer. `held_bytes` is what one micro-batch leaves from F to B, `deferred_bytes`
    from I to W; what defers nothing does in I what it does in B.

    The others are working memory on top of that at the worst moment: of F, of B (`first_bytes` more
    in the first of a step, whose gradients stay as they are made), of I, of W (`first_weight_bytes`
    in the first, beside the gradients), and of the optimizer. `given_bytes`, of a stage's end, is
    the gradient that it is given in B and I, and holds until it is done, as it does its output;
    that a layer has both while it works is in the layer's working memory, and a layer that
    `keeps_given` has the gradient among what it defers. `within` is the layer where another one of
    its stage is behind it, if that differs. `exchange_bytes` are what replicas agree with, always.
    `rounded_bytes` are the copies of its parameters in half precision that it computes with, beside
    their masters, and as much again the gradients of those, from when they are made until the
    backward pass is done and they are added to the masters'.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    held_bytes: int = 0
    deferred_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    first_bytes: int = 0
    input_bytes: int = 0
    weight_bytes: int = 0
    first_weight_bytes: int = 0
    update_bytes: int = 0
    given_bytes: int = 0
    keeps_given: bool = False
    exchange_bytes: int = 0
    rounded_bytes: int = 0
    within: "LayerMemory | None" = None


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
    schedule: Schedule, stages: Sequence[StageMemory], *, keeps_gradients: bool = False
) -> tuple[RankMemory, ...]:
    """By rank, the moment of a step at which it holds most; `stages[s]` are the layers of stage s.

    Gradients appear with the first backward of a step, unless `keeps_gradients` says that they have
    buffers of their own. Raises `ScheduleError` where the stages are not as many as the schedule's.
    """
    if len(stages) != schedule.num_stages:
        raise ScheduleError(
            f"the schedule has {schedule.num_stages} stages, the memory {len(stages)}"
        )
    return tuple(
        _Walk(schedule, stages, rank, keeps_gradients).worst(program)
        for rank, program in enumerate(schedule.programs)
    )


class _Walk:
    """One rank through its program: what it holds now, and what it held when it held most."""

    def __init__(
        self, schedule: Schedule, stages: Sequence[StageMemory], rank: int, keeps_gradients: bool
    ) -> None:
        own = [
            stage
            for stage, owner in zip(stages, schedule.rank_of_stage, strict=True)
            if owner == rank
        ]
        self._stages = stages
        self._keeps_gradients = keeps_gradients
        self._rounded: list[
            tuple[int, int, LayerMemory]
        ] = []  # whose gradients are not with their masters yet
        self._made: set[tuple[int, int]] = (
            set()
        )  # the layers, by stage and place in it, that have gradients
        self._now = RankMemory(
            parameters=_total(own, "parameter_bytes") + _total(own, "rounded_bytes"),
            gradients=_total(own, "gradient_bytes") if keeps_gradients else 0,
            optimizer=_total(own, "optimizer_bytes"),
            activations=0,
            working=0,
            exchange=_total(own, "exchange_bytes"),
        )
        self._update = max((layer.update_bytes for stage in own for layer in stage), default=0)
        self._worst = self._now

    def worst(self, program: Sequence[Action]) -> RankMemory:
        for action in program:
            self._do(action)
        self._see(self._update)
        return self._worst

    def _do(self, action: Action) -> None:
        layers = self._stages[action.stage]
        if action.op is Op.F:
            for layer in layers:
                self._hold(layer.held_bytes)
                self._see(layer.forward_bytes)
        elif action.op in (Op.B, Op.I):
            end = layers[-1] if layers[-1].given_bytes else LayerMemory()
            kept = action.op is Op.I and any(layer.keeps_given for layer in layers[-2:-1])
            ends = end.held_bytes + (0 if kept else end.given_bytes)
            for place in reversed(range(len(layers))):
                self._backward(action, place, layers[place])
                self._hold(
                    ends * (place == len(layers) - 2)
                )  # by then its last layer is done with it
            self._hold(-ends)
            self._collect()
        elif action.op is Op.W:
            for place, layer in reversed([*enumerate(layers)]):
                if layer.deferred_bytes:
                    first = self._make_gradients(action.stage, place, layer)
                    self._see(layer.first_weight_bytes if first else layer.weight_bytes)
            self._hold(-sum(layer.deferred_bytes for layer in layers))
            self._collect()

    def _backward(self, action: Action, place: int, layer: LayerMemory) -> None:
        whole = action.op is Op.B or layer.deferred_bytes == 0
        first = (action.stage, place) not in self._made and not self._keeps_gradients
        self._see(layer.backward_bytes + layer.first_bytes * first if whole else layer.input_bytes)
        self._hold((0 if whole else layer.deferred_bytes) - layer.held_bytes)
        if whole:
            self._make_gradients(action.stage, place, layer)

    def _make_gradients(self, stage: int, place: int, layer: LayerMemory) -> bool:
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

    def _have_gradients(self, stage: int, place: int, layer: LayerMemory) -> bool:
        """Allocate them where this is the first micro-batch of a step to give it any; whether it
        was.
        """
        if self._keeps_gradients or (stage, place) in self._made:
            return False
        self._made.add((stage, place))
        self._now = replace(self._now, gradients=self._now.gradients + layer.gradient_bytes)
        return True

    def _hold(self, more: int) -> None:
        self._now = replace(self._now, activations=self._now.activations + more)

    def _see(self, working: int) -> None:
        if self._now.total + working > self._worst.total:
            self._worst = replace(self._now, working=working)


def _total(stages: Sequence[StageMemory], kind: str) -> int:
    return sum(getattr(layer, kind) for stage in stages for layer in stage)
