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
# From so long a round trip on, both directions of a pair are measured at once.
_LONG_S = 0.04
_MEETING_S = 0.1  # beside round trips, for the two ends of a pair to be there


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


def at_once(round_trip_s: float) -> bool:
    """Whether both directions of a pair are measured at the same time.

    A long link needs round trips, not bytes, to be measured. On a short one each direction has its
    turn, so that it shares nothing with the acknowledgements of the other.
    """
    return round_trip_s >= _LONG_S


def durations(rounds: Sequence[Round], round_trips_s: Mapping[Pair, float]) -> list[float]:
    """The most seconds of each round: as its longest link wants and more, where there is time, but
    together at most `ROUNDS_S`. A pair without a round trip is not measured.
    """
    wanted = []
    for pairs in rounds:
        # Rounds begin together on all ranks, so that the longest link decides.
        lengths = [_wanted_s(round_trips_s[pair]) for pair in pairs if pair in round_trips_s]
        wanted.append(max(lengths, default=0.0))
    # Few machines have time to spare for a stream that is slow to settle; many share what there is.
    share = min(_SPARE, ROUNDS_S / max(sum(wanted), 1e-9))
    return [seconds * share for seconds in wanted]


def _wanted_s(round_trip_s: float) -> float:
    turns = 1 if at_once(round_trip_s) else 2
    return _around_s(round_trip_s) + turns * (_STEADY_S + _ROUND_TRIPS * round_trip_s)


def stream_s(round_s: float, round_trip_s: float) -> float:
    """How long each end of a pair may send in a round of `round_s`."""
    turns = 1 if at_once(round_trip_s) else 2
    return max(0.0, round_s - _around_s(round_trip_s)) / turns


def _around_s(round_trip_s: float) -> float:
    """What a round takes beside its streams: to begin, and for the last bytes to arrive."""
    return _MEETING_S + 2 * round_trip_s
