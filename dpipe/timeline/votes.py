"""The vote before an optimizer step, where no rank may step before it knows of all others: ballots
travel to the coordinator on rank 0's host, and the verdict comes back.

    rank 0  [0B7]        |wait 0VOTE          |[0STEP]
    rank 1  [1B7]|wait 1VOTE ................. |[1STEP]
                  \\__ the link's delay       ^ the delay back, once the last ballot has arrived

A ballot is some hundred bytes, so that its delay is all that counts.
"""

from collections.abc import Callable, Sequence
from functools import partial

from dpipe.network.link import Network
from dpipe.timeline.machine import Call, Machines, handle

COORDINATOR = 0  # the rank on whose host it is


def delay_us(network: Network, source: int, target: int) -> float:
    """Of a ballot or a verdict; ranks `source` and `target` may be the same."""
    # The coordinator is on this rank's own host; `link` would answer with the network's default.
    if source == target:
        return 0.0
    return network.link(source, target).delay_us


def vote_delays_us(network: Network, rank: int) -> tuple[float, float]:
    """Of the ballot of `rank`, and of the verdict on its way back."""
    ballot_us = delay_us(network, rank, COORDINATOR)
    verdict_us = delay_us(network, COORDINATOR, rank)
    return ballot_us, verdict_us


class Votes:
    """One vote of all ranks; `delays_us` are their `vote_delays_us`, and `over(rank)` is called
    when a rank has the verdict. Ballots and verdicts take the cores of both ends, as messages do.
    """

    def __init__(
        self,
        machines: Machines,
        delays_us: Sequence[tuple[float, float]],
        over: Callable[[int], None],
    ) -> None:
        self._machines = machines
        self._delays_us = delays_us
        self._over = over
        self._missing = len(delays_us)

    def cast(self, rank: int) -> None:
        ballot_us, _ = self._delays_us[rank]
        count = partial(self._tell, COORDINATOR, 0.0, self._arrive)
        self._tell(rank, ballot_us, count)

    def _arrive(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            for rank, (_, verdict_us) in enumerate(self._delays_us):
                hear = partial(self._tell, rank, 0.0, partial(self._over, rank))
                self._tell(COORDINATOR, verdict_us, hear)

    def _tell(self, rank: int, delay_us: float, over: Call) -> None:
        """`over` once `rank` has done its end of a ballot or a verdict, and `delay_us` later."""
        machines = self._machines
        told = partial(machines.clock.after, delay_us, over)
        handle(machines.cores.get(rank), (rank, "votes"), told)
