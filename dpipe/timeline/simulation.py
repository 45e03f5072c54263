"""The model of what happens when ranks run a schedule on a network, step after step.

The model, event by event:

- A rank runs its program in order, one compute action at a time; it waits where
  `Schedule.requires()` is not met.
- Sends and receives do not hold it up. The messages of one directed link go one after another, in
  program order.
- A message takes bytes / bandwidth to put on the wire, then the link's delay to arrive. Links are
  full duplex.
- A machine's egress sends one message after another, whoever they are for: `tc` shapes an
  interface (`Egress`). Its ranks share it. So they do the ingress, where one is known: machines
  that send to it at once share that (`Ingress`). What its ranks send each other passes neither.
- Where packets are lost, a connection is slower and a message later (`Link`).
- A message does not wait for its receive to be posted. It costs neither end anything, unless their
  host says so; a ballot and a verdict are messages too.
- Ranks have a processor each, unless they share a host's cores, with each other and with messages:
  a thread is on one core, and shares that (`Cores`).
- A tensor-parallel group computes with all its threads. In an exchange one of them works at a time,
  because each waits for what another has sent.
- Replicas of the pipeline run the same schedule; what their stages exchange shares the same egress
  (`exchanges.py`).
- At VOTE a rank waits for the ballots of all ranks, where the update needs them (`votes.py`).
- A rank votes when all that it sent in the step has left: so does a run, to show a step's error in
  that step.
- It begins a step when it has ended the one before, with what it does between two steps: it reads
  data and writes a log. A stage's F waits for its parameters where
  replicas exchange them after the optimizer's step.

    rank 0  compute [0F0][0F1]              rank 1  compute     :  :wait[1F0]
            send         [0SEND_F0]                 recv        :[1RECV_F0]
                                                                 ^ the link's delay after the send
                                                                 began
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from operator import lt
from typing import assert_never

from dpipe.schedule.action import RECVS, SENDS, Action, Op
from dpipe.schedule.check import check
from dpipe.schedule.links import counterpart
from dpipe.schedule.two_versions import opening
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import StageExchanges
from dpipe.timeline.machine import Call, Clock, Cores, Machines
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.span import Lane, Span, Timeline
from dpipe.timeline.votes import Votes, vote_delays_us

_StepOfReplica = tuple[int, int]
_OfStep = tuple[int, Action]
_Piece = tuple[float, int]  # of a computation: microseconds of a core, and on how many


class Simulation:
    """The ranks and their links while a schedule unfolds, `num_steps` times at most; makes the
    spans.

    The coordinator's own rank has its verdict one delay before all others, so that its replica is
    unlike the others. `mirrors_votes` takes it to be like them: one replica is simulated then, and
    the step time comes out at most that delay too long.
    """

    def __init__(
        self, scenario: Scenario, num_steps: int = 1, *, mirrors_votes: bool = False
    ) -> None:
        self.scenario = scenario
        self.schedule = scenario.schedule
        self.cost = scenario.cost  # of an exchange; all else differs by replica
        votes_differ = scenario.ballots is not None and not mirrors_votes
        told_apart = scenario.hosts or votes_differ
        self.mirrored = not told_apart and scenario.replicas_are_alike
        self.programs = self.schedule.programs * self._num_simulated
        self.num_steps = num_steps
        num_ranks = len(self.programs)
        self.machines = Machines(scenario.network, num_ranks, scenario.hosts)
        # By rank, when it began each step, and in the end when it would have begun one more.
        self.starts_us: list[list[float]] = [[] for _ in self.programs]
        # By step and replica.
        self.done: defaultdict[_StepOfReplica, set[Action]] = defaultdict(set)
        self.position = [0] * num_ranks
        # When the rank ran out of work; None while it computes.
        self.idle_since: list[float | None] = [None] * num_ranks
        # What the rank's next action still lacks, and of which step.
        self.awaited: list[set[_OfStep]] = [set() for _ in self.programs]
        # By rank, the STEPs after which parameters are still exchanged.
        self.unsettled: list[set[Action]] = [set() for _ in self.programs]
        self._begin_ahead()
        self.exchanges = self._stage_exchanges()
        self.votes: dict[int, Votes] = {}  # by step

    def _begin_ahead(self) -> None:
        """What a schedule that runs ahead has done before its first step is done at once, and its
        messages have arrived.
        """
        if not self.schedule.runs_ahead:
            return
        done = set()
        for action in opening(self.schedule).index:
            own, _ = self.schedule.in_its_step(action)
            done.add(own)
            if own.op in SENDS:
                arrived = counterpart(own, self.schedule.num_stages)
                done.add(arrived)
        for replica in range(self._num_simulated):
            self.done[0, replica] |= done

    @property
    def clock(self) -> Clock:
        return self.machines.clock

    @property
    def _num_simulated(self) -> int:
        """Replicas."""
        replicas = self.scenario.replicas
        if replicas is None or self.mirrored:
            return 1
        return replicas.count

    def cost_at(self, rank: int) -> Cost:
        """What actions take and send on `rank`."""
        return self.scenario.cost_of(rank // self.schedule.num_ranks)

    @cached_property
    def vote_delays_us(self) -> list[tuple[float, float]]:
        """By rank, of its ballot and of the verdict. A replica that stands for all is one that the
        coordinator is not in.
        """
        ballots = self.scenario.ballots
        if ballots is None:
            return []
        ranks = range(len(self.programs))
        if self.mirrored:
            elsewhere = self.schedule.num_ranks
            return [vote_delays_us(ballots, elsewhere)] * len(ranks)
        return [vote_delays_us(ballots, rank) for rank in ranks]

    def _stage_exchanges(self) -> StageExchanges | None:
        replicas = self.scenario.replicas
        if replicas is None:
            return None
        return StageExchanges(
            self.machines,
            self.schedule,
            self.cost,
            replicas,
            self._reduced,
            self._settled,
            mirrored=self.mirrored,
        )

    def run(self, starts_us: Sequence[float] = ()) -> None:
        """Run all steps. `starts_us` is when each rank begins; by default all do at once."""
        if not starts_us:
            starts_us = [0.0 for _ in self.programs]
        for rank, start_us in enumerate(starts_us):
            begin = partial(self._begin, rank)
            self.clock.at(start_us, begin)
        self.clock.run()
        if not self.clock.stopped and self._is_stuck:
            check(self.schedule)  # says which action on which rank waits for what

    @property
    def _is_stuck(self) -> bool:
        """Nothing is due any more: whether a rank still has something to do."""
        lengths = map(len, self.programs)
        return any(map(lt, self.position, lengths))

    def timeline(self, step: int) -> Timeline:
        """The spans of one step."""
        per_replica = self.schedule.num_ranks
        spans = self.machines.spans[step]
        replicas = self.scenario.replicas
        if replicas is None:
            return Timeline(per_replica, tuple(spans))
        if self.mirrored:
            spans = replicas.everyone(spans, per_replica)
        num_replicas = replicas.count
        num_ranks = per_replica * num_replicas
        return Timeline(num_ranks, tuple(spans), num_replicas)

    def _begin(self, rank: int) -> None:
        self.idle_since[rank] = self.clock.now_us
        self.begin_step(rank)
        self._prepare(rank)
        self.advance(rank)

    def _prepare(self, rank: int) -> None:
        """Keep an idle rank for what it does between two steps."""
        pipeline_rank = rank % self.schedule.num_ranks
        first = self.schedule.of_rank(pipeline_rank, Op.VOTE)
        takes_us = self.cost_at(rank).between_us[first.stage]
        if not takes_us:
            return
        start_us = self.clock.now_us
        self.idle_since[rank] = None

        def over() -> None:
            self.idle_since[rank] = self.clock.now_us
            self._note(rank, Lane.BETWEEN, first, start_us)
            self.advance(rank)

        self._occupy(rank, takes_us, over)

    def _occupy(self, rank: int, takes_us: float, over: Call) -> None:
        """Keep the thread of `rank` that computes for so long; longer where it shares cores."""
        cores = self.machines.cores.get(rank)
        if cores is not None and cores.host.computes:
            cores.run(rank, takes_us, over, cores.host.threads)
        else:
            self.clock.after(takes_us, over)

    def begin_step(self, rank: int) -> None:
        """`rank` begins the step that it is at."""
        self.starts_us[rank].append(self.clock.now_us)
        if self.exchanges is not None:
            self.exchanges.begin_step(rank)

    def _is_over(self, step: int) -> bool:
        """Whether all ranks have ended it."""
        num_begun = min(map(len, self.starts_us))
        return num_begun > step + 1

    def _end_step(self, rank: int) -> None:
        """The program of `rank` has ended: it begins the next step, if there is one."""
        step = self.machines.step[rank]
        if step + 1 < self.num_steps:
            self.machines.step[rank] += 1
            self.position[rank] = 0
            self.begin_step(rank)
            self._prepare(rank)
        else:
            self.starts_us[rank].append(self.clock.now_us)
            self.idle_since[rank] = None
        if self._is_over(step):
            self.ended(step)

    def ended(self, step: int) -> None:
        """All ranks have ended `step`."""

    def finish(
        self,
        rank: int,
        lane: Lane,
        action: Action,
        start_us: float,
        step: int | None = None,
    ) -> None:
        """`action` is over, of the step that its rank is at unless given; its rank may have waited
        for it.
        """
        if step is None:
            step = self.machines.step[rank]
        end_us = self.clock.now_us
        cost = self.cost_at(rank)
        num_bytes = cost.num_bytes(action)
        span = Span(rank, lane, action, start_us, end_us, num_bytes)
        self.machines.note(span, step)
        self.complete(rank, action, step)

    def complete(self, rank: int, action: Action, step: int) -> None:
        replica = rank // self.schedule.num_ranks
        own, ahead = self.schedule.in_its_step(action)
        self.done[step + ahead, replica].add(own)
        self._arrived(rank, own, step + ahead)

    def _complete_now(self, rank: int, action: Action) -> None:
        """Complete an action of the step that `rank` is at."""
        step = self.machines.step[rank]
        self.complete(rank, action, step)

    def _arrived(self, rank: int, action: Action, step: int) -> None:
        """What an idle rank may have waited for."""
        awaited = self.awaited[rank]
        awaited.discard((step, action))
        idle = self.idle_since[rank] is not None
        if idle and not awaited:
            self.advance(rank)

    def advance(self, rank: int) -> None:
        """Go on with the programs of an idle rank until it computes or has to wait."""
        program = self.programs[rank]
        while self.idle_since[rank] is not None:
            position = self.position[rank]
            if position == len(program):
                self._end_step(rank)
                continue
            action = program[position]
            # A receive is posted, and what needs its message waits, not the rank.
            if action.op not in RECVS:
                lacking = self._lacking(rank, action)
                self.awaited[rank] = lacking
                if lacking:
                    return
            self.position[rank] = position + 1
            self.start(rank, action)

    def _lacking(self, rank: int, action: Action) -> set[_OfStep]:
        own, ahead = self.schedule.in_its_step(action)
        step = self.machines.step[rank] + ahead
        replica = rank // self.schedule.num_ranks
        done = self.done[step, replica]
        requires = self.schedule.requires(own)
        lacking = set()
        for need in requires:
            if need not in done:
                lacking.add((step, need))
        unsettled = self.unsettled[rank]
        if action.op is Op.F and unsettled:
            # The STEP of the step before, whose parameters this forward computes with.
            update = Action(action.stage, Op.STEP)
            if update in unsettled:
                lacking.add((step, update))
        if action.op is Op.VOTE:
            lacking |= self.machines.sending[rank]
        return lacking

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
                self._complete_now(rank, action)
            case Op.REDUCE_GRAD:
                if self.exchanges is None:
                    self.finish(rank, Lane.REDUCE, action, self.clock.now_us)
                else:
                    self.exchanges.reduce(rank, action.stage)
            case Op.VOTE:
                self._waited(rank, action)
                if self.cost_at(rank).duration_us(action):
                    self.compute(rank, action)
                else:
                    self._vote(rank, action)
            case _:
                assert_never(action.op)

    def compute(self, rank: int, action: Action) -> None:
        """Keep an idle rank for as long as `action` takes."""
        start_us = self.clock.now_us
        self._waited(rank, action)
        self.idle_since[rank] = None
        over = partial(self._computed, rank, action, start_us)
        cores = self.machines.cores.get(rank)
        if cores is not None and cores.host.computes:
            pieces = self._pieces(rank, action, cores.host.threads)
            _go_through(cores, rank, pieces, over)
        else:
            self._occupy(rank, self.cost_at(rank).duration_us(action), over)

    def _pieces(self, rank: int, action: Action, threads: int) -> Iterator[_Piece]:
        """What `action` does on shared cores, one after the other:

        threads of the group, 2   [compute][exchange][compute][exchange][compute]
                                  [compute]          [compute]          [compute]
        """
        cost = self.cost_at(rank)
        all_us = cost.duration_us(action)
        exchange_us = cost.exchange_us(action)
        number = cost.exchanges[action.stage] if exchange_us else 0
        own_us = (all_us - exchange_us) / (number + 1)
        yield own_us, threads
        for _ in range(number):
            yield exchange_us / number, 1
            yield own_us, threads

    def _computed(self, rank: int, action: Action, start_us: float) -> None:
        self.idle_since[rank] = self.clock.now_us
        if action.op is Op.VOTE:
            self._note(rank, Lane.UPDATE, action, start_us)
            self._vote(rank, action)
            return
        updates = action.op is Op.STEP
        if updates and self.exchanges is not None:
            if self.exchanges.after_step:
                self.unsettled[rank].add(action)
            self.exchanges.stepped(rank, action.stage)
        lane = Lane.UPDATE if updates else Lane.COMPUTE
        self.finish(rank, lane, action, start_us)

    def _note(self, rank: int, lane: Lane, action: Action, start_us: float) -> None:
        """A span that is over, though `action` may not be."""
        end_us = self.clock.now_us
        span = Span(rank, lane, action, start_us, end_us)
        step = self.machines.step[rank]
        self.machines.note(span, step)

    def _waited(self, rank: int, action: Action) -> None:
        """An idle rank goes on with `action`."""
        since = self.idle_since[rank]
        now_us = self.clock.now_us
        if since is not None and since < now_us:
            self._note(rank, Lane.WAIT, action, since)
            self.idle_since[rank] = now_us

    def _send(self, rank: int, action: Action) -> None:
        schedule = self.schedule
        receive = counterpart(action, schedule.num_stages)
        pipeline_rank = rank % schedule.num_ranks
        first_of_replica = rank - pipeline_rank
        receiver = schedule.rank_of_stage[receive.stage]
        target = first_of_replica + receiver
        step = self.machines.step[rank]
        own, ahead = schedule.in_its_step(action)
        message = (step + ahead, own)
        sending = self.machines.sending[rank]
        sending.add(message)

        def left(start_us: float) -> None:
            sending.remove(message)
            if self.exchanges is not None:
                self.exchanges.sent(rank, *message)
            self.finish(rank, Lane.SEND, action, start_us, step)

        arrived = partial(self.finish, target, Lane.RECV, receive, step=step)
        cost = self.cost_at(rank)
        num_bytes = cost.num_bytes(action)
        self.machines.wires.send(rank, target, num_bytes, left, arrived)

    def _reduced(self, rank: int, stage: int) -> None:
        reduce = Action(stage, Op.REDUCE_GRAD)
        self._complete_now(rank, reduce)

    def _settled(self, rank: int, stage: int) -> None:
        """The parameters of the step before are there."""
        update = Action(stage, Op.STEP)
        self.unsettled[rank].discard(update)
        step = self.machines.step[rank]
        self._arrived(rank, update, step)

    def _vote(self, rank: int, action: Action) -> None:
        step = self.machines.step[rank]
        if self.scenario.ballots is None:
            self.complete(rank, action, step)
            return
        if step not in self.votes:
            self.votes[step] = Votes(self.machines, self.vote_delays_us, self._voted)
        self.votes[step].cast(rank)

    def _voted(self, rank: int) -> None:
        pipeline_rank = rank % self.schedule.num_ranks
        vote = self.schedule.of_rank(pipeline_rank, Op.VOTE)
        self._waited(rank, vote)
        self._complete_now(rank, vote)


def _go_through(cores: Cores, rank: int, pieces: Iterator[_Piece], over: Call) -> None:
    """`over` once `rank` has done all `pieces`, each when the one before it is."""
    piece = next(pieces, None)
    if piece is None:
        over()
        return
    takes_us, width = piece
    following = partial(_go_through, cores, rank, pieces, over)
    cores.run(rank, takes_us, following, width)
