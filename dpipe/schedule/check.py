"""What must hold of a schedule before anything runs, and what it will hold in memory.

A schedule that passes cannot hang on order: every action is there once, both ends of each directed
link agree on the order of its messages (NCCL point-to-point has no tags), and the ranks, each in
its own order, reach the end.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from dpipe.errors import ScheduleError
from dpipe.schedule.action import COMPUTE, RECVS, Action, Op
from dpipe.schedule.links import compute_needs, counterpart, receives_by_link, sends_by_link
from dpipe.schedule.schedule import Schedule, backward_piece
from dpipe.schedule.text import draw
from dpipe.schedule.two_versions import opening, unrolled

_MAKES = {
    Op.F: ("output",),
    Op.B: ("input gradient", "weight gradient"),
    Op.I: ("input gradient",),
    Op.W: ("weight gradient",),
}
# Activations that are held from then on. I frees none: W needs them too.
_HOLDS = {
    Op.F: 1,
    Op.B: -1,
    Op.W: -1,
}

_UNROLLED_STEPS = 3  # the first, one between two others, the last


def check(schedule: Schedule) -> None:
    """Raise `ScheduleError`, with the grid and the culprit marked, for a schedule that cannot run.

    Of a compute-only schedule it checks what applies: all but the links. One that runs ahead is
    checked as several steps in a row.
    """
    if schedule.runs_ahead:
        _check_ahead(schedule)
        schedule = unrolled(schedule, _UNROLLED_STEPS)
    # In this order: the checks of links and progress look actions up, and rely on all being there.
    _check_complete(schedule)
    _check_microbatch_order(schedule)
    _check_links(schedule)
    _check_progress(schedule)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most activations (stage x micro-batch) that each rank holds at once, from F to B or W."""
    begun = [0] * schedule.num_ranks
    if schedule.runs_ahead:
        for action, (rank, _) in opening(schedule).index.items():
            begun[rank] += _HOLDS.get(action.op, 0)
    return tuple(map(_peak, schedule.programs, begun))


def _peak(program: Iterable[Action], held: int) -> int:
    peak = held
    for action in program:
        held += _HOLDS.get(action.op, 0)
        peak = max(peak, held)
    return peak


def _check_ahead(schedule: Schedule) -> None:
    """No rank waits for what another does behind the vote that ends the step: for ever, if all wait
    for that vote. Nothing is of a later step than the next.
    """
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if (action.microbatch or 0) >= 2 * schedule.num_pieces:
                message = f"{action} on rank {rank} is of a later step than the next"
                raise _error(schedule, message, action)
            if action.op in RECVS:
                continue  # only posted
            for need in compute_needs(schedule, action):
                _, ahead = schedule.in_its_step(need)
                if ahead and need not in schedule.index:
                    message = (
                        f"{action} on rank {rank} waits for {need}, which belongs to the program "
                        "behind the next vote"
                    )
                    raise _error(schedule, message, action)


def _check_complete(schedule: Schedule) -> None:
    """Every action that belongs to the schedule is there, once, where its stage lives; and no
    other.
    """
    expected = dict.fromkeys(_expected(schedule))  # a set that keeps its order, for the message
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if action not in expected:
                message = f"{action} on rank {rank} does not belong here: {_sizes(schedule)}"
                raise _error(schedule, message, action)
            home = schedule.rank_of_stage[action.stage]
            if home != rank:
                message = f"{action} is on rank {rank}, but stage {action.stage} is on rank {home}"
                raise _error(schedule, message, action)
    counts = Counter(action for program in schedule.programs for action in program)
    for action in expected:
        if counts[action] != 1:
            times = f"{counts[action]} times" if counts[action] else "missing"
            home = schedule.rank_of_stage[action.stage]
            message = f"{action} is {times} on rank {home}: {_sizes(schedule)}"
            raise _error(schedule, message, action)


def _expected(schedule: Schedule) -> Iterator[Action]:
    """All actions of a complete schedule. One without any backward is for evaluation, and complete
    as such; so is one without replicas, and one without a step.
    """
    once = {action.op for action in schedule.index if action.microbatch is None}
    reduces = not once.isdisjoint({Op.REDUCE_GRAD, Op.AGREE})
    steps = not once.isdisjoint({Op.VOTE, Op.STEP})
    completes = reduces or steps or Op.COMPLETE in once
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_pieces):
            for op in _expected_ops(schedule, stage, microbatch):
                yield Action(stage, op, microbatch)
        if schedule.lowered and schedule.trains:
            ops: list[Op] = []
            if schedule.tied_partner(stage) is not None:
                ops += [Op.SEND_TIED, Op.RECV_TIED]
            if completes:
                ops.append(Op.COMPLETE)
            if reduces:
                ops.append(Op.REDUCE_GRAD)
            if steps:
                ops.append(Op.STEP)
            yield from (Action(stage, op) for op in ops)
    if schedule.lowered and schedule.trains:
        of_ranks: list[Op] = []
        if reduces:
            of_ranks.append(Op.AGREE)
        if steps:
            of_ranks.append(Op.VOTE)
        for op in of_ranks:
            yield from (schedule.of_rank(rank, op) for rank in range(schedule.num_ranks))


