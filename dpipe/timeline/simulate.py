"""When a schedule would happen on a given network: the same timeline that a run writes, before
there is a run.

The model, event by event:

- A rank runs its program in order, one compute action at a time; it waits where
  `Schedule.requires()` is not met.
- Sends and receives do not hold it up. The messages of one directed link go one after another, in
  program order.
- A message takes bytes / bandwidth to put on the wire, then the link's delay to arrive. Links are
  full duplex.
- A rank's egress sends one message after another, whoever they are for: `tc` shapes an interface
  (`Egress`).
- A message does not wait for its receive to be posted. It costs neither end anything, unless their
  host says so.
- Ranks have a processor each, unless they share a host's cores; then they share them fairly, and
  with messages.
- Replicas of the pipeline run the same schedule; what their stages exchange shares the same egress
  (`replicas.py`).

    rank 0  compute [0F0][0F1]              rank 1  compute     :  :wait[1F0]
            send         [0SEND_F0]                 recv        :[1RECV_F0]
                                                                 ^ the link's delay after the send
                                                                 began
"""

from collections.abc import Sequence
from functools import partial

from dpipe.errors import ScheduleError
from dpipe.network.link import Host, Network
from dpipe.schedule.action import RECVS, SENDS, Action, Op
from dpipe.schedule.check import check
from dpipe.schedule.links import counterpart
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Exchanges, Replicas
from dpipe.timeline.machine import Clock, Cores, Sender
from dpipe.timeline.span import Lane, Span, Timeline


def simulate(
    schedule: Schedule,
    cost: Cost,
    network: Network,
    hosts: Sequence[Host] = (),
    replicas: Replicas | None = None,
) -> Timeline:
    """When everything in `schedule` happens; one that is not lowered is lowered first.

    `hosts` are machines that have fewer cores than ranks; costs are then those of a core to
    oneself. With `replicas` every one of them runs the schedule, and their stages agree at
    REDUCE_GRAD.

    Raises `ScheduleError` for a schedule that does not fit `cost` or cannot make progress.
    """
    lowered = schedule if schedule.lowered else lower(schedule, reduce=replicas is not None)
    return Simulation(lowered, cost, network, hosts, replicas).run()


class Simulation:
    """The ranks and their links while a schedule unfolds; makes the spans."""

    def __init__(
        self,
        schedule: Schedule,
        cost: Cost,
        network: Network,
        hosts: Sequence[Host] = (),
        replicas: Replicas | None = None,
    ) -> None:
        if schedule.num_stages != cost.num_stages:
            raise ScheduleError(
                f"the schedule has {schedule.num_stages} stages, the cost {cost.num_stages}"
            )
        self.schedule = schedule
        self.cost = cost
        self.network = network
        self.replicas = replicas
        self.clock = Clock()
        self.spans: list[Span] = []
        self.mirrored = (
            replicas is not None and not hosts and replicas.alike(network, schedule.num_ranks)
        )
        simulated = 1 if replicas is None or self.mirrored else replicas.count
        self.programs = schedule.programs * simulated
        self.done: list[set[Action]] = [set() for _ in range(simulated)]
        self.position = [0 for _ in self.programs]
        self.idle_since: list[float | None] = [
            0.0 for _ in self.programs
        ]  # None while the rank computes
        self.awaited: list[set[Action]] = [
            set() for _ in self.programs
        ]  # what the rank's next action still lacks
        self.cores = {
            rank: cores
            for host in hosts
            for cores in [Cores(self.clock, host)]
            for rank in host.ranks
        }
        self.exchanges = (
            None if replicas is None else Exchanges(self, replicas, mirrored=self.mirrored)
        )
        self.sending: list[set[Action]] = [set() for _ in self.programs]
        self._senders: dict[int, Sender] = {}

    def run(self) -> Timeline:
        if self.exchanges is not None:
            self.exchanges.begin_step()
        for rank in range(len(self.programs)):
            self.advance(rank)
        self.clock.run()
        if any(len(done) < len(self.schedule.index) for done in self.done):
            check(self.schedule)  # says which action on which rank waits for what
        if self.replicas is None:
            return Timeline(self.schedule.num_ranks, tuple(self.spans))
        per_replica = self.schedule.num_ranks
        spans = self.replicas.everyone(self.spans, per_replica) if self.mirrored else self.spans
        return Timeline(per_replica * self.replicas.count, tuple(spans), self.replicas.count)

    def finish(self, rank: int, lane: Lane, action: Action, start_us: float) -> None:
        """`action` is over; its rank may have waited for it."""
        self.spans.append(
            Span(rank, lane, action, start_us, self.clock.now_us, self.cost.num_bytes(action))
        )
        self.complete(rank, action)

    def complete(self, rank: int, action: Action) -> None:
        self.done[rank // self.schedule.num_ranks].add(action)
        self.awaited[rank].discard(action)
        if self.idle_since[rank] is not None and not self.awaited[rank]:
            self.advance(rank)

    def advance(self, rank: int) -> None:
        """Go on with the program of an idle rank until it computes or has to wait."""
        program = self.programs[rank]
        done = self.done[rank // self.schedule.num_ranks]
        while self.idle_since[rank] is not None and self.position[rank] < len(program):
            action = program[self.position[rank]]
            if action.op not in RECVS:
                self.awaited[rank] = {
                    need for need in self.schedule.requires(action) if need not in done
                }
                if self.awaited[rank]:
                    return
            self.position[rank] += 1
            self.start(rank, action)

    def start(self, rank: int, action: Action) -> None:
        if action.op in RECVS:
            return  # it is done when its message arrives
        if action.op in SENDS:
            self._send(rank, action)
        elif action.op != Op.REDUCE_GRAD:
            self.compute(rank, action)
        elif self.exchanges is not None:
            self.exchanges.reduce(rank, action.stage)
        else:
            self.finish(rank, Lane.REDUCE, action, self.clock.now_us)

    def sender(self, rank: int) -> Sender:
        if rank not in self._senders:
            self._senders[rank] = Sender(self.clock, self.network, rank, self.cores)
        return self._senders[rank]

    def _send(self, rank: int, action: Action) -> None:
        receive = counterpart(action, self.schedule.num_stages)
        target = rank - rank % self.schedule.num_ranks + self.schedule.rank_of_stage[receive.stage]
        self.sending[rank].add(action)

        def left(start_us: float) -> None:
            self.sending[rank].remove(action)
            if self.exchanges is not None:
                self.exchanges.sent(rank, action)
            self.finish(rank, Lane.SEND, action, start_us)

        arrived = partial(self.finish, target, Lane.RECV, receive)
        self.sender(rank).send(target, self.cost.num_bytes(action), left, arrived)

    def compute(self, rank: int, action: Action) -> None:
        """Keep an idle rank for as long as `action` takes."""
        start = self.clock.now_us
        since = self.idle_since[rank]
        if since is not None and since < start:
            self.spans.append(Span(rank, Lane.WAIT, action, since, start))
        self.idle_since[rank] = None

        def over() -> None:
            self.idle_since[rank] = self.clock.now_us
            if action.op is Op.STEP and self.exchanges is not None:
                self.exchanges.stepped(rank, action.stage)
            self.finish(rank, Lane.UPDATE if action.op == Op.STEP else Lane.COMPUTE, action, start)

        if rank in self.cores and self.cores[rank].host.computes:
            self.cores[rank].run(rank, self.cost.duration_us(action), over)
        else:
            self.clock.at(start + self.cost.duration_us(action), over)
