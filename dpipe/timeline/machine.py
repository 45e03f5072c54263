"""What the actions of a simulation share: the time, the cores of a host, the egress of a rank."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import count

from dpipe.network.egress import Egress
from dpipe.network.link import Host, Network
from dpipe.schedule.action import Action
from dpipe.timeline.span import Span

Call = Callable[[], None]
Since = Callable[[float], None]  # is told when that which is over began, microseconds


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
    """The cores of one host: as many threads as there are cores run at full speed, more of them
    share it.

    A thread does one thing after the other; a rank that computes may be several.
    """

    def __init__(self, clock: Clock, host: Host) -> None:
        self.host = host
        self._clock = clock
        # By thread its tasks, each with the microseconds that it still needs of a whole core.
        self._threads: dict[Hashable, deque[tuple[float, Call]]] = {}
        self._widths: dict[Hashable, int] = {}  # of those that are as many threads of the system
        self._since_us = 0.0
        self._plans = 0  # as in `Sender`

    def run(
        self,
        thread: Hashable,
        duration_us: float,
        over: Call,
        width: int = 1,
    ) -> None:
        # With one thread more all are slower from now on: what they did so far counts first.
        self._progress()
        tasks = self._threads.setdefault(thread, deque())
        tasks.append((duration_us, over))
        self._widths[thread] = width
        self._plan()

    @property
    def _speed(self) -> float:
        num_threads = sum(self._widths.values())
        return min(1.0, self.host.cores / max(1, num_threads))

    def _progress(self) -> None:
        passed_us = self._clock.now_us - self._since_us
        done_us = passed_us * self._speed
        for tasks in self._threads.values():
            left_us, over = tasks[0]
            tasks[0] = left_us - done_us, over
        self._since_us = self._clock.now_us

    def _plan(self) -> None:
        self._plans += 1
        if self._threads:
            left_us = min(map(self._left_us, self._threads))
            # Rounding in `_progress` may leave a hair less than nothing.
            takes_us = max(0.0, left_us) / self._speed
            over = partial(self._complete, self._plans)
            self._clock.after(takes_us, over)

    def _left_us(self, thread: Hashable) -> float:
        """Of the task that the thread is at."""
        left_us, _ = self._threads[thread][0]
        return left_us

    def _complete(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._progress()
        thread = min(self._threads, key=self._left_us)
        tasks = self._threads[thread]
        _, over = tasks.popleft()
        if not tasks:
            del self._threads[thread], self._widths[thread]
        self._plan()
        over()


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


def handle(
    cores: Cores | None,
    thread: Hashable,
    over: Call,
) -> None:
    """`over` once `thread` has done what it does for any message, whatever its size; nothing where
    it shares no cores.
    """
    if cores is None or not cores.host.message_us:
        over()
    else:
        cores.run(thread, cores.host.message_us, over)


class Sender:
    """The egress of one rank on the simulation's clock, and the work that messages are for the
    hosts of both ends.

    core, sender     [any message][-- its bytes --]    at the same time as the wire: a message has
    wire                          [---- bytes ----]    left when both are over
    core, receiver                :       [-- its bytes --][any message]
                                  <-delay->            and has come when the receiver's work is
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        rank: int,
        cores: Mapping[int, Cores],
    ) -> None:
        self._clock = clock
        self._network = network
        self._rank = rank
        self._cores = cores
        self._egress = Egress[Since](network, rank)
        # An event cannot be taken off the clock: the completion that is due belongs to the latest
        # plan, and those of earlier ones are void when they come.
        self._plans = 0

    def send(
        self,
        target: int,
        num_bytes: int,
        left: Since,
        arrived: Since,
    ) -> None:
        """Queue a message; `left` is called when its last byte is on the wire, `arrived` when it is
        at `target`.
        """
        offer = partial(self._offer, target, num_bytes, left, arrived)
        sender = (self._rank, "to", target)
        handle(self._cores.get(self._rank), sender, offer)

    def _offer(
        self,
        target: int,
        num_bytes: int,
        left: Since,
        arrived: Since,
    ) -> None:
        """The sender has done what it does for any message."""
        link = self._network.link(self._rank, target)
        delay_us = link.delay_us
        receiver = (target, "from", self._rank)

        def landed(start_us: float) -> None:
            over = partial(arrived, start_us)
            handle(self._cores.get(target), receiver, over)

        came = self._with_work(target, receiver, num_bytes, delay_us, landed)

        def gone(start_us: float) -> None:
            arrive = partial(came, start_us + delay_us)
            self._clock.after(delay_us, arrive)
            left(start_us)

        sender = (self._rank, "to", target)
        through = self._with_work(self._rank, sender, num_bytes, 0.0, gone)
        self._egress.offer(target, through, num_bytes, self._clock.now_us)
        self._plan()

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

    def _plan(self) -> None:
        self._plans += 1
        due_us = self._egress.due_us
        assert due_us is not None
        over = partial(self._complete, self._plans)
        self._clock.at(due_us, over)

    def _complete(self, plan: int) -> None:
        if plan != self._plans:
            return
        sent = self._egress.complete()
        if self._egress.due_us is not None:
            self._plan()
        sent.item(sent.start_us)


_Sent = tuple[int, Action]  # the step, and the SEND in it


class Machines:
    """All that the ranks of a simulation share, and what has happened so far."""

    def __init__(
        self,
        network: Network,
        num_ranks: int,
        hosts: Sequence[Host] = (),
    ) -> None:
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
        self._senders: dict[int, Sender] = {}

    def note(self, span: Span, step: int) -> None:
        """`span` is over; it belongs to `step`."""
        self.spans[step].append(span)

    def sender(self, rank: int) -> Sender:
        sender = self._senders.get(rank)
        if sender is None:
            sender = Sender(self.clock, self.network, rank, self.cores)
            self._senders[rank] = sender
        return sender