def _expected_ops(
    schedule: Schedule,
    stage: int,
    microbatch: int,
) -> Iterator[Op]:
    before = schedule.lowered and stage > 0 and schedule.hops(stage, stage - 1)
    is_inner = schedule.lowered and not schedule.is_last(stage)
    after = is_inner and schedule.hops(stage, stage + 1)
    if before:
        yield Op.RECV_F
    yield Op.F
    if after:
        yield Op.SEND_F
    if not schedule.trains:
        return
    if after and schedule.passes_back(stage + 1):
        yield Op.RECV_B
    halves = (
        Action(stage, Op.I, microbatch),
        Action(stage, Op.W, microbatch),
    )
    # Either half alone says that the other is missing, and not the whole.
    if any(half in schedule.index for half in halves):
        yield Op.I
        yield Op.W
    else:
        yield Op.B
    if before and schedule.passes_back(stage):
        yield Op.SEND_B


def _check_microbatch_order(schedule: Schedule) -> None:
    """Each stage takes its micro-batches in order, so that gradients add up in one order whatever
    the schedule; and the slices of each in order, backward from the last to the first.
    """
    for rank, program in enumerate(schedule.programs):
        turns: Counter[tuple[int, str]] = Counter()
        for action in program:
            # What is made counts, not the op: a B stands where a stage's I and W do.
            for made in _MAKES.get(action.op, ()):
                turn = turns[action.stage, made]
                expected = turn
                if action.op is not Op.F:
                    expected = backward_piece(turn, schedule.num_slices)
                if action.microbatch != expected:
                    due = f"the next {made} of stage {action.stage} is for micro-batch {expected}"
                    message = f"{action} on rank {rank} is out of order: {due}"
                    raise _error(schedule, message, action)
                turns[action.stage, made] += 1


def _check_links(schedule: Schedule) -> None:
    """The sends at one end of each directed link and the receives at the other are in one order."""
    received = receives_by_link(schedule)
    for (source, target), sends in sends_by_link(schedule).items():
        pairs = zip(sends, received[source, target], strict=True)
        for number, (send, receive) in enumerate(pairs):
            expected = counterpart(send, schedule.num_stages)
            if receive != expected:
                message = (
                    f"the link from rank {source} to rank {target} disagrees on message {number}: "
                    f"rank {source} sends {send} where rank {target} posts {receive}, not "
                    f"{expected}"
                )
                raise _error(schedule, message, receive)


def _check_progress(schedule: Schedule) -> None:
    """The ranks reach the end: sends and receives do not block, everything else runs in its rank's
    order.
    """
    # By order alone, whatever takes how long: what can run at some time can run at any.
    needs = _needs(schedule)
    done = _reachable(needs)
    if len(done) == len(needs):
        return
    culprits = []
    lines = []
    for rank, program in enumerate(schedule.programs):
        # A receive is only posted: what stops a rank is an action that cannot run.
        blocked = (a for a in program if a not in done and a.op not in RECVS)
        stop = next(blocked, None)
        if stop is None:
            continue
        need = next(need for need in needs[stop] if need not in done)
        there = schedule.rank_of_stage[need.stage]
        culprits.append(stop)
        lines.append(f"rank {rank} stops at {stop}, which waits for {need} on rank {there}")
    raise _error(schedule, f"no progress: {'; '.join(lines)}", culprits[0])


def _needs(schedule: Schedule) -> dict[Action, list[Action]]:
    """What each action waits for: its data, and the action before it on its rank, unless that only
    posts a receive.
    """
    needs: dict[Action, list[Action]] = {}
    for program in schedule.programs:
        before: list[Action] = []
        for action in program:
            if schedule.lowered:
                data = list(schedule.requires(action))
            else:
                data = list(compute_needs(schedule, action))
            needs[action] = [*data, *before]
            if action.op not in RECVS:
                before = [action]
    return needs


def _reachable(needs: dict[Action, list[Action]]) -> set[Action]:
    """The actions that can ever be done (Kahn 1962), in time linear in actions and needs."""
    missing = {action: len(wanted) for action, wanted in needs.items()}
    wanted_by: dict[Action, list[Action]] = defaultdict(list)
    for action, wanted in needs.items():
        for need in wanted:
            wanted_by[need].append(action)
    ready = [action for action, count in missing.items() if count == 0]
    done = set(ready)
    while ready:
        for action in wanted_by[ready.pop()]:
            missing[action] -= 1
            if missing[action] == 0:
                done.add(action)
                ready.append(action)
    return done


def _sizes(schedule: Schedule) -> str:
    kind = "lowered" if schedule.lowered else "compute-only"
    sizes = f"{schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
    # Few schedules have slices, and a message need not speak of them then.
    if schedule.num_slices > 1:
        sizes += f" of {schedule.num_slices} slices"
    return f"{sizes}, {kind}"


def _error(schedule: Schedule, message: str, culprit: Action) -> ScheduleError:
    mark: Action | None = culprit
    if culprit.op not in COMPUTE or culprit not in schedule.index:
        mark = _beside(schedule, culprit)
    return ScheduleError(f"schedule {schedule.name!r}: {message}\n{draw(schedule, mark)}")


def _beside(schedule: Schedule, culprit: Action) -> Action | None:
    """A compute action to mark for one that the grid does not show: of the same stage and
    micro-batch.
    """
    for action in schedule.index:
        same_stage = action.stage == culprit.stage
        same_microbatch = action.microbatch == culprit.microbatch
        if same_stage and same_microbatch and action.op in COMPUTE:
            return action
    return None
