"""Several replicas of a pipeline in a simulation: each stage's exchange, message by message, on the
ranks' egress.

    rank 1  compute [1B6][1B7]
            send          [1SEND_B7]
            reduce        [a][b]  [c]   to rank 5: stage 1 of replica 1, of pipelines of 4 ranks.
                                        Each arrives the link's delay later, and lets what waits
                                        for it go.

Where all replicas are alike, and so are their links, one of them is simulated: what it would send
to the replica k further on it gets, at the same moment, from the one k before.
`tests/timeline/test_replicas.py` holds it against the simulation of all.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations, product

from dpipe.errors import ScheduleError
from dpipe.network.link import Network
from dpipe.schedule.action import Action, Op
from dpipe.schedule.exchange import Exchange, Message, Role
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.machine import Machines
from dpipe.timeline.span import Lane, Span


@dataclass(frozen=True)
class Part:
    """Layers that are exchanged as one: a segment, where replicas are cut differently."""

    stages: tuple[int, ...]  # by replica, the one that holds it
    reduce_bytes: int
    gather_bytes: int

    def exchanged_bytes(self, role: Role) -> int:
        return self.reduce_bytes if role is Role.REDUCE else self.gather_bytes


@dataclass(frozen=True)
class Replicas:
    """How the replicas of each stage agree; rank r * P + p is pipeline rank p, of P, in replica r.

    `servers` are the ranks of each stage's server, where the exchange has one: ranks of the
    pipelines or, from R * P on, others. `delayed`: a step uses the gradient of the step before,
    which is exchanged from the step's start. `parts` are what is exchanged, by layer; none where
    replicas are cut alike, so that each stage is a part. Raises `ScheduleError` where the servers
    or the parts do not fit the exchange.
    """

    exchange: Exchange
    servers: tuple[int, ...] = ()
    delayed: bool = False
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        exchange = self.exchange
        for part in self.parts:
            if len(part.stages) != exchange.num_replicas or exchange.has_server:
                raise ScheduleError(
                    f"a part is held by stages {part.stages}, but the exchange {exchange.name!r} "
                    f"is of {exchange.num_replicas} replicas; those with a server have no parts"
                )
        if exchange.has_server != bool(self.servers):
            needs = "needs" if exchange.has_server else "has no"
            raise ScheduleError(
                f"the exchange {exchange.name!r} {needs} servers, got ranks {self.servers}"
            )

    @property
    def count(self) -> int:
        return self.exchange.num_replicas

    def parts_on(self, stage: int, replica: int) -> tuple[int, ...]:
        """What of a stage is exchanged one behind the other, by number."""
        if not self.parts:
            return (stage,)
        held = [number for number, part in enumerate(self.parts) if part.stages[replica] == stage]
        return tuple(reversed(held))

    def stage_of(self, part: int, replica: int) -> int:
        """The stage that holds a part in `replica`, or in the server behind the last one."""
        return self.parts[part].stages[replica] if self.parts else part

    def alike(self, network: Network, per_replica: int) -> bool:
        """Whether every replica would take the same time for the same, so that one stands for
        all.
        """
        if self.parts or not self.exchange.symmetric or network.relayed:
            return False
        if not self._interfaces_alike(network, per_replica):
            return False
        if not network.links:
            return True
        ranks = range(per_replica)
        others = range(1, self.count)
        # Replica 0's own links, and those from it to each other replica; the rest is these, moved.
        pairs = list(permutations(ranks, 2))
        for rank, hop in product(ranks, others):
            peer = rank + hop * per_replica
            pairs.append((rank, peer))
        for pair, replica in product(pairs, others):
            if not self._same(network, per_replica, pair, replica):
                return False
        return True

    def _same(
        self,
        network: Network,
        per_replica: int,
        pair: tuple[int, int],
        replica: int,
    ) -> bool:
        first, second = pair
        source = self.rotated(first, replica, per_replica)
        target = self.rotated(second, replica, per_replica)
        return network.link(source, target) == network.link(first, second)

    def _interfaces_alike(self, network: Network, per_replica: int) -> bool:
        """Whether no replica shares an interface with another, and all share theirs alike."""
        for rank, by in product(range(per_replica), range(self.count)):
            own = network.interface(rank).ranks
            # What comes in from other replicas is seen only where these are simulated as well.
            if max(own) >= per_replica or not math.isinf(network.ingress_gbps(rank)):
                return False
            other = self.rotated(rank, by, per_replica)
            theirs = tuple(self.rotated(each, by, per_replica) for each in own)
            if network.interface(other).ranks != theirs:
                return False
            if not math.isinf(network.ingress_gbps(other)):
                return False
            if network.egress_gbps(other) != network.egress_gbps(rank):
                return False
        return True

    def rotated(self, rank: int, by: int, per_replica: int) -> int:
        """The rank that is to the replica `by` further on what `rank` is to its own."""
        num_ranks = self.count * per_replica
        return (rank + by * per_replica) % num_ranks

    def everyone(self, spans: Sequence[Span], per_replica: int) -> list[Span]:
        """The spans of all replicas, from those of replica 0."""

        everyone = []
        for by in range(self.count):
            for span in spans:
                # A symmetric exchange has no server: whom a rank sends to is a rank.
                peer = span.peer
                if isinstance(peer, int):
                    peer = self.rotated(peer, by, per_replica)
                rank = span.rank + by * per_replica
                moved = span._replace(rank=rank, peer=peer)
                everyone.append(moved)
        return everyone


_PartEnd = tuple[int, int, int]  # step, part, and which end of its exchange
_StageOver = Callable[[int, int], None]  # is told the rank and the stage


@dataclass
class _Held:
    """A stage's exchange that has not begun: messages to neighbours have to leave first."""

    rank: int
    stage: int
    sending: set[tuple[int, Action]]


