"""When a schedule would happen on a given network: the same timeline that a run writes, before there is a run.

The model, event by event:

- A rank runs its program in order, one compute action at a time; it waits where `Schedule.requires()` is not met.
- Sends and receives do not hold it up. The messages of one directed link go one after another, in program order.
- A message takes bytes / bandwidth to put on the wire, then the link's delay to arrive. Links are full duplex.
- A rank's egress is shared fairly by its links that send at the same moment, as `tc` shapes an interface, no peer.
- Receiving costs the receiver nothing, and a message does not wait for its receive to be posted.
- Ranks have a processor each, unless they share a host's cores; then they share them fairly.

    rank 0  compute [0F0][0F1]              rank 1  compute     :  :wait[1F0]
            send         [0SEND_F0]                 recv        :[1RECV_F0]
                                                                 ^ the link's delay after the send began
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self, assert_never

from dpipe.errors import ConfigError, ScheduleError
from dpipe.schedule.action import RECVS, SENDS, Action, Op
from dpipe.schedule.check import check
from dpipe.schedule.links import counterpart, peer
from dpipe.schedule.lower import lower
from dpipe.schedule.plan import Schedule
from dpipe.timeline.span import Lane, Span, Timeline
from dpipe.topology import Egress, Host, Network, Sent


@dataclass(frozen=True)
class Cost:
    """What each stage takes, one value a stage (microseconds), and what each hop carries, one value a hop (bytes).

    `backward_us` is a whole B; `input_us` and `weight_us` are its halves I and W where a schedule splits it. Hop s is
    between stages s and s + 1: `activation_bytes` go forth, `gradient_bytes` come back (default: as many).
    `update_us` is the optimizer's step and `reduce_us` the agreement of replicas (defaults: nothing).
    Raises `ConfigError` where the lengths do not fit each other.
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    input_us: tuple[float, ...]
    weight_us: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...] = ()
    update_us: tuple[float, ...] = ()
    reduce_us: tuple[float, ...] = ()
    tied_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "gradient_bytes", self.gradient_bytes or self.activation_bytes)
        object.__setattr__(self, "update_us", self.update_us or (0.0,) * self.num_stages)
        object.__setattr__(self, "reduce_us", self.reduce_us or (0.0,) * self.num_stages)
        for name in ("backward_us", "input_us", "weight_us", "update_us", "reduce_us"):
            self._expect(name, self.num_stages)
        for name in ("activation_bytes", "gradient_bytes"):
            self._expect(name, self.num_stages - 1)

    def _expect(self, name: str, length: int) -> None:
        if len(getattr(self, name)) != length:
            raise ConfigError(
                f"{name} must have {length} values for {self.num_stages} stages, got {getattr(self, name)}"
            )

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_us: float,
        backward_us: float,
        message_bytes: int,
        input_share: float = 0.5,
        update_us: float = 0.0,
    ) -> Self:
        """Every stage and every hop alike; `input_share` of the backward pass makes the input gradient."""
        return cls(
            forward_us=(forward_us,) * num_stages,
            backward_us=(backward_us,) * num_stages,
            input_us=(backward_us * input_share,) * num_stages,
            weight_us=(backward_us * (1 - input_share),) * num_stages,
            activation_bytes=(message_bytes,) * (num_stages - 1),
            update_us=(update_us,) * num_stages,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward_us)

    def duration_us(self, action: Action) -> float:
        """How long `action` keeps its rank, or its reduction the network; moving bytes keeps nobody."""
        match action.op:
            case Op.F:
                return self.forward_us[action.stage]
            case Op.B:
                return self.backward_us[action.stage]
            case Op.I:
                return self.input_us[action.stage]
            case Op.W:
                return self.weight_us[action.stage]
            case Op.STEP:
                return self.update_us[action.stage]
            case Op.REDUCE_GRAD:
                return self.reduce_us[action.stage]
            case Op.SEND_F | Op.SEND_B | Op.SEND_TIED | Op.RECV_F | Op.RECV_B | Op.RECV_TIED:
                return 0.0
        assert_never(action.op)

    def num_bytes(self, action: Action) -> int:
        """What a send or a receive moves; nothing for any other action."""
        match action.op:
            case Op.SEND_F | Op.RECV_B:
                return (self.activation_bytes if action.op == Op.SEND_F else self.gradient_bytes)[action.stage]
            case Op.RECV_F | Op.SEND_B:
                return (self.activation_bytes if action.op == Op.RECV_F else self.gradient_bytes)[action.stage - 1]
            case Op.SEND_TIED | Op.RECV_TIED:
                return self.tied_bytes
            case Op.F | Op.B | Op.I | Op.W | Op.STEP | Op.REDUCE_GRAD:
                return 0
        assert_never(action.op)


def simulate(schedule: Schedule, cost: Cost, network: Network, hosts: Sequence[Host] = ()) -> Timeline:
    """When everything in `schedule` happens; one that is not lowered is lowered first.

    `hosts` are machines that have fewer cores than ranks; costs are then those of a core to oneself.

    Raises `ScheduleError` for a schedule that does not fit `cost` or cannot make progress.
    """
    return Simulation(schedule if schedule.lowered else lower(schedule), cost, network, hosts).run()


