"""The rule by which a program with a split backward pass is made, whoever says what has arrived and
when.

    rank 1 | 1F0 1F1  .  1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3

`generate.zero_bubble` follows it in unit time.
"""

from dpipe.schedule.action import Action, Op


class SplitProgram:
    """One rank while its schedule is made: how many F, I and W it has done, and its program so far.

    An input gradient first, because the rank before waits for it; else a forward; else a weight
    gradient, for which nobody waits. `depth` limits the forwards whose input gradient is not done,
    `limit` those whose weight gradient is not done: what the rank holds.
    """

    def __init__(
        self,
        stage: int,
        num_microbatches: int,
        depth: int,
        limit: int,
    ) -> None:
        self.stage = stage
        self.num_microbatches = num_microbatches
        self.depth = depth
        self.limit = limit
        # Counts are enough: each op takes its micro-batches in order.
        self.done = {
            Op.F: 0,
            Op.I: 0,
            Op.W: 0,
        }
        self.program: list[Action] = []

    @property
    def unfinished(self) -> bool:
        return self.done[Op.W] < self.num_microbatches

    def choose(self, inputs: int, gradients: int) -> Op | None:
        """What to do next, given how many inputs and output gradients have come from the
        neighbours.
        """
        forwards = self.done[Op.F]
        backwards = self.done[Op.I]
        weights = self.done[Op.W]
        if backwards < min(forwards, gradients):
            return Op.I
        deepest = backwards + self.depth
        most_held = weights + self.limit
        if forwards < min(inputs, deepest, most_held):
            return Op.F
        if weights < backwards:
            return Op.W
        return None

    def do(self, op: Op) -> Action:
        microbatch = self.done[op]
        action = Action(self.stage, op, microbatch)
        self.program.append(action)
        self.done[op] = microbatch + 1
        return action
