"""How far a bench is and how long it will still take: lines on stderr, from any of its processes.

    bench pipelining: about 2 min on two idle cores
    bench pipelining: 1f1b over tcp (4 of 4), 12 of 40 rounds, about 35 s left

A part is what is measured together, in processes of its own; a round is one turn of everything that
a part compares. A bench with a limit (`--quick`) takes fewer rounds a part, and leaves out the last
parts where too little time is left for them.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

T = TypeVar("T")

QUICK_S = 60.0  # what `--quick` promises
MIN_ROUNDS = 3  # the fewest that have a median and quartiles worth printing
_END_S = 1.0  # of a part, to close its processes
_EVERY_S = 5.0  # a line


@dataclass
class Pace:
    """The progress of one bench. Picklable: the first of a part's processes reports its rounds.

    Times are of `time.monotonic`, which all processes of a machine share.
    """

    bench: str
    part_s: float  # seconds a part takes on two idle cores; once parts have ended, their mean
    limit_s: float = math.inf  # of the whole bench; the first part takes what it takes
    silent: bool = False
    part: int = 1  # the one under way
    num_parts: int = 1
    label: str = ""  # of the part under way
    began_s: float = field(default_factory=time.monotonic)
    part_began_s: float = field(default_factory=time.monotonic)
    rounds_began_s: float = field(default_factory=time.monotonic)
    reported_s: float = -math.inf  # when the last line was written

    @property
    def quick(self) -> bool:
        return self.limit_s < math.inf

    def parts(self, items: Sequence[T], label: Callable[[T], str]) -> Iterator[T]:
        """Each item in turn, as a part. Under a limit it stops before a part that would exceed it,
        and says which are left out.
        """
        self.num_parts = len(items)
        expected_s = min(self.limit_s, self.part_s * len(items))
        self._write(f"about {_duration(expected_s)} on two idle cores")
        longest_s = 0.0
        for number, item in enumerate(items, 1):
            began_s = time.monotonic()
            # By the longest so far: parts take about as long as each other.
            if number > 1 and began_s + longest_s > self.began_s + self.limit_s:
                labels = ", ".join(label(left) for left in items[number - 1 :])
                self._write(f"left out, for lack of time: {labels}")
                return
            self.part = number
            self.label = label(item)
            self.part_began_s = began_s
            self._report("", self.part_s, self.part_s)
            yield item
            longest_s = max(longest_s, time.monotonic() - began_s)
            self.part_s = (time.monotonic() - self.began_s) / number

    def rounds(self, most: int, round_s: float) -> int:
        """How many rounds of about `round_s` this part takes: `most`, or as many as its share of
        the limit allows. Call it right before the first, in one process; tell the others.
        """
        self.rounds_began_s = time.monotonic()
        if not self.quick:
            return most
        start_s = self.rounds_began_s - self.part_began_s
        left = self.num_parts - self.part + 1
        remaining_s = self.began_s + self.limit_s - self.rounds_began_s
        # Of what is left once each later part has started as this one did, an equal share.
        share_s = (remaining_s - (left - 1) * start_s) / left - _END_S
        fit = int(share_s / max(round_s, 1e-6))
        return min(most, max(MIN_ROUNDS, fit))

    def done(self, num_done: int, num_rounds: int) -> None:
        """Report that so many rounds have ended."""
        now_s = time.monotonic()
        if now_s - self.reported_s < _EVERY_S:
            return
        took_s = now_s - self.rounds_began_s
        left_s = took_s / num_done * (num_rounds - num_done)
        whole_s = now_s - self.part_began_s + left_s
        self._report(f", {num_done} of {num_rounds} rounds", left_s, whole_s)

    def _report(self, rounds: str, left_s: float, part_s: float) -> None:
        """`left_s`: seconds left of this part; `part_s`: of each later one, within the limit."""
        limit_left_s = self.began_s + self.limit_s - time.monotonic() - left_s
        later_s = (self.num_parts - self.part) * part_s
        left_s += max(0.0, min(later_s, limit_left_s))
        where = f" ({self.part} of {self.num_parts})" if self.num_parts > 1 else ""
        self._write(f"{self.label}{where}{rounds}, about {_duration(left_s)} left")

    def _write(self, text: str) -> None:
        self.reported_s = time.monotonic()
        if not self.silent:
            click.echo(f"bench {self.bench}: {text}", err=True)


def silent() -> Pace:
    """For a caller who prints nothing: no limit, no lines."""
    return Pace("", 0.0, silent=True)


def agreed_rounds(pace: Pace, rank: int, store: Any, most: int, round_s: float) -> int:
    """The number of rounds that rank 0 chooses, on every rank of a `torch.distributed` store."""
    # One of them decides: a rank that took a round more would wait for the others for ever.
    if rank == 0:
        store.set("rounds", str(pace.rounds(most, round_s)))
    return int(store.get("rounds"))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
