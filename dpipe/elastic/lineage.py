"""Which copies belong to the run as it goes on. Epochs are to copies what terms are to a replicated
log: an epoch that resumed at step r has dropped whatever those before it made beyond r.

    epoch 1   resumes at 0     0 1 2 3 4 5 6 7         a copy of step 7, made in epoch 1
    epoch 2   resumes at 5               5 6 7 8 9     has dropped it: 7 > 5
    epoch 3   resumes at 9                       9 10  a copy of step 4 of epoch 1 is still good

A machine that was away for some epochs may hold copies that were dropped meanwhile. Steps are
repeated exactly, so that most would be equal in every bit; not those of an epoch that left out
replicas. No copy is used on the strength of that.
"""

import math
from collections.abc import Iterable, Mapping

Held = Mapping[int, frozenset[int]]  # by step, the pieces of which the state before it is held


class Lineage:
    """By epoch, the step at which it resumed."""

    def __init__(self, resumed_at: Iterable[tuple[int, int]] = ()) -> None:
        self._resumed_at = dict(resumed_at)

    @property
    def epoch(self) -> int:
        """The newest; 0 before the first."""
        return max(self._resumed_at, default=0)

    def add(self, epoch: int, step: int) -> None:
        assert epoch > self.epoch, "epochs grow"
        self._resumed_at[epoch] = step

    def newest_valid(self, epoch: int) -> float:
        """The last step whose copies are good that were made in `epoch` or before."""
        newest = math.inf
        for number, step in self._resumed_at.items():
            if number > epoch:
                newest = min(newest, step)
        return newest

    def valid(self, held: Held, epoch: int) -> dict[int, frozenset[int]]:
        """What is good of the copies of a machine that last heard of `epoch`."""
        newest = self.newest_valid(epoch)
        good = {}
        for step, pieces in held.items():
            if step <= newest:
                good[step] = pieces
        return good


def newest_whole(copies: Iterable[Held], num_pieces: int) -> int | None:
    """The newest step of which every piece is held by somebody."""
    by_step: dict[int, set[int]] = {}
    for held in copies:
        for step, pieces in held.items():
            known = by_step.setdefault(step, set())
            known.update(pieces)
    every = set(range(num_pieces))
    whole = [step for step, pieces in by_step.items() if pieces >= every]
    return max(whole, default=None)