class _Clock:
    """Calls what is due, in order of time, and of request among equals."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._requests = count()

    def at(self, time_us: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_us, next(self._requests), call))

    def run(self) -> None:
        while self._events:
            self.now_us, _, call = heapq.heappop(self._events)
            call()


class Simulation:
    """The ranks and their links while a schedule unfolds; makes the spans."""

    def __init__(self, schedule: Schedule, cost: Cost, network: Network, hosts: Sequence[Host] = ()) -> None:
        if schedule.num_stages != cost.num_stages:
            raise ScheduleError(f"the schedule has {schedule.num_stages} stages, the cost {cost.num_stages}")
        self.schedule, self.cost, self.network = schedule, cost, network
        self.clock = _Clock()
        self.spans: list[Span] = []
        self.done: set[Action] = set()
        ranks = range(schedule.num_ranks)
        self.position = [0 for _ in ranks]
        self.idle_since: list[float | None] = [0.0 for _ in ranks]  # None while the rank computes
        self.senders = [_Sender(self, rank) for rank in ranks]
        self.cores = {rank: cores for host in hosts for cores in [_Cores(self.clock, host)] for rank in host.ranks}

    def run(self) -> Timeline:
        for rank in range(self.schedule.num_ranks):
            self.advance(rank)
        self.clock.run()
        if len(self.done) < len(self.schedule.index):
            check(self.schedule)  # says which action on which rank waits for what
        return Timeline(self.schedule.num_ranks, tuple(self.spans))

    def finish(self, rank: int, lane: Lane, action: Action, start_us: float) -> None:
        """`action` is over; its rank may have waited for it."""
        self.spans.append(Span(rank, lane, action, start_us, self.clock.now_us, self.cost.num_bytes(action)))
        self.done.add(action)
        if self.idle_since[rank] is not None:
            self.advance(rank)

    def advance(self, rank: int) -> None:
        """Go on with the program of an idle rank until it computes or has to wait."""
        program = self.schedule.programs[rank]
        while self.idle_since[rank] is not None and self.position[rank] < len(program):
            action = program[self.position[rank]]
            if action.op not in RECVS and not self.done.issuperset(self.schedule.requires(action)):
                return
            self.position[rank] += 1
            self.start(rank, action)

    def start(self, rank: int, action: Action) -> None:
        if action.op in RECVS:
            return  # it is done when its message arrives
        if action.op in SENDS:
            self.senders[rank].send(action)
        elif action.op == Op.REDUCE_GRAD:
            self._run(rank, Lane.REDUCE, action)
        else:
            self._end_wait(rank, action)
            self._run(rank, Lane.UPDATE if action.op == Op.STEP else Lane.COMPUTE, action)

    def _end_wait(self, rank: int, action: Action) -> None:
        since, now = self.idle_since[rank], self.clock.now_us
        if since is not None and since < now:
            self.spans.append(Span(rank, Lane.WAIT, action, since, now))
        self.idle_since[rank] = None

    def _run(self, rank: int, lane: Lane, action: Action) -> None:
        start = self.clock.now_us

        def over() -> None:
            if lane != Lane.REDUCE:
                self.idle_since[rank] = self.clock.now_us
            self.finish(rank, lane, action, start)

        if rank in self.cores and lane != Lane.REDUCE:
            self.cores[rank].run(rank, self.cost.duration_us(action), over)
        else:
            self.clock.at(start + self.cost.duration_us(action), over)


class _Cores:
    """The cores of one host: as many ranks as there are cores compute at full speed, more of them share it."""

    def __init__(self, clock: _Clock, host: Host) -> None:
        self._clock, self._cores = clock, host.cores
        self._running: dict[int, tuple[float, Callable[[], None]]] = {}  # by rank: microseconds left on a whole core
        self._since_us = 0.0
        self._plans = 0  # as in `_Sender`

    def run(self, rank: int, duration_us: float, over: Callable[[], None]) -> None:
        self._progress()
        self._running[rank] = duration_us, over
        self._plan()

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / max(1, len(self._running)))

    def _progress(self) -> None:
        done_us = (self._clock.now_us - self._since_us) * self._speed
        self._running = {rank: (left - done_us, over) for rank, (left, over) in self._running.items()}
        self._since_us = self._clock.now_us

    def _plan(self) -> None:
        self._plans += 1
        if self._running:
            plan, left_us = self._plans, min(left for left, _ in self._running.values())
            self._clock.at(self._clock.now_us + max(0.0, left_us) / self._speed, lambda: self._complete(plan))

    def _complete(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._progress()
        rank = min(self._running, key=lambda rank: self._running[rank][0])
        _, over = self._running.pop(rank)
        self._plan()
        over()


class _Sender:
    """The egress of one rank on the simulation's clock."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation, self.rank = simulation, rank
        self.egress = Egress[Action](simulation.network, rank)
        self.plans = 0  # the completion that is due belongs to the latest plan; earlier ones are void

    def send(self, action: Action) -> None:
        simulation = self.simulation
        target = peer(simulation.schedule, action)
        self.egress.offer(target, action, simulation.cost.num_bytes(action), simulation.clock.now_us)
        self._plan()

    def _plan(self) -> None:
        self.plans += 1
        due_us, plan = self.egress.due_us, self.plans
        assert due_us is not None
        self.simulation.clock.at(due_us, lambda: self._complete(plan))

    def _complete(self, plan: int) -> None:
        if plan != self.plans:
            return
        sent = self.egress.complete()
        if self.egress.due_us is not None:
            self._plan()
        self._deliver(sent)

    def _deliver(self, sent: Sent[Action]) -> None:
        simulation, target = self.simulation, sent.target
        delay_us = simulation.network.link(self.rank, target).delay_us
        receive = counterpart(sent.item, simulation.schedule.num_stages)
        first_byte_us, arrival_us = sent.start_us + delay_us, sent.end_us + delay_us
        simulation.clock.at(arrival_us, lambda: simulation.finish(target, Lane.RECV, receive, first_byte_us))
        simulation.finish(self.rank, Lane.SEND, sent.item, sent.start_us)
