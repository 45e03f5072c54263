"""What the actions of a simulation share: the time, the cores of a host, the egress of a rank."""

import heapq
from collections.abc import Callable
from itertools import count

from dpipe.topology import Egress, Host, Network, Sent

Call = Callable[[], None]
Since = Callable[[float], None]  # is told when that which is over began, microseconds


class Clock:
    """Calls what is due, in order of time, and of request among equals."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._events: list[tuple[float, int, Call]] = []
        self._requests = count()

    def at(self, time_us: float, call: Call) -> None:
        heapq.heappush(self._events, (time_us, next(self._requests), call))

    def run(self) -> None:
        while self._events:
            self.now_us, _, call = heapq.heappop(self._events)
            call()


class Cores:
    """The cores of one host: as many ranks as there are cores compute at full speed, more of them share it."""

    def __init__(self, clock: Clock, host: Host) -> None:
        self._clock, self._cores = clock, host.cores
        self._running: dict[int, tuple[float, Call]] = {}  # by rank: microseconds left on a whole core
        self._since_us = 0.0
        self._plans = 0  # as in `Sender`

    def run(self, rank: int, duration_us: float, over: Call) -> None:
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


class Sender:
    """The egress of one rank on the simulation's clock."""

    def __init__(self, clock: Clock, network: Network, rank: int) -> None:
        self._clock, self._network, self._rank = clock, network, rank
        self._egress = Egress[tuple[Since, Since]](network, rank)
        self._plans = 0  # the completion that is due belongs to the latest plan; earlier ones are void

    def send(self, target: int, num_bytes: int, left: Since, arrived: Since) -> None:
        """Queue a message; `left` is called when its last byte is on the wire, `arrived` when it is at `target`."""
        self._egress.offer(target, (left, arrived), num_bytes, self._clock.now_us)
        self._plan()

    def _plan(self) -> None:
        self._plans += 1
        due_us, plan = self._egress.due_us, self._plans
        assert due_us is not None
        self._clock.at(due_us, lambda: self._complete(plan))

    def _complete(self, plan: int) -> None:
        if plan != self._plans:
            return
        sent = self._egress.complete()
        if self._egress.due_us is not None:
            self._plan()
        self._deliver(sent)

    def _deliver(self, sent: Sent[tuple[Since, Since]]) -> None:
        left, arrived = sent.item
        delay_us = self._network.link(self._rank, sent.target).delay_us
        self._clock.at(sent.end_us + delay_us, lambda: arrived(sent.start_us + delay_us))
        left(sent.start_us)
