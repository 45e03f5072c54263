"""Whether the processes of a long run hold more and more: memory, descriptors, threads.

minute     1          2          3   ...   60
m0         |--------- held -----------------|
m4                    |--- held ---|                   killed in the 4th minute: too short to judge

           |  median  |  median  |  median  |          grows by what it has risen by both times
             120 MB     121 MB     135 MB              +1 MB in 20 minutes: a rise that does not go
                                                       on, such as a cache that fills, is none
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import psutil

LOOK_EVERY_S = 60.0
LEAST_JUDGED = 18  # looks at a process: with fewer each third has too few
_LEAST_LOOKS = 3  # of a process that is told of


@dataclass(frozen=True)
class Held:
    """By one process at one look; or what that grows by in an hour."""

    memory_mb: float
    descriptors: float
    threads: float

    def __str__(self) -> str:
        return (
            f"{self.memory_mb:.0f} MB, {self.descriptors:.0f} descriptors, "
            f"{self.threads:.0f} threads"
        )

    @property
    def values(self) -> tuple[float, float, float]:
        return self.memory_mb, self.descriptors, self.threads

    def is_within(self, most: "Held") -> bool:
        return all(own <= bound for own, bound in zip(self.values, most.values, strict=True))


# In an hour, of a process that is level. In thirds of twenty looks memory that comes and goes makes
# some MB of it.
MOST_GROWTH = Held(memory_mb=20.0, descriptors=4.0, threads=4.0)


def growth_of(looks: Sequence[Held]) -> Held:
    """By how much more a process holds in an hour, from its looks, of which there are three or
    more.
    """
    columns = zip(*(held.values for held in looks), strict=True)
    looks_an_hour = 3600 / LOOK_EVERY_S
    return Held(*(looks_an_hour * slope_of(column) for column in columns))


def slope_of(values: Sequence[float]) -> float:
    """From one look to the next; 0 where one of two rises was none."""
    size = len(values) // 3
    first = median(values[:size])
    middle = median(values[size:-size])
    last = median(values[-size:])
    rise = min(middle - first, last - middle)
    # Between the middles of neighbouring thirds, of which the second may be longer.
    return max(0.0, rise) / ((len(values) - size) / 2)


@dataclass
class Levels:
    """What each process held at each look, by its name and number; it may grow by `most`."""

    most: Held = MOST_GROWTH
    looks: dict[tuple[str, int], list[Held]] = field(default_factory=dict)
    next_at: float = 0.0

    def look(self, now: float, pids: Mapping[str, int]) -> None:
        """Once in `LOOK_EVERY_S`, not before a process has had time to begin."""
        if self.next_at == 0.0:
            self.next_at = now + LOOK_EVERY_S
        if now < self.next_at:
            return
        self.next_at = now + LOOK_EVERY_S
        for name, pid in pids.items():
            held = held_by(pid)
            if held is not None:
                self.looks.setdefault((name, pid), []).append(held)

    def lines(self) -> list[str]:
        """Of the processes that were there for long, longest first."""
        long_lived = [each for each in self.looks.items() if len(each[1]) >= _LEAST_LOOKS]
        long_lived.sort(key=lambda each: -len(each[1]))
        return [
            f"{name} in {len(looks)} looks: {looks[0]}; at the end {looks[-1]}; "
            f"{_judged(looks, self.most)}"
            for (name, _), looks in long_lived
        ]

    def growing(self) -> list[str]:
        """The processes that grow by more, by name."""
        names = []
        for (name, _), looks in self.looks.items():
            if len(looks) >= LEAST_JUDGED and not growth_of(looks).is_within(self.most):
                names.append(name)
        return names


def _judged(looks: Sequence[Held], most: Held) -> str:
    if len(looks) < LEAST_JUDGED:
        return "too short to judge"
    growth = growth_of(looks)
    word = "level" if growth.is_within(most) else "GROWING"
    memory_mb, descriptors, threads = growth.values
    return (
        f"{word}: {memory_mb:+.1f} MB, {descriptors:+.1f} descriptors, {threads:+.1f} threads an "
        "hour"
    )


def held_by(pid: int) -> Held | None:
    """None where it has ended."""
    try:
        process = psutil.Process(pid)
        memory_mb = process.memory_info().rss / 1e6
        return Held(memory_mb, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None
