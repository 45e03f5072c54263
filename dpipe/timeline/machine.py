"""What the actions of a simulation share: the time, the cores of a host, the interfaces of
machines.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from dpipe.network.egress import Egress, Ingress, Inside
from dpipe.network.link import Host, Network
from dpipe.network.shared_rate import SharedRate
from dpipe.schedule.action import Action
from dpipe.timeline.span import Span

Call = Callable[[], None]
Item = TypeVar("Item")
Since = Callable[[float], None]  # is told when that which is over began, microseconds


_TICK_US = 4_000.0  # of Linux's clock, 250 times a second, when cores take threads from each other
_RELAY = 0  # the rank on whose machine the coordinator is

_Thread = tuple[Hashable, int]  # of the system: whose, and which of them
_Event = tuple[float, int, Call]  # when, and which request it is


class Clock:
    """Calls what is due, in order of time, and of request among equals, until it is stopped."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.stopped = False
        self._events: list[_Event] = []
        self._requests = count()

    def at(self, time_us: float, call: Call) -> None:
        # Calls do not compare: at the same time the one that was asked for first goes first.
        number = next(self._requests)
        event = (time_us, number, call)
        heapq.heappush(self._events, event)

    def after(self, delay_us: float, call: Call) -> None:
        self.at(self.now_us + delay_us, call)

    def run(self) -> None:
        while self._events and not self.stopped:
            self.now_us, _, call = heapq.heappop(self._events)
            call()


