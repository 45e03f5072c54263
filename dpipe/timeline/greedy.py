"""A split backward pass that follows the clock of a network: each rank does what has arrived, when
it has arrived.

`generate.zero_bubble` counts slots and takes every hop for free, so on a slow link its ranks wait
for messages that are under way. Here the simulator says what is there, and delays, bandwidths and
uneven stages shape the order. Two stages whose F, I and W take as long as a hop (`draw()` shows
order, not time):

    zero_bubble    rank 0 | 0F0 0F1  .  0I0 0F2 0I1 0F3 0I2 0W0 0I3 0W1 0W2 0W3
                   rank 1 |  .  1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3      takes 17
    greedy         rank 0 | 0F0 0F1  .  0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2  .  0I3 0W3
                   rank 1 |  .  1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2 1F3 1I3 1W3  .   takes 16
"""

from dataclasses import replace

from dpipe.network.link import Network
from dpipe.schedule.action import Action, Op
from dpipe.schedule.generate import split_programs
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.simulation import Simulation
from dpipe.timeline.span import Lane


def greedy(
    num_stages: int,
    num_microbatches: int,
    cost: Cost,
    network: Network,
    in_flight: int | None = None,
    memory_limit: int | None = None,
) -> Schedule:
    """The compute-only schedule that `SplitProgram`'s rule makes on `network`; parameters as in
    `zero_bubble`.
    """
    return _Greedy(num_stages, num_microbatches, cost, network, in_flight, memory_limit).make()


class _Greedy(Simulation):
    """A simulation in which the programs are not given but made."""

    def __init__(
        self,
        num_stages: int,
        num_microbatches: int,
        cost: Cost,
        network: Network,
        in_flight: int | None,
        memory_limit: int | None,
    ) -> None:
        nothing = Schedule(num_microbatches, tuple(range(num_stages)), ((),) * num_stages, "greedy")
        super().__init__(nothing, cost, network)
        self.making = split_programs(num_stages, num_microbatches, in_flight, memory_limit)
        self.arrived = {op: [0] * num_stages for op in (Op.RECV_F, Op.RECV_B)}
        self.arrived[Op.RECV_F][0] = num_microbatches

    def make(self) -> Schedule:
        self.run()
        return replace(self.schedule, programs=tuple(tuple(rank.program) for rank in self.making))

    def finish(
        self, rank: int, lane: Lane, action: Action, start_us: float, step: int | None = None
    ) -> None:
        if lane is Lane.RECV:
            self.arrived[action.op][rank] += 1
        if action.op is Op.F and rank < len(self.making) - 1:
            self.start(rank, Action(rank, Op.SEND_F, action.microbatch))
        if action.op is Op.I and rank > 0:
            self.start(rank, Action(rank, Op.SEND_B, action.microbatch))
        super().finish(rank, lane, action, start_us, step)

    def advance(self, rank: int) -> None:
        making = self.making[rank]
        last = rank == len(self.making) - 1
        gradients = making.done[Op.F] if last else self.arrived[Op.RECV_B][rank]
        op = making.choose(self.arrived[Op.RECV_F][rank], gradients)
        if op is not None:
            self.start(rank, making.do(op))
