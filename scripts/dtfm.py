"""The placement problem as DT-FM states it (Yuan et al., NeurIPS 2022, section 3), and a search for
its least cost: which machines hold which stage of which replica, if links alone count.

A placement gives every stage of the pipeline a group of machines, one a replica. It costs

    the slowest group's exchange of gradients            each member i: sum over the others j of
                                                         2 x (delay + gradient / (bandwidth x size))
  + 2 x the shortest open path through the groups        a hop: the slowest pair of the matching of
                                                         two groups' members whose slowest pair is
                                                         fastest, at delay + activation / bandwidth

    stage 0      stage 1      stage 2
    [a b c] ===> [d e f] ===> [g h i]     replica 0 is a -> e -> g if the matchings pair them so

The search is simulated annealing (Kirkpatrick et al., Science 1983) over groups in the order of the
path. Two machines of different groups change places, or a segment of the path is turned round, or
two groups change places. A hop is matched exactly, but only after a bound from below could not
refuse the move: most moves end there.
"""

import math
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, permutations

import numpy as np
import numpy.typing as npt

from dpipe.errors import ConfigError

Matrix = npt.NDArray[np.float64]

_MS = 1e3  # in a second
_GIGABITS = 8  # in a gigabyte
_MOST_GROUPINGS = 1000  # that are tried one by one
_MOST_ORDERED = 9  # groups whose every order is tried at the end
_HOT = 0.1  # of the cost divided by the stages, about a hop's: the temperature as a round starts
_COLD = 1e-4  # the same, as it ends
_ROUNDS = (2, 1, 1)  # how the seconds are divided; the searches halve from round to round
_MOST_REMEMBERED = 200_000  # hops


@dataclass(frozen=True)
class Problem:
    """Square matrices by sending and receiving machine; what is on their diagonals is not read.

    Raises `ConfigError` for matrices that are not square, not alike, or no delays and rates, and
    for a number of machines other than `stages` x `replicas`.
    """

    delay_ms: Matrix
    bandwidth_gbps: Matrix
    stages: int
    replicas: int
    gradient_gb: float  # of a stage
    activation_gb: float  # of a step, between two stages of one replica

    def __post_init__(self) -> None:
        shape = self.delay_ms.shape
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ConfigError(f"the matrix of delays must be square, it is {_times(shape)}")
        if self.bandwidth_gbps.shape != shape:
            raise ConfigError(
                f"there are {_times(shape)} delays, but {_times(self.bandwidth_gbps.shape)} "
                "bandwidths"
            )
        apart = ~np.eye(shape[0], dtype=bool)
        if not np.all(np.isfinite(self.delay_ms[apart]) & (self.delay_ms[apart] >= 0)):
            raise ConfigError("delays must be numbers of milliseconds, 0 or more")
        if not np.all(np.isfinite(self.bandwidth_gbps[apart]) & (self.bandwidth_gbps[apart] > 0)):
            raise ConfigError("bandwidths must be numbers of Gbit/s above 0")
        if shape[0] != self.stages * self.replicas:
            raise ConfigError(
                f"{self.stages} stages of {self.replicas} replicas take "
                f"{self.stages * self.replicas} machines, but the matrices are of {shape[0]}"
            )


@dataclass(frozen=True)
class Placement:
    cost_s: float
    stages: tuple[tuple[int, ...], ...]  # machines by stage, in the order of the path; member k of
    # each is of replica k


def cost_s(problem: Problem, stages: Sequence[Sequence[int]]) -> float:
    """What the groups of `stages` cost, over the best path through them: exact, by trying every
    order. For checks: it takes `stages` factorial.
    """
    links = _Links(problem)
    exchange_s = max(links.exchange_s(group) for group in stages)
    masks = [_mask(group) for group in stages]
    return exchange_s + 2 * min(links.path_s(order) for order in permutations(masks))


