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
  (`exchanges.py`).
- At VOTE a rank waits for the ballots of all ranks, where the update needs them (`votes.py`).

    rank 0  compute [0F0][0F1]              rank 1  compute     :  :wait[1F0]
            send         [0SEND_F0]                 recv        :[1RECV_F0]
                                                                 ^ the link's delay after the send
                                                                 began
"""

from collections.abc import Sequence
from functools import partial
from typing import assert_never

from dpipe.errors import ScheduleError
from dpipe.network.link import Host, Network
from dpipe.schedule.action import RECVS, Action, Op
from dpipe.schedule.check import check
from dpipe.schedule.links import counterpart
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas, StageExchanges
from dpipe.timeline.machine import Machines
from dpipe.timeline.span import Lane, Span, Timeline
from dpipe.timeline.votes import Votes


def simulate(
    schedule: Schedule,
    cost: Cost,
    network: Network,
    hosts: Sequence[Host] = (),
    replicas: Replicas | None = None,
    ballots: Network | None = None,
) -> Timeline:
    """When everything in `schedule` happens; one that is not lowered is lowered first.

    `hosts` are machines that have fewer cores than ranks; costs are then those of a core to
    oneself. With `replicas` every one of them runs the schedule, and their stages agree at
    REDUCE_GRAD. `ballots` is the network that VOTE crosses; by default no rank waits for a vote.

    Raises `ScheduleError` for a schedule that does not fit `cost` or cannot make progress.
    """
    lowered = schedule if schedule.lowered else lower(schedule, reduce=replicas is not None)
    return Simulation(lowered, cost, network, hosts, replicas, ballots).run()


class Simulation:
    """The ranks and their links while a schedule unfolds; makes the spans."""

    def __init__(
        self,
        schedule: Schedule,
        cost: Cost,
        network: Network,
        hosts: Sequence[Host] = (),
        replicas: Replicas | None = None,
        ballots: Network | None = None,
    ) -> None:
        if schedule.num_stages != cost.num_stages:
            raise ScheduleError(
                f"the schedule has {schedule.num_stages} stages, the cost {cost.num_stages}"
            )
        self.schedule = schedule
        self.cost = cost
        self.network = network
        self.machines = Machines(network, hosts)
        self.clock = self.machines.clock
        self.spans = self.machines.spans
        self.replicas = replicas
        self.mirrored = ballots is None and not hosts and self._replicas_are_alike
        simulated = 1
        if replicas is not None and not self.mirrored:
            simulated = replicas.count
        self.programs = schedule.programs * simulated
        # By replica, then by rank of all that are simulated.
        self.done: list[set[Action]] = [set() for _ in range(simulated)]
        self.position = [0 for _ in self.programs]
        # When the rank ran out of work; None while it computes.
        self.idle_since: list[float | None] = [0.0 for _ in self.programs]
        # What the rank's next action still lacks.
        self.awaited: list[set[Action]] = [set() for _ in self.programs]
        self.exchanges = self._stage_exchanges()
        self.votes: Votes | None = None
        if ballots is not None:
            self.votes = Votes(self.clock, ballots, len(self.programs), self._voted)

    @property
    def _replicas_are_alike(self) -> bool:
        """Then one of them is simulated, and stands for all."""
        return self.replicas is not None and self.replicas.alike(
            self.network, self.schedule.num_ranks
        )

    def _stage_exchanges(self) -> StageExchanges | None:
        if self.replicas is None:
            return None
        return StageExchanges(
            self.machines,
            self.schedule,
            self.cost,
            self.replicas,
            self._reduced,
            mirrored=self.mirrored,
        )

    def run(self) -> Timeline:
        if self.exchanges is not None:
            self.exchanges.begin_step()
        for rank in range(len(self.programs)):
            self.advance(rank)
        self.clock.run()
        if any(len(done) < len(self.schedule.index) for done in self.done):
            check(self.schedule)  # says which action on which rank waits for what
        per_replica = self.schedule.num_ranks
        if self.replicas is None:
            return Timeline(per_replica, tuple(self.spans))
        spans = self.spans
        if self.mirrored:
            spans = self.replicas.everyone(spans, per_replica)
        num_replicas = self.replicas.count
        return Timeline(per_replica * num_replicas, tuple(spans), num_replicas)

    def finish(self, rank: int, lane: Lane, action: Action, start_us: float) -> None:
        """`action` is over; its rank may have waited for it."""
        num_bytes = self.cost.num_bytes(action)
        self.spans.append(Span(rank, lane, action, start_us, self.clock.now_us, num_bytes))
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
                needs = self.schedule.requires(action)
                self.awaited[rank] = {need for need in needs if need not in done}
                if self.awaited[rank]:
                    return
            self.position[rank] += 1
            self.start(rank, action)

    def start(self, rank: int, action: Action) -> None:
        match action.op:
            case Op.RECV_F | Op.RECV_B | Op.RECV_TIED:
                pass  # it is done when its message arrives
            case Op.SEND_F | Op.SEND_B | Op.SEND_TIED:
                self._send(rank, action)
            case Op.F | Op.B | Op.I | Op.W | Op.STEP:
                self.compute(rank, action)
            case Op.COMPLETE | Op.AGREE:
                self._waited(rank, action)
                self.complete(rank, action)
            case Op.REDUCE_GRAD:
                if self.exchanges is None:
                    self.finish(rank, Lane.REDUCE, action, self.clock.now_us)
                else:
                    self.exchanges.reduce(rank, action.stage)
            case Op.VOTE:
                self._waited(rank, action)
                if self.cost.duration_us(action):
                    self.compute(rank, action)
                else:
                    self._vote(rank, action)
            case _:
                assert_never(action.op)

    def compute(self, rank: int, action: Action) -> None:
        """Keep an idle rank for as long as `action` takes."""
        start = self.clock.now_us
        self._waited(rank, action)
        self.idle_since[rank] = None
        cores = self.machines.cores.get(rank)
        over = partial(self._computed, rank, action, start)
        if cores is not None and cores.host.computes:
            cores.run(rank, self.cost.duration_us(action), over)
        else:
            self.clock.at(start + self.cost.duration_us(action), over)

    def _computed(self, rank: int, action: Action, start_us: float) -> None:
        self.idle_since[rank] = self.clock.now_us
        if action.op is Op.VOTE:
            self.spans.append(Span(rank, Lane.UPDATE, action, start_us, self.clock.now_us))
            self._vote(rank, action)
            return
        if action.op is Op.STEP and self.exchanges is not None:
            self.exchanges.stepped(rank, action.stage)
        lane = Lane.UPDATE if action.op is Op.STEP else Lane.COMPUTE
        self.finish(rank, lane, action, start_us)

    def _waited(self, rank: int, action: Action) -> None:
        """An idle rank goes on with `action`."""
        since = self.idle_since[rank]
        if since is not None and since < self.clock.now_us:
            self.spans.append(Span(rank, Lane.WAIT, action, since, self.clock.now_us))
            self.idle_since[rank] = self.clock.now_us

    def _send(self, rank: int, action: Action) -> None:
        receive = counterpart(action, self.schedule.num_stages)
        first_of_replica = rank - rank % self.schedule.num_ranks
        target = first_of_replica + self.schedule.rank_of_stage[receive.stage]
        self.machines.sending[rank].add(action)

        def left(start_us: float) -> None:
            self.machines.sending[rank].remove(action)
            if self.exchanges is not None:
                self.exchanges.sent(rank, action)
            self.finish(rank, Lane.SEND, action, start_us)

        arrived = partial(self.finish, target, Lane.RECV, receive)
        self.machines.sender(rank).send(target, self.cost.num_bytes(action), left, arrived)

    def _reduced(self, rank: int, stage: int) -> None:
        self.complete(rank, Action(stage, Op.REDUCE_GRAD))

    def _vote(self, rank: int, action: Action) -> None:
        if self.votes is None:
            self.complete(rank, action)
        else:
            self.votes.cast(rank)

    def _voted(self, rank: int) -> None:
        vote = self.schedule.of_rank(rank % self.schedule.num_ranks, Op.VOTE)
        self._waited(rank, vote)
        self.complete(rank, vote)
