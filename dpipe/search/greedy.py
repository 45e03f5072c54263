"""Orders by a rule that follows the clock of a network: each rank does what has arrived, when it
has arrived.

`generate.zero_bubble` counts slots and takes every hop for free, so on a slow link its ranks wait
for messages that are under way. Here the clock says what is there, and delays, bandwidths and
uneven stages shape the order. Two stages whose F, I and W take as long as a hop (`draw()` shows
order, not time):

    zero_bubble    rank 0 | 0F0 0F1  .  0I0 0F2 0I1 0F3 0I2 0W0 0I3 0W1 0W2 0W3
                   rank 1 |  .  1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3      takes 17
    greedy         rank 0 | 0F0 0F1  .  0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2  .  0I3 0W3
                   rank 1 |  .  1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2 1F3 1I3 1W3  .   takes 16
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import ge

from dpipe.search.clock import (
    FORWARD,
    INPUT,
    WEIGHT,
    WHOLE,
    Pipeline,
    PipelineClock,
    Step,
)

TimesUs = list[float]


@dataclass(frozen=True)
class Rule:
    """What a rank does first of all that it could do.

    Input gradients come first, because the rank before waits for them; then forwards; then weight
    gradients, for which nobody waits. On slow networks it may be better to have many forwards under
    way before the first backward.

    A weight gradient that has begun holds up what comes meanwhile. So a stage may put off some, as
    many as it will have time for while the last gradients go on from it to the first stage.
    """

    depths: tuple[int, ...]  # by stage: most forwards whose input gradient is not made
    limits: tuple[int, ...]  # by rank: most activations that it holds, until the weight gradient
    forward_first: bool = False
    splits: bool = True  # the backward pass, into input gradients and weight gradients
    put_off: tuple[int, ...] = ()  # by stage: most weight gradients that wait for what will come

    def held_to(self, most: int) -> "Rule":
        """The same with no rank's limit above `most`."""
        limits = [min(most, limit) for limit in self.limits]
        return replace(self, limits=tuple(limits))

    def deepens(self, other: "Rule") -> bool:
        """Whether it only allows more in flight than `other` does."""
        if replace(self, depths=other.depths) != other:
            return False
        return all(map(ge, self.depths, other.depths))


class Greedy(PipelineClock):
    """A clock that makes the programs as it goes."""

    def __init__(self, pipeline: Pipeline, rule: Rule) -> None:
        super().__init__(pipeline)
        self._rule = rule
        self._backward = INPUT if rule.splits else WHOLE
        self.held_back = False  # a forward waited because its stage had enough in flight
        # By stage, when its inputs and its gradients will come, of those that are being made.
        stages = range(pipeline.num_stages)
        self._inputs_due_us: list[TimesUs] = [[] for _ in stages]
        self._gradients_due_us: list[TimesUs] = [[] for _ in stages]

    def next_step(self, rank: int) -> Step | None:
        step = self._first_choice(rank)
        if step is not None and self._rule.put_off:
            self._expect(step)
        return step

    def _first_choice(self, rank: int) -> Step | None:
        stages = self.pipeline.stages_of[rank]
        if self._rule.forward_first:
            step = self._forward(rank, stages)
            if step is None:
                step = self._gradient(stages)
        else:
            step = self._gradient(stages)
            if step is None:
                step = self._forward(rank, stages)
        return step or self._weight(stages)

    # Of a lower stage first: its micro-batch is further on its way back.
    def _gradient(self, stages: Sequence[int]) -> Step | None:
        kind = self._backward
        begun = self.begun[kind]
        for stage in stages:
            number = begun[stage]
            if number < self.gradients[stage]:
                return kind, stage, number
        return None

    def _forward(self, rank: int, stages: Sequence[int]) -> Step | None:
        """Of the last stage that can, so that a micro-batch comes round soon. Each stage leaves a
        place to every one behind it: so none waits for a place that is never left.
        """
        begun = self.begun[FORWARD]
        come_back = self.begun[self._backward]
        depths = self._rule.depths
        limit = self._rule.limits[rank]
        room = limit - self._held(stages)
        for stage in reversed(stages):
            if room <= 0:
                return None
            number = begun[stage]
            in_flight = number - come_back[stage]
            if number < self.inputs[stage]:
                if in_flight < depths[stage]:
                    return FORWARD, stage, number
                self.held_back = True
            room -= 1
        return None

    # Ranks do one thing at a time: when one chooses, all that it has begun is over.
    def _held(self, stages: Sequence[int]) -> int:
        forward, _, weight, whole = self.begun
        held = 0
        for stage in stages:
            released = weight[stage] + whole[stage]
            held += forward[stage] - released
        return held

    # Nobody waits for a weight gradient, so that any of them will do. The lowest stage comes first
    # because its exchange with replicas is the last to begin otherwise.
    def _weight(self, stages: Sequence[int]) -> Step | None:
        for stage in stages:
            begun = self.begun[WEIGHT][stage]
            if begun < self.begun[INPUT][stage]:
                if self._puts_off(stage, stages):
                    return None
                return WEIGHT, stage, begun
        return None

    def _puts_off(self, stage: int, stages: Sequence[int]) -> bool:
        """Whether the rank rather waits for a message than begins a weight gradient of `stage`."""
        if not self._rule.put_off:
            return False
        done = self.begun[WEIGHT][stage]
        waiting = self.begun[INPUT][stage] - done
        if waiting > self._rule.put_off[stage]:
            return False
        weight_us = self.pipeline.duration_us[WEIGHT][stage]
        until_us = self.now_us + weight_us * _PATIENCE
        return any(self._next_due_us(each) < until_us for each in stages)

    def _next_due_us(self, stage: int) -> float:
        """When the next message for `stage` comes; infinite where none is being made."""
        inputs_us = self._inputs_due_us[stage]
        gradients_us = self._gradients_due_us[stage]
        next_us = math.inf
        num_inputs = self.inputs[stage]
        if num_inputs < len(inputs_us):
            next_us = inputs_us[num_inputs]
        num_gradients = self.gradients[stage]
        if num_gradients < len(gradients_us):
            next_us = min(next_us, gradients_us[num_gradients])
        return next_us

    def _expect(self, step: Step) -> None:
        """Remember when the message that `step` will send arrives, if nothing holds it up."""
        kind, stage, _ = step
        hop = self.pipeline.hops[kind][stage]
        if hop is None:
            return
        takes_us = self.pipeline.duration_us[kind][stage]
        made_us = self.now_us + takes_us
        due_us = made_us + hop.alone_us + hop.delay_us
        if kind == FORWARD:
            dues_us = self._inputs_due_us[stage + 1]
        else:
            dues_us = self._gradients_due_us[stage - 1]
        dues_us.append(due_us)


_PATIENCE = 0.5  # of a weight gradient's time: so long a rank waits for a message at most