@dataclass
class _Leg:
    """What one end of an exchange sends in one go, and what it waits for meanwhile."""

    step: int  # whose gradients, or parameters, these are
    part: int  # a stage, unless replicas are cut differently
    end: int  # a replica, or behind them the server
    rank: int  # where that end is
    roles: Set[Role]  # of the messages that it sends
    messages: list[Message]  # to be sent, in order
    over: Callable[[], None]  # called when all has left and come
    missing: set[Message] = field(default_factory=set)  # still to come, once it has started
    position: int = 0  # of the next message to be sent
    leaving: int = 0  # messages queued at the rank's egress

    @property
    def key(self) -> _PartEnd:
        return self.step, self.part, self.end

    @property
    def is_over(self) -> bool:
        """Whether all has left and come."""
        if self.leaving or self.missing:
            return False
        return self.position == len(self.messages)


class StageExchanges:
    """The exchanges of all stages while a schedule unfolds, step after step. With `mirrored`
    replica 0 alone is simulated. `over(rank, stage)` is called when a rank has all that it steps
    by, and `settled(rank, stage)` when it has all that the next step computes with.

    A rank's exchanges go one after another, in the order in which they began; each lets what its
    rank has sent to the pipeline's neighbours leave first: they wait for it, whereas the gradients
    are wanted at the end of the step.
    """

    def __init__(
        self,
        machines: Machines,
        schedule: Schedule,
        cost: Cost,
        replicas: Replicas,
        over: _StageOver,
        settled: _StageOver,
        *,
        mirrored: bool,
    ) -> None:
        self._machines = machines
        self._schedule = schedule
        self._cost = cost
        self._replicas = replicas
        self._over = over
        self._settled = settled
        self._mirrored = mirrored
        self._simulated = 1 if mirrored else replicas.count
        self._exchange = replicas.exchange
        # By step, part and end. A message may come before its receiver has begun the exchange.
        self._arrived: defaultdict[_PartEnd, set[Message]] = defaultdict(set)
        self._queues: defaultdict[int, deque[_Leg]] = defaultdict(deque)
        self._held: list[_Held] = []
        self._serving: dict[tuple[int, int], _Leg] = {}  # by step and stage
        self._reduced: Counter[tuple[int, int, int]] = Counter()  # by step, stage and rank
        self._final: Counter[int] = Counter()  # by step, the stages whose gradients are

    @property
    def delayed(self) -> bool:
        return self._replicas.delayed

    @property
    def after_step(self) -> bool:
        """Whether something is exchanged between the optimizer's step and the next forward."""
        return bool(self._exchange.after_step)

    def begin_step(self, rank: int) -> None:
        """`rank` begins a step. The gradients of the step before may go, with a delay."""
        step = self._machines.step[rank]
        serves = (step, 0) in self._serving
        if self._replicas.servers and not serves:
            self._serve(step)
        if not self._replicas.delayed:
            return
        schedule = self._schedule
        pipeline_rank = rank % schedule.num_ranks
        for action in schedule.programs[pipeline_rank]:
            if action.op is Op.REDUCE_GRAD:
                self._begin(rank, action.stage)

    def _serve(self, step: int) -> None:
        server = self._exchange.num_replicas
        roles = set(Role)
        for stage, rank in enumerate(self._replicas.servers):
            leg = self._leg(step, stage, server, rank, roles)
            self._serving[step, stage] = leg
            self._start(leg)

    def reduce(self, rank: int, stage: int) -> None:
        """The gradient of `stage` is final on `rank`."""
        step = self._machines.step[rank]
        if self._replicas.delayed:
            self._half_done(step, rank, stage)
            return
        # Only what it sends now: its later messages do not hold this exchange up.
        sending = self._machines.sending[rank]
        held = _Held(rank, stage, set(sending))
        self._held.append(held)
        self._final[step] += 1
        self._release()

    def sent(self, rank: int, step: int, action: Action) -> None:
        """A message to a neighbour in the pipeline has left."""
        message = (step, action)
        for held in self._held:
            if held.rank == rank:
                held.sending.discard(message)
        self._release()

    def stepped(self, rank: int, stage: int) -> None:
        """The optimizer's step is done: parameters may go."""
        if not self.after_step:
            return
        step = self._machines.step[rank]
        over = partial(self._settled, rank, stage)
        self._exchange_parts(step, stage, rank, self._exchange.after_step, over)

    def _release(self) -> None:
        waiting = []
        free = []
        for held in self._held:
            if self._may_begin(held):
                free.append(held)
            else:
                waiting.append(held)
        # Set before any begins, which may release others.
        self._held = waiting
        for held in free:
            self._begin(held.rank, held.stage)

    def _may_begin(self, held: _Held) -> bool:
        """Where nothing is overlapped, all pipelines run dry first."""
        if held.sending:
            return False
        if self._exchange.overlapped:
            return True
        step = self._machines.step[held.rank]
        num_gradients = self._schedule.num_stages * self._simulated
        return self._final[step] == num_gradients

    def _begin(self, rank: int, stage: int) -> None:
        step = self._machines.step[rank]
        roles = set(Role) - self._exchange.after_step
        done = partial(self._over, rank, stage)
        if self._replicas.delayed:
            done = partial(self._half_done, step, rank, stage)
        self._exchange_parts(step, stage, rank, roles, done)

    def _exchange_parts(
        self,
        step: int,
        stage: int,
        rank: int,
        roles: Set[Role],
        over: Callable[[], None],
    ) -> None:
        """One behind the other; `over` is called when the last is."""
        end = self._end(rank)
        *others, last = self._replicas.parts_on(stage, end)
        legs = [self._leg(step, part, end, rank, roles) for part in others]
        legs.append(self._leg(step, last, end, rank, roles, over))
        for leg in legs:
            self._enqueue(leg)

    def _half_done(self, step: int, rank: int, stage: int) -> None:
        """With a delay a step waits for this gradient to be made and for the one before to be
        exchanged.
        """
        key = (step, stage, rank)
        self._reduced[key] += 1
        if self._reduced[key] == 2:
            self._over(rank, stage)

    def _end(self, rank: int) -> int:
        return rank // self._schedule.num_ranks

    def _leg(
        self,
        step: int,
        part: int,
        end: int,
        rank: int,
        roles: Set[Role],
        over: Callable[[], None] = lambda: None,
    ) -> _Leg:
        program = self._exchange.programs[end]
        messages = [message for message in program if message.role in roles]
        return _Leg(
            step,
            part,
            end,
            rank,
            roles,
            messages,
            over,
        )

    def _enqueue(self, leg: _Leg) -> None:
        queue = self._queues[leg.rank]
        queue.append(leg)
        if len(queue) == 1:
            self._start(leg)

    def _start(self, leg: _Leg) -> None:
        arrived = self._arrived[leg.key]
        for message in self._exchange.arrivals[leg.end]:
            if message.role in leg.roles and message not in arrived:
                leg.missing.add(message)
        self._advance(leg)

    def _advance(self, leg: _Leg) -> None:
        """Send what may go; a rank whose leg is over goes on with its next one."""
        while (index := self._next(leg)) is not None:
            message = leg.messages.pop(index)
            leg.messages.insert(leg.position, message)
            leg.position += 1
            self._send(leg, message)
        if leg.is_over:
            self._close(leg)

    def _next(self, leg: _Leg) -> int | None:
        """Which message goes next: they keep their order, but a stale server answers each replica
        by itself.
        """
        arrived = self._arrived[leg.key]
        waits = self._exchange.waits
        end = len(leg.messages)
        if not self._exchange.stale:
            end = min(end, leg.position + 1)
        for index in range(leg.position, end):
            message = leg.messages[index]
            if arrived >= waits[message]:
                return index
        return None

    def _close(self, leg: _Leg) -> None:
        queue = self._queues[leg.rank]
        # A server's leg is in no queue: it serves all replicas while its rank goes on.
        if queue and queue[0] is leg:
            queue.popleft()
            leg.over()
            # `over` may itself have queued the next one, which is then under way.
            if queue and queue[0].position == 0:
                self._start(queue[0])

    def _send(self, leg: _Leg, message: Message) -> None:
        target = self._rank_of(leg.part, message.target)
        arrive = partial(self._arrive, leg, message)
        if target == leg.rank:  # a server within the rank
            self._machines.clock.after(0.0, arrive)
            return
        leg.leaving += 1
        size = self._num_bytes(leg.part, message)
        stage = self._replicas.stage_of(leg.part, leg.end)

        def left(start_us: float) -> None:
            action = Action(stage, Op.REDUCE_GRAD)
            end_us = self._machines.clock.now_us
            span = Span(
                leg.rank,
                Lane.REDUCE,
                action,
                start_us,
                end_us,
                size,
                peer=target,
            )
            self._note(leg, span)
            leg.leaving -= 1
            self._advance(leg)

        wires = self._machines.wires
        wires.send(leg.rank, target, size, left, lambda _: arrive())

    def _note(self, leg: _Leg, span: Span) -> None:
        """As a run does, which reads at the end of a step what has been exchanged in it."""
        steps = self._machines.step
        # A server behind the last rank runs no program: it is at no step of its own.
        step = leg.step
        if leg.rank < len(steps):
            step = steps[leg.rank]
        self._machines.note(span, step)

    def sent_bytes(self, rank: int, stage: int) -> int:
        """What the exchange of `stage` puts on the egress of `rank`."""
        end = self._end(rank)
        parts = self._replicas.parts_on(stage, end)
        sent_bytes = 0
        for part, message in product(parts, self._exchange.programs[end]):
            target = self._rank_of(part, message.target)
            if target != rank:
                sent_bytes += self._num_bytes(part, message)
        return sent_bytes

    def _num_bytes(self, part: int, message: Message) -> int:
        if self._replicas.parts:
            part_bytes = self._replicas.parts[part].exchanged_bytes(message.role)
        else:
            part_bytes = self._cost.exchanged_bytes(part, message.role)
        return self._exchange.num_bytes(message, part_bytes)

    def _rank_of(self, part: int, end: int) -> int:
        if end == self._exchange.num_replicas:
            return self._replicas.servers[part]
        stage = self._replicas.stage_of(part, end)
        first_of_replica = end * self._schedule.num_ranks
        return first_of_replica + self._schedule.rank_of_stage[stage]

    def _arrive(self, sender: _Leg, message: Message) -> None:
        if self._mirrored:
            # What would come from the replica before, which replica 0 sends to the one after.
            message = self._exchange.rotated(message, -message.target)
        key = (sender.step, sender.part, message.target)
        self._arrived[key].add(message)
        leg = self._leg_of(*key)
        if leg is not None:
            leg.missing.discard(message)
            self._advance(leg)

    def _leg_of(self, step: int, part: int, end: int) -> _Leg | None:
        """What the end is at; None where its rank is at another part, or has not begun."""
        if end == self._exchange.num_replicas:
            return self._serving.get((step, part))
        rank = self._rank_of(part, end)
        queue = self._queues[rank]
        if not queue:
            return None
        leg = queue[0]
        if (leg.step, leg.part) == (step, part):
            return leg
        return None