class Cores:
    """The cores of one host. A thread is on one of them, and shares it equally with those that are
    there too.

    A thread that begins to work goes to where it was last; if that core has something to do and
    another has not, to the other. It then stays: where cores pause for less than half a millisecond
    at a time, Linux leaves a thread that waits where it is until the next tick of its clock, though
    another core has nothing to do. Where they pause for longer a tick is little.

        core 0  [A      ][A and C, half each            ][A
        core 1  [B                ]                      [C
                         ^ C begins, no core is free     ^ half a tick after B has ended

    A thread does one thing after the other; a rank that computes may be several.
    """

    def __init__(self, clock: Clock, host: Host) -> None:
        self.host = host
        self._clock = clock
        # By thread its tasks, each with the microseconds that it still needs of a whole core.
        self._tasks: dict[_Thread, deque[tuple[float, Call]]] = {}
        self._places: dict[_Thread, int] = {}  # the core where it is, or was
        self._since_us = 0.0
        self._uneven_us: float | None = None  # since when a core has two threads more than another
        self._plans = 0  # as in `_OnClock`

    def run(self, thread: Hashable, duration_us: float, over: Call, width: int = 1) -> None:
        """`over` once `thread` has computed for so long: all of its `width` threads of the
        system.
        """
        # With one thread more others are slower from now on: what they did so far counts first.
        self._progress()
        ended = _after_all(width, over)
        for number in range(width):
            self._begin((thread, number), duration_us, ended)
        self._plan()

    def _begin(self, thread: _Thread, duration_us: float, over: Call) -> None:
        if thread not in self._tasks:
            self._places[thread] = self._place_for(thread)
            self._tasks[thread] = deque()
        self._tasks[thread].append((duration_us, over))

    def _place_for(self, thread: _Thread) -> int:
        threads = self._threads_by_core()
        idlest = threads.index(min(threads))
        last = self._places.get(thread, idlest)
        return last if threads[idlest] else idlest

    def _threads_by_core(self) -> list[int]:
        threads = [0] * math.ceil(self.host.cores)
        for thread in self._tasks:
            threads[self._places[thread]] += 1
        return threads

    def _speeds(self) -> dict[_Thread, float]:
        threads = self._threads_by_core()
        num_busy = sum(map(bool, threads))
        # 1.5 cores: a thread has one, two have three quarters each.
        of_core = min(1.0, self.host.cores / max(1, num_busy))
        speeds = {}
        for thread in self._tasks:
            speeds[thread] = of_core / threads[self._places[thread]]
        return speeds

    def _progress(self) -> None:
        passed_us = self._clock.now_us - self._since_us
        for thread, speed in self._speeds().items():
            tasks = self._tasks[thread]
            left_us, over = tasks[0]
            tasks[0] = left_us - passed_us * speed, over
        self._since_us = self._clock.now_us

    def _plan(self) -> None:
        self._plans += 1
        even_us = self._even_after_us()
        if not self._tasks:
            return
        _, takes_us = self._next()
        if takes_us <= even_us:
            self._clock.after(takes_us, partial(self._complete, self._plans))
        else:
            self._clock.after(even_us, partial(self._even, self._plans))

    def _next(self) -> tuple[_Thread, float]:
        """The thread that completes what it is at, and in how many microseconds."""
        takes_us = {}
        for thread, speed in self._speeds().items():
            left_us, _ = self._tasks[thread][0]
            # Rounding in `_progress` may leave a hair less than nothing.
            takes_us[thread] = max(0.0, left_us) / speed
        first = min(takes_us, key=lambda thread: takes_us[thread])
        return first, takes_us[first]

    def _even_after_us(self) -> float:
        """When a core takes a thread from another, if nothing happens before."""
        threads = self._threads_by_core()
        if max(threads) - min(threads) < 2:
            self._uneven_us = None
            return math.inf
        now_us = self._clock.now_us
        if self._uneven_us is None:
            self._uneven_us = now_us
        return max(0.0, self._uneven_us + _TICK_US / 2 - now_us)

    def _even(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._progress()
        threads = self._threads_by_core()
        fullest = threads.index(max(threads))
        *_, latest = (thread for thread in self._tasks if self._places[thread] == fullest)
        self._places[latest] = threads.index(min(threads))
        self._uneven_us = None
        self._plan()

    def _complete(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._progress()
        thread, _ = self._next()
        tasks = self._tasks[thread]
        _, over = tasks.popleft()
        if not tasks:
            del self._tasks[thread]
        self._plan()
        over()


def _after_all(number: int, over: Call) -> Call:
    """To be called so many times: the last time it calls `over`."""
    calls = count(1)

    def call() -> None:
        if next(calls) == number:
            over()

    return call


class _Both:
    """Goes on when a message's bytes are through and a core has seen to them, whichever is
    later.
    """

    def __init__(self, over: Since) -> None:
        self._over = over
        self._start_us: float | None = None
        self._worked = False

    def moved(self, start_us: float) -> None:
        self._start_us = start_us
        self._go_on()

    def worked(self) -> None:
        self._worked = True
        self._go_on()

    def _go_on(self) -> None:
        if self._worked and self._start_us is not None:
            self._over(self._start_us)


def handle(cores: Cores | None, thread: Hashable, over: Call) -> None:
    """`over` once `thread` has done what it does for any message, whatever its size; nothing where
    it shares no cores.
    """
    if cores is None or not cores.host.message_us:
        over()
    else:
        cores.run(thread, cores.host.message_us, over)


@dataclass(slots=True)
class _Message:
    left: Since  # called when its last bit has left
    begun: Sequence[Call] = ()  # called when its first bit has


def _begin(message: _Message) -> None:
    for call in message.begun:
        call()


class _OnClock(Generic[Item]):
    """A rate that messages share, on the simulation's clock."""

    def __init__(
        self,
        clock: Clock,
        rate: SharedRate[Item],
        through: Callable[[Item, float], None],
    ) -> None:
        """`through` gets each message that is through, and when its first bit was."""
        self._clock = clock
        self._rate = rate
        self._through = through
        # An event cannot be taken off the clock: the completion that is due belongs to the latest
        # plan, and those of earlier ones are void when they come.
        self._plans = 0

    def offer(self, source: int, target: int, item: Item, num_bytes: int) -> None:
        self._rate.offer(source, target, item, num_bytes, self._clock.now_us)
        self._plan()

    def _plan(self) -> None:
        self._plans += 1
        due_us = self._rate.due_us
        plan = self._plans
        assert due_us is not None
        self._clock.at(due_us, lambda: self._complete(plan))

    def _complete(self, plan: int) -> None:
        if plan != self._plans:
            return
        sent = self._rate.complete()
        if self._rate.due_us is not None:
            self._plan()
        self._through(sent.item, sent.start_us)


@dataclass(frozen=True, slots=True)
class _Stop:
    """A rate that a message shares with others behind its sender's interface."""

    after_us: float  # when its first bit is there
    # As that of `_OnClock`; calls what it is given once the message is through.
    offer: Callable[[int, int, Call, int], None]


@dataclass(frozen=True, slots=True)
class _Way:
    """What lies between two ranks."""

    delay_us: float
    lossy: bool
    egress: _OnClock[_Message]
    stops: tuple[_Stop, ...]


class Wires:
    """What ranks send each other, on the simulation's clock, and the work that messages are for the
    hosts of both ends.

    core, sender     [any message][-- its bytes --]
    egress                        [---- bytes ----]
    core, receiver                :       [-- its bytes --]   [any message]
    ingress                       :       [----- bytes ------]
                                  <-delay->

    What is drawn above each other is done at the same time: a message has left when both are over,
    and it has come when the receiver has done for it what it does for any.
    """

    def __init__(self, clock: Clock, network: Network, cores: Mapping[int, Cores]) -> None:
        self._clock = clock
        self._network = network
        self._cores = cores
        # By the ranks of a machine.
        self._egress: dict[tuple[int, ...], _OnClock[_Message]] = {}
        self._ingress: dict[tuple[int, ...], _OnClock[Call]] = {}
        self._ways: dict[tuple[int, int], _Way] = {}  # from rank, to rank

    def send(self, source: int, target: int, num_bytes: int, left: Since, arrived: Since) -> None:
        """Queue a message; `left` is called when its last byte is on the wire, `arrived` when it is
        at `target`.
        """
        offer = partial(self._offer, source, target, num_bytes, left, arrived)
        handle(self._cores.get(source), (source, "to", target), offer)

    def _offer(self, source: int, target: int, num_bytes: int, left: Since, arrived: Since) -> None:
        """The sender has done what it does for any message."""
        way = self._way(source, target)
        delay_us = way.delay_us
        if way.lossy:
            delay_us = self._network.delay_us(source, target, num_bytes)
        receiver = (target, "from", source)

        def landed(start_us: float) -> None:
            over = partial(arrived, start_us)
            handle(self._cores.get(target), receiver, over)

        came = self._with_work(target, receiver, num_bytes, delay_us, landed)
        begun: list[Call] = []
        for stop in way.stops:
            passed = _Both(came)
            came = passed.moved
            offer = partial(stop.offer, source, target, passed.worked, num_bytes)
            reach = partial(self._clock.after, stop.after_us, offer)
            begun.append(reach)

        def gone(start_us: float) -> None:
            arrive = partial(came, start_us + delay_us)
            self._clock.after(delay_us, arrive)
            left(start_us)

        sender = (source, "to", target)
        through = self._with_work(source, sender, num_bytes, 0.0, gone)
        message = _Message(through, begun)
        way.egress.offer(source, target, message, num_bytes)

    def _way(self, source: int, target: int) -> _Way:
        if (source, target) not in self._ways:
            link = self._network.link(source, target)
            self._ways[source, target] = _Way(
                link.delay_us,
                lossy=link.loss_percent > 0,
                egress=self._egress_of(source, target),
                stops=tuple(self._stops(source, target, link.delay_us)),
            )
        return self._ways[source, target]

    def _stops(self, source: int, target: int, delay_us: float) -> Iterator[_Stop]:
        """The interfaces that a message passes behind its sender's, all at once: its first bit is
        sent on before its last is there.
        """
        network = self._network
        ends = source, target
        if ends in network.relayed:
            half_way_us = delay_us / 2
            yield from self._taking_in(source, _RELAY, half_way_us)
            egress = self._egress_of(_RELAY, target)
            send_on = partial(self._send_on, egress, half_way_us)
            yield _Stop(half_way_us, send_on)
        yield from self._taking_in(source, target, delay_us)

    def _taking_in(self, source: int, rank: int, after_us: float) -> Iterator[_Stop]:
        """At the machine of `rank`, unless nothing but links bounds what it takes in."""
        network = self._network
        if network.share_machine(source, rank):
            return
        ingress_gbps = network.ingress_gbps(rank)
        if math.isinf(ingress_gbps):
            return
        ingress = self._ingress_of(rank)
        yield _Stop(after_us, ingress.offer)

    def _send_on(
        self,
        egress: _OnClock[_Message],
        delay_us: float,
        source: int,
        target: int,
        over: Call,
        num_bytes: int,
    ) -> None:
        def gone(start_us: float) -> None:
            self._clock.after(delay_us, over)

        message = _Message(gone)
        egress.offer(source, target, message, num_bytes)

    def _egress_of(self, source: int, target: int) -> _OnClock[_Message]:
        network = self._network
        if network.share_machine(source, target):
            inside: Inside[_Message] = Inside(network, source, target)
            return _OnClock(self._clock, inside, _leave)
        machine = network.interface(source).ranks
        if machine not in self._egress:
            egress: Egress[_Message] = Egress(network, source, _begin)
            self._egress[machine] = _OnClock(self._clock, egress, _leave)
        return self._egress[machine]

    def _ingress_of(self, rank: int) -> _OnClock[Call]:
        network = self._network
        machine = network.interface(rank).ranks
        if machine not in self._ingress:
            ingress: Ingress[Call] = Ingress(network, rank)
            self._ingress[machine] = _OnClock(self._clock, ingress, _taken_in)
        return self._ingress[machine]

    def _with_work(
        self,
        rank: int,
        thread: Hashable,
        num_bytes: int,
        after_us: float,
        over: Since,
    ) -> Since:
        """`over`, to be told that the bytes are through, but not before `rank` has done its work on
        them.
        """
        cores = self._cores.get(rank)
        if cores is None:
            return over
        work_us = cores.host.bytes_us(num_bytes)
        if not work_us:
            return over
        both = _Both(over)
        work = partial(cores.run, thread, work_us, both.worked)
        self._clock.after(after_us, work)
        return both.moved


def _leave(message: _Message, start_us: float) -> None:
    message.left(start_us)


def _taken_in(over: Call, _: float) -> None:
    over()


_Sent = tuple[int, Action]  # the step, and the SEND in it


class Machines:
    """All that the ranks of a simulation share, and what has happened so far."""

    def __init__(self, network: Network, num_ranks: int, hosts: Sequence[Host] = ()) -> None:
        self.clock = Clock()
        self.network = network
        self.step = [0] * num_ranks  # by rank, which step it is at
        self.spans: defaultdict[int, list[Span]] = defaultdict(list)  # by step
        self.cores: dict[int, Cores] = {}  # by rank, of those that share a host's
        for host in hosts:
            cores = Cores(self.clock, host)
            self.cores |= dict.fromkeys(host.ranks, cores)
        # By rank, its messages to neighbours in the pipeline that have not left, with their step.
        self.sending: defaultdict[int, set[_Sent]] = defaultdict(set)
        self.wires = Wires(self.clock, network, self.cores)

    def note(self, span: Span, step: int) -> None:
        """`span` is over; it belongs to `step`."""
        self.spans[step].append(span)
