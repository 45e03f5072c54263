"""Lowering: a generator's schedule becomes what the executor runs. A chain of passes, each a pure
function.

The first rank of one_f_one_b(2, 3), tied, with replicas:

    0F0 0F1 0B0 0F2 0B1 0B2                                             generated
    ... 0B2 0SEND_TIED                                                  a shared weight's gradient
    ... 0B2 0SEND_TIED 0COMPLETE 0REDUCE_GRAD                           at once; if tied, last
    ... 0B2 0SEND_TIED 0COMPLETE 0REDUCE_GRAD 0AGREE 0VOTE 0STEP        the end of the step
    0F0 0SEND_F0 0F1 0SEND_F1 0B0 0F2 0SEND_F2 0B1 0B2 ...              each send behind its source
    0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0RECV_B2 0F2 ...    receives, recv_ahead = 2

COMPLETE and REDUCE_GRAD are once a stage, so that one stage's exchange runs beside the backward
pass of the next. AGREE and VOTE are once a rank. What lasts changes at STEP alone.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dpipe.errors import ScheduleError
from dpipe.schedule.action import COMPUTE, RECVS, Action, Op
from dpipe.schedule.links import counterpart, sends_by_link
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.two_versions import with_receives

Program = tuple[Action, ...]
_Sends = Sequence[Action]  # of one link, in their order


def lower(
    schedule: Schedule,
    *,
    tied: bool = False,
    reduce: bool = False,
    step: bool = True,
    recv_ahead: int = 2,
    frozen: int = 0,
) -> Schedule:
    """Add communication, reduction and step to a compute-only schedule that passes `check()`.

    A receive is posted `recv_ahead` compute actions before its consumer, or earlier where a message
    behind it on the same link is needed sooner. A schedule without backward has no gradient:
    `tied`, `reduce` and `step` add nothing. `frozen` is that of `Schedule`. Raises `ScheduleError`
    for a schedule that is already lowered and for a negative `recv_ahead`.
    """
    if schedule.lowered:
        raise ScheduleError(
            f"schedule {schedule.name!r} is lowered already; lower what the generator made"
        )
    if recv_ahead < 0:
        raise ScheduleError(f"recv_ahead must not be negative, got {recv_ahead}")
    if tied and schedule.runs_ahead:
        raise ScheduleError(
            f"schedule {schedule.name!r} has steps that overlap, and a weight that first and last "
            "stage share would be of two steps at once: set model.tie_embeddings = false, or take "
            "another schedule"
        )
    lowered = replace(
        schedule,
        lowered=True,
        tied=tied and schedule.trains,
        frozen=frozen,
    )
    if schedule.trains:
        lowered = _with_tied_sends(lowered)
        if reduce or step:
            lowered = _with_gradients_completed(lowered, reduce=reduce)
        if reduce:
            lowered = _with_agreement(lowered)
        if step:
            lowered = _with_step(lowered)
    lowered = _with_sends(lowered)
    if lowered.runs_ahead:
        return with_receives(lowered, recv_ahead)
    return _with_receives(lowered, recv_ahead)


def _with_tied_sends(schedule: Schedule) -> Schedule:
    sends: dict[Action, list[Action]] = {}
    for stage in range(schedule.num_stages):
        if schedule.tied_partner(stage) is not None:
            last = _last_gradient(schedule, stage)
            send = Action(stage, Op.SEND_TIED)
            sends[last] = [send]
    return _inserted_after(schedule, sends)


def _with_gradients_completed(schedule: Schedule, *, reduce: bool) -> Schedule:
    """Reduce a stage as soon as it is final, under the work of the rank's other stages.

    A tied stage waits for its other half first, which may be on the same rank. That goes last, so
    that no other work waits with it. Without replicas all stages are completed last.
    """
    ends = (0, schedule.num_stages - 1) if schedule.tied else ()
    at_once: dict[Action, list[Action]] = {}
    completed_last = []
    reduced_last = []
    for stage in range(schedule.num_stages):
        complete = Action(stage, Op.COMPLETE)
        exchange = Action(stage, Op.REDUCE_GRAD)
        # There is no exchange that could run beside other work.
        if not reduce:
            completed_last.append(complete)
        elif stage in ends:
            completed_last.append(complete)
            reduced_last.append(exchange)
        else:
            last = _last_gradient(schedule, stage)
            at_once[last] = [complete, exchange]
    with_others = _inserted_after(schedule, at_once)
    return _appended(with_others, completed_last + reduced_last)


def _with_agreement(schedule: Schedule) -> Schedule:
    agreements = _of_every_rank(schedule, Op.AGREE)
    return _appended(schedule, agreements)


def _with_step(schedule: Schedule) -> Schedule:
    stages = range(schedule.num_stages)
    votes = _of_every_rank(schedule, Op.VOTE)
    steps = [Action(stage, Op.STEP) for stage in stages]
    return _appended(schedule, votes + steps)


def _of_every_rank(schedule: Schedule, op: Op) -> list[Action]:
    actions = []
    for rank in range(schedule.num_ranks):
        action = schedule.of_rank(rank, op)
        actions.append(action)
    return actions


# What is sent of what an action makes, and how many stages on that is.
_MADE_FOR = {
    Op.F: (Op.SEND_F, 1),
    Op.B: (Op.SEND_B, -1),
    Op.I: (Op.SEND_B, -1),
}


def _with_sends(schedule: Schedule) -> Schedule:
    sends = {}
    for action in schedule.index:
        if action.op not in _MADE_FOR:
            continue
        op, ahead = _MADE_FOR[action.op]
        stage = action.stage
        other = stage + ahead
        exists = 0 <= other < schedule.num_stages
        if op is Op.SEND_B:
            exists = schedule.passes_back(stage)
        if exists and schedule.hops(stage, other):
            send = Action(stage, op, action.microbatch)
            sends[action] = [send]
    return _inserted_after(schedule, sends)


def _with_receives(schedule: Schedule, ahead: int) -> Schedule:
    sends_to: dict[int, list[_Sends]] = defaultdict(list)
    # Sorted, so that receives of several links at one position have one order whatever the dict's.
    for link, sends in sorted(sends_by_link(schedule).items()):
        _, rank = link
        sends_to[rank].append(sends)
    rewritten = []
    for rank, program in enumerate(schedule.programs):
        posts = _posts(schedule, program, sends_to[rank], ahead)
        rewritten.append(_with_posts(program, posts))
    return _rewritten(schedule, rewritten)


def _posts(
    schedule: Schedule,
    program: Program,
    links: Sequence[_Sends],
    ahead: int,
) -> Mapping[int, list[Action]]:
    """The receives of a rank, by the position in its program that they are posted in front of."""
    posts: dict[int, list[Action]] = defaultdict(list)
    needed_at = _needed_at(schedule, program)
    computes = _compute_positions(program)
    end = len(program)
    for sends in links:
        latest = end
        # From the last message to the first: none may be posted after the ones behind it.
        for send in reversed(sends):
            receive = counterpart(send, schedule.num_stages)
            needed = needed_at.get(receive, end)
            early = _earlier(needed, computes, ahead)
            latest = min(latest, early)
            posts[latest].append(receive)
    return posts


def _compute_positions(program: Program) -> list[int]:
    positions = []
    for position, action in enumerate(program):
        if action.op in COMPUTE:
            positions.append(position)
    return positions


def _needed_at(schedule: Schedule, program: Program) -> dict[Action, int]:
    """Where in `program` each receive has its consumer."""
    positions = {}
    for position, action in enumerate(program):
        for need in schedule.requires(action):
            if need.op in RECVS:
                positions[need] = position
    return positions


def _earlier(
    position: int,
    computes: Sequence[int],
    ahead: int,
) -> int:
    """The position of the compute action that comes `ahead` before `position`, or the first one."""
    before = bisect_left(computes, position)
    if ahead == 0 or before == 0:  # right in front of its consumer
        return position
    first = max(0, before - ahead)
    return min(position, computes[first])


def _with_posts(program: Program, posts: Mapping[int, list[Action]]) -> Program:
    rewritten: list[Action] = []
    for position in range(len(program) + 1):
        receives = posts.get(position, [])
        rewritten += reversed(receives)  # they were found from the last to the first
        rewritten += program[position : position + 1]
    return tuple(rewritten)


def _last_gradient(schedule: Schedule, stage: int) -> Action:
    gradients = schedule.final_gradients(stage)
    if schedule.runs_ahead:
        # The others may be of the program before.
        return gradients[-1]
    return max(gradients, key=schedule.index.__getitem__)


def _inserted_after(schedule: Schedule, additions: Mapping[Action, Sequence[Action]]) -> Schedule:
    programs = []
    for program in schedule.programs:
        rewritten: list[Action] = []
        for action in program:
            rewritten.append(action)
            rewritten += additions.get(action, ())
        programs.append(tuple(rewritten))
    return _rewritten(schedule, programs)


def _appended(schedule: Schedule, additions: Sequence[Action]) -> Schedule:
    """Put each action at the end of the program of its stage's rank."""
    programs = list(map(list, schedule.programs))
    for action in additions:
        rank = schedule.rank_of_stage[action.stage]
        programs[rank].append(action)
    return _rewritten(schedule, list(map(tuple, programs)))


def _rewritten(schedule: Schedule, programs: Sequence[Program]) -> Schedule:
    return replace(schedule, programs=tuple(programs))
