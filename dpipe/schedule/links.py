"""Who sends to whom: the two ends of a message, and the order of messages on each directed link."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from dpipe.errors import ScheduleError
from dpipe.schedule.action import COMPUTE, RECVS, SENDS, Action, Op
from dpipe.schedule.schedule import Schedule

RankPair = tuple[int, int]  # (from rank, to rank): a directed link

_TIED = {
    Op.SEND_TIED: Op.RECV_TIED,
    Op.RECV_TIED: Op.SEND_TIED,
}
_NEXT_TO = {  # the other end's op, and how many stages on it is
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}


def counterpart(action: Action, num_stages: int) -> Action:
    """The other end of a send or a receive: `1RECV_F3` for `0SEND_F3` and back.

    Raises `ScheduleError` for an action that crosses no link.
    """
    if action.op in _TIED:
        return Action(num_stages - 1 - action.stage, _TIED[action.op])
    if action.op not in _NEXT_TO:
        raise ScheduleError(f"{action} crosses no link: only a send or a receive has another end")
    op, ahead = _NEXT_TO[action.op]
    return Action(action.stage + ahead, op, action.microbatch)


def peer(schedule: Schedule, action: Action) -> int:
    """The rank at the other end of a send or a receive."""
    other_end = counterpart(action, schedule.num_stages)
    return schedule.rank_of_stage[other_end.stage]


def sends_by_link(schedule: Schedule) -> dict[RankPair, list[Action]]:
    """The sends of each directed link, in the order in which its sender makes them."""
    return _by_link(schedule, sending=True)


def receives_by_link(schedule: Schedule) -> dict[RankPair, list[Action]]:
    """The receives of each directed link, in the order in which its receiver posts them."""
    return _by_link(schedule, sending=False)


def compute_needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """The compute actions that `action` depends on directly, here or over a link."""
    for need in schedule.requires(action):
        if need.op in COMPUTE:
            yield need
        else:
            yield from compute_needs(schedule, need)


def _by_link(schedule: Schedule, sending: bool) -> dict[RankPair, list[Action]]:
    links: dict[RankPair, list[Action]] = defaultdict(list)
    ops = SENDS if sending else RECVS
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if action.op not in ops:
                continue
            other = peer(schedule, action)
            ends = (rank, other) if sending else (other, rank)
            link = links[ends]
            link.append(action)
    return dict(links)


def neighbours(schedule: Schedule, rank: int) -> set[int]:
    """The ranks that `rank` exchanges activations, gradients or a tied weight's gradient with."""
    owner = schedule.rank_of_stage
    hops = set(pairwise(owner))  # between stages of one rank, too: that rank is taken out below
    if schedule.tied:
        hops.add((owner[0], owner[-1]))
    ranks: set[int] = set()
    for hop in hops:
        if rank in hop:
            ranks |= set(hop)
    return ranks - {rank}