def search(problem: Problem, seconds: float, seed: int = 0) -> Placement:
    """The best placement found within about `seconds`.

    Where there are few groupings, it is the best of all. Else several searches begin, from groups
    of near machines and from groups of distant ones (which is better depends on what weighs more,
    gradients or activations); the better half goes on, twice.
    """
    deadline_s = time.monotonic() + seconds
    links = _Links(problem)
    if _num_groupings(problem) <= _MOST_GROUPINGS:
        machines = tuple(range(problem.stages * problem.replicas))
        every = map(links.placement, _groupings(machines, problem.replicas))
        return min(every, key=lambda placement: placement.cost_s)
    near = _near_groups(links, problem)
    rng = random.Random(seed)
    starts = [near, _dealt_groups(near)] * 2
    searches = [_Annealing(links, problem, groups, rng) for groups in starts]
    for number in range(len(_ROUNDS)):
        left_s = deadline_s - time.monotonic()
        share = _ROUNDS[number] / sum(_ROUNDS[number:]) / len(searches)
        for annealing in searches:
            annealing.run(share * left_s)
        searches.sort(key=lambda annealing: annealing.best_s)
        searches = searches[: max(1, len(searches) // 2)]
    return links.placement(searches[0].best)


class _Links:
    """What an exchange and a hop cost, with the hops that were matched remembered."""

    def __init__(self, problem: Problem) -> None:
        with np.errstate(divide="ignore"):
            rate = _GIGABITS / problem.bandwidth_gbps
        delay_s = problem.delay_ms / _MS
        pair_s = 2 * (delay_s + problem.gradient_gb * rate / problem.replicas)
        hop_s = delay_s + problem.activation_gb * rate
        np.fill_diagonal(pair_s, 0)
        np.fill_diagonal(hop_s, np.inf)  # a machine is in one group alone
        self.pair_s: list[list[float]] = pair_s.tolist()
        self.hop_s: list[list[float]] = hop_s.tolist()
        self._near = [_Near(row) for row in self.hop_s]
        self._hop_to_s: list[list[float]] = hop_s.T.tolist()
        self._known: dict[tuple[int, int], float] = {}

    def exchange_s(self, group: Sequence[int]) -> float:
        return max(sum(map(self.pair_s[member].__getitem__, group)) for member in group)

    def path_s(self, masks: Sequence[int]) -> float:
        return sum(self.matched_s(*hop) for hop in pairwise(masks))

    def bound_s(self, senders: int, receivers: int) -> float:
        """No matching's slowest pair is faster: everyone takes part in some pair."""
        known_s = self._known.get((senders, receivers))
        if known_s is not None:
            return known_s
        sending = _members(senders)
        receiving = _members(receivers)
        out_s = max([min(map(self.hop_s[member].__getitem__, receiving)) for member in sending])
        in_s = max([min(map(self._hop_to_s[member].__getitem__, sending)) for member in receiving])
        return max(out_s, in_s)

    def matched_s(self, senders: int, receivers: int) -> float:
        """The slowest pair of the matching in which it is fastest."""
        hop = senders, receivers
        if hop not in self._known:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[hop] = self._match(senders, receivers)
        return self._known[hop]

    def _match(self, senders: int, receivers: int) -> float:
        least_s = self.bound_s(senders, receivers)
        if self.pairs_within(senders, receivers, least_s) is not None:
            return least_s
        values = {
            self.hop_s[sender][receiver]
            for sender in _members(senders)
            for receiver in _members(receivers)
        }
        slower = sorted(value for value in values if value > least_s)
        low = 0
        high = len(slower) - 1  # the slowest allows any matching
        while low < high:
            middle = (low + high) // 2
            if self.pairs_within(senders, receivers, slower[middle]) is None:
                low = middle + 1
            else:
                high = middle
        return slower[low]

    def pairs_within(self, senders: int, receivers: int, limit_s: float) -> dict[int, int] | None:
        """Sender by receiver, in a perfect matching of pairs that take at most `limit_s`; None if
        there is none (augmenting paths; Kuhn, 1955).
        """
        sender_of: dict[int, int] = {}
        reached = {
            sender: self._near[sender].within(limit_s) & receivers for sender in _members(senders)
        }

        def augment(sender: int, open_receivers: int) -> tuple[bool, int]:
            candidates = reached[sender] & open_receivers
            while candidates:
                bit = candidates & -candidates
                open_receivers &= ~bit
                if bit not in sender_of:
                    sender_of[bit] = sender
                    return True, open_receivers
                moved, open_receivers = augment(sender_of[bit], open_receivers)
                if moved:
                    sender_of[bit] = sender
                    return True, open_receivers
                candidates &= open_receivers
            return False, open_receivers

        for sender in reached:
            if not augment(sender, receivers)[0]:
                return None
        return {bit.bit_length() - 1: sender for bit, sender in sender_of.items()}

    def placement(self, groups: Sequence[Sequence[int]]) -> Placement:
        """`groups` over their best path, with the members of each in the order of replicas."""
        masks = self._best_path([_mask(group) for group in groups])
        stages = [sorted(_members(masks[0]))]
        for senders, receivers in pairwise(masks):
            pairs = self.pairs_within(senders, receivers, self.matched_s(senders, receivers))
            assert pairs is not None
            receiver_of = {sender: receiver for receiver, sender in pairs.items()}
            stages.append([receiver_of[sender] for sender in stages[-1]])
        exchange_s = max(self.exchange_s(group) for group in groups)
        cost = exchange_s + 2 * self.path_s(masks)
        return Placement(cost, tuple(tuple(stage) for stage in stages))

    def _best_path(self, masks: list[int]) -> list[int]:
        """Exact where there are few groups (Held and Karp, 1962), else as the search left it."""
        if len(masks) > _MOST_ORDERED:
            return masks
        full = (1 << len(masks)) - 1
        least: dict[tuple[int, int], tuple[float, int]] = {
            (1 << last, last): (0.0, -1) for last in range(len(masks))
        }
        for visited in range(1, full + 1):
            for last in _members(visited):
                before = visited & ~(1 << last)
                if before:
                    least[visited, last] = min(
                        (least[before, i][0] + self.matched_s(masks[i], masks[last]), i)
                        for i in _members(before)
                    )
        last = min(range(len(masks)), key=lambda i: least[full, i][0])
        path = []
        visited = full
        while last >= 0:
            path.append(last)
            before = least[visited, last][1]
            visited &= ~(1 << last)
            last = before
        return [masks[i] for i in reversed(path)]


class _Near:
    """One machine's peers by how long a hop takes."""

    def __init__(self, row: Sequence[float]) -> None:
        self._order = sorted(range(len(row)), key=row.__getitem__)
        self._values = [row[peer] for peer in self._order]
        self._masks = [0]  # of the nearest 0, 1, 2, ...
        for peer in self._order:
            self._masks.append(self._masks[-1] | 1 << peer)

    def within(self, limit_s: float) -> int:
        """The mask of the peers that take at most `limit_s`."""
        return self._masks[bisect_right(self._values, limit_s)]


class _Annealing:
    """One search from one placement, `groups` in the order of the path."""

    def __init__(
        self, links: _Links, problem: Problem, groups: Sequence[Sequence[int]], rng: random.Random
    ) -> None:
        self._links = links
        self._problem = problem
        self._rng = rng
        self._set(groups)
        self.best_s = self._cost_s
        self.best = [tuple(group) for group in groups]

    def _set(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = [list(group) for group in groups]
        self._masks = [_mask(group) for group in groups]
        self._exchanges_s = [self._links.exchange_s(group) for group in groups]
        self._hops_s = [self._links.matched_s(*hop) for hop in pairwise(self._masks)]
        self._cost_s = max(self._exchanges_s) + 2 * sum(self._hops_s)

    def run(self, seconds: float) -> None:
        if self._problem.stages == 1:
            return  # every placement is the same
        began_s = time.monotonic()
        self._set(self.best)
        hot_s = _HOT * self._cost_s / self._problem.stages
        cooling = math.log(_COLD / _HOT)
        moves: list[Callable[[float], None]] = [self._turn_round, self._trade_groups]
        share = 0.0
        while share < 1:
            temperature_s = hot_s * math.exp(cooling * share)
            for _ in range(20):
                # drawn ahead: a bound from below can then refuse the move
                most_s = self._cost_s - temperature_s * math.log(1 - self._rng.random())
                if self._rng.random() < 0.1:
                    self._rng.choice(moves)(most_s)
                else:
                    self._swap_machines(most_s)
            share = (time.monotonic() - began_s) / max(seconds, 1e-9)

    def _swap_machines(self, most_s: float) -> None:
        """Two machines of two groups, if that costs at most `most_s`."""
        rng = self._rng
        here, there = rng.sample(range(len(self._groups)), 2)
        member = rng.randrange(self._problem.replicas)
        other = rng.randrange(self._problem.replicas)
        groups = {here: list(self._groups[here]), there: list(self._groups[there])}
        groups[here][member], groups[there][other] = groups[there][other], groups[here][member]
        exchanges_s = list(self._exchanges_s)
        for stage, group in groups.items():
            exchanges_s[stage] = self._links.exchange_s(group)
        masks = list(self._masks)
        for stage, group in groups.items():
            masks[stage] = _mask(group)
        if self._take(masks, exchanges_s, most_s):
            for stage, group in groups.items():
                self._groups[stage] = group
            self._note_best()

    def _turn_round(self, most_s: float) -> None:
        first, last = sorted(self._rng.sample(range(len(self._groups) + 1), 2))
        order = list(range(len(self._groups)))
        order[first:last] = order[first:last][::-1]
        self._reorder(order, most_s)

    def _trade_groups(self, most_s: float) -> None:
        here, there = self._rng.sample(range(len(self._groups)), 2)
        order = list(range(len(self._groups)))
        order[here] = there
        order[there] = here
        self._reorder(order, most_s)

    def _reorder(self, order: Sequence[int], most_s: float) -> None:
        masks = [self._masks[stage] for stage in order]
        exchanges_s = [self._exchanges_s[stage] for stage in order]
        if self._take(masks, exchanges_s, most_s):
            self._groups = [self._groups[stage] for stage in order]
            self._note_best()

    def _take(self, masks: list[int], exchanges_s: list[float], most_s: float) -> bool:
        """Go there if it costs at most `most_s`; the caller changes `groups`."""
        slowest_s = max(exchanges_s)
        hops = list(pairwise(masks))
        changed = [at for at, hop in enumerate(hops) if hop != self._hop(at)]
        hops_s = list(self._hops_s)
        for at in changed:
            hops_s[at] = 0.0
        if slowest_s + 2 * sum(hops_s) > most_s:
            return False
        for at in changed:
            hops_s[at] = self._links.bound_s(*hops[at])
        if slowest_s + 2 * sum(hops_s) > most_s:
            return False
        for at in changed:
            hops_s[at] = self._links.matched_s(*hops[at])
        cost = slowest_s + 2 * sum(hops_s)
        if cost > most_s:
            return False
        self._masks = masks
        self._exchanges_s = exchanges_s
        self._hops_s = hops_s
        self._cost_s = cost
        return True

    def _hop(self, at: int) -> tuple[int, int]:
        return self._masks[at], self._masks[at + 1]

    def _note_best(self) -> None:
        if self._cost_s < self.best_s:
            self.best_s = self._cost_s
            self.best = [tuple(group) for group in self._groups]


def _near_groups(links: _Links, problem: Problem) -> list[list[int]]:
    """Groups of near machines, each grown round the first that is left; then a path that goes on
    to the nearest group.
    """
    left = list(range(problem.stages * problem.replicas))
    groups = []
    while left:
        group = [left.pop(0)]
        while len(group) < problem.replicas:
            near = min(left, key=lambda peer: max(links.pair_s[peer][member] for member in group))
            left.remove(near)
            group.append(near)
        groups.append(group)
    path = [groups.pop(0)]
    while groups:
        here = _mask(path[-1])
        near_group = min(groups, key=lambda group: links.matched_s(here, _mask(group)))
        groups.remove(near_group)
        path.append(near_group)
    return path


def _num_groupings(problem: Problem) -> int:
    machines = problem.stages * problem.replicas
    alike = math.factorial(problem.replicas) ** problem.stages * math.factorial(problem.stages)
    return math.factorial(machines) // alike


def _groupings(machines: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to put `machines` into groups of `size`, the order of groups aside."""
    if not machines:
        yield []
        return
    first, *others = machines
    for mates in combinations(others, size - 1):
        left = tuple(machine for machine in others if machine not in mates)
        for groups in _groupings(left, size):
            yield [(first, *mates), *groups]


def _dealt_groups(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The opposite: each group's members dealt out over all groups, as cards are."""
    machines = [member for group in groups for member in group]
    return [machines[stage :: len(groups)] for stage in range(len(groups))]


def _mask(group: Sequence[int]) -> int:
    mask = 0
    for member in group:
        mask |= 1 << member
    return mask


@lru_cache(maxsize=4096)
def _members(mask: int) -> tuple[int, ...]:
    members = []
    while mask:
        bit = mask & -mask
        members.append(bit.bit_length() - 1)
        mask ^= bit
    return tuple(members)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"
