"""Who is measured with whom, and for how long: decided on every rank alike, before a byte is sent.

The circle method (Kirkman 1847): one rank stays, the others move on by a seat each round. Every
pair meets once, and nobody is in two pairs of a round.

    round 0        round 1        round 2        round 3        round 4
    0  1  2        0  5  1        0  4  5        0  3  4        0  2  3
    |  |  |        |  |  |        |  |  |        |  |  |        |  |  |
    5  4  3        4  3  2        3  2  1        2  1  5        1  5  4

Of an odd number of ranks, one sits out each round.
"""

from collections.abc import Mapping, Sequence

Pair = tuple[int, int]  # the lower rank first
Round = tuple[Pair, ...]

# In all rounds together, so that 64 machines have been measured in less than two minutes.
ROUNDS_S = 85.0
# Of a pair's stream: to be seen as steady, and round trips in which TCP finds the link's rate.
_STEADY_S = 0.4
_ROUND_TRIPS = 12
# Times that, at most, for a stream that does not become steady: on a busy machine or a lossy link.
_SPARE = 3.0
# Of the time that turns want: with less, links from so long a round trip on take none.
_LEAST_SHARE = 0.6
_LONG_S = 0.04
_RENDEZVOUS_S = 0.1  # beside round trips, for the two ends of a pair to be there


def tournament(num_ranks: int) -> list[Round]:
    """Rounds in which every pair of ranks meets once."""
    seats: list[int | None] = list(range(num_ranks))
    if num_ranks % 2:
        seats.append(None)  # whoever sits opposite rests
    rounds = []
    for _ in range(len(seats) - 1):
        # Folded in the middle: the seats of the second half, backwards, are opposite the first's.
        half = len(seats) // 2
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(tuple(pair_of(a, b) for a, b in opposite if a is not None and b is not None))
        seats[1:] = [seats[-1], *seats[1:-1]]
    return rounds


def pair_of(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)


def partner(pairs: Round, rank: int) -> int | None:
    """Whom `rank` meets in a round; None where it sits out."""
    for lower, higher in pairs:
        if rank == lower:
            return higher
        if rank == higher:
            return lower
    return None


class Timetable:
    """The most seconds of each round: as its longest link wants and more, where there is time, but
    together at most `ROUNDS_S`. A pair without a round trip is not measured.

    The directions of a pair take turns, so that neither delays the acknowledgements of the other:
    these would come in bursts, be answered in bursts, and leave the link idle in between (Zhang,
    Shenker and Clark 1991). Where the rounds have too little time for that, long links, which need
    round trips to be measured, are measured both ways at once.
    """

    def __init__(self, rounds: Sequence[Round], round_trips_s: Mapping[Pair, float]) -> None:
        self._rounds = rounds
        self.round_trips_s = round_trips_s
        self.in_turns = True
        wanted = self._wanted_s()
        if _LEAST_SHARE * sum(wanted) > ROUNDS_S:
            self.in_turns = False
            wanted = self._wanted_s()
        # Few machines have time to spare for a stream that is slow to settle; many share what
        # there is.
        share = min(_SPARE, ROUNDS_S / max(sum(wanted), 1e-9))
        self.lengths_s = [seconds * share for seconds in wanted]

    def at_once(self, round_trip_s: float) -> bool:
        """Whether both directions of a pair are measured at the same time."""
        return not self.in_turns and round_trip_s >= _LONG_S

    def stream_s(self, round_s: float, round_trip_s: float) -> float:
        """How long each end of a pair may send in a round of `round_s`."""
        return max(0.0, round_s - _around_s(round_trip_s)) / self._turns(round_trip_s)

    def _turns(self, round_trip_s: float) -> int:
        return 1 if self.at_once(round_trip_s) else 2

    def _wanted_s(self) -> list[float]:
        wanted = []
        for pairs in self._rounds:
            # Rounds begin together on all ranks, so that the longest link decides.
            known = [pair for pair in pairs if pair in self.round_trips_s]
            lengths = [self._pair_s(self.round_trips_s[pair]) for pair in known]
            wanted.append(max(lengths, default=0.0))
        return wanted

    def _pair_s(self, round_trip_s: float) -> float:
        stream_s = _STEADY_S + _ROUND_TRIPS * round_trip_s
        return _around_s(round_trip_s) + self._turns(round_trip_s) * stream_s


def _around_s(round_trip_s: float) -> float:
    """What a round takes beside its streams: to begin, and for the last bytes to arrive."""
    return _RENDEZVOUS_S + 2 * round_trip_s
