"""Whether the processes of a long run hold more and more: memory, descriptors, threads.

minute     1          2          3   ...   15
m0         |--------- held ----------------|       the first look and the last are compared
m4                    |--- held ---|               killed in the 4th minute
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

LOOK_EVERY_S = 60.0
_LEAST_LOOKS = 3  # of a process that is told of


@dataclass(frozen=True)
class Held:
    memory_mb: float
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.memory_mb:.0f} MB, {self.descriptors} descriptors, {self.threads} threads"


@dataclass
class Levels:
    """What each process held at each look, by its name and number."""

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
            f"{name} in {len(held)} looks: {held[0]}; at the end {held[-1]}"
            for (name, _), held in long_lived
        ]


def held_by(pid: int) -> Held | None:
    """None where it has ended."""
    try:
        process = psutil.Process(pid)
        memory_mb = process.memory_info().rss / 1e6
        return Held(memory_mb, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None
