"""Schedules whose steps overlap, because the weights have two versions (PipeDream-2BW, Narayanan et
al. 2021): what a rank does between two of its STEPs, and how such a pipeline starts and ends.

Each rank takes micro-batches without end, one backward and one forward in turn. It is cut into
programs behind the last backward of a step. Then the rank has begun the next step already:

    rank 0   0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0STEP | 0B0 0F4 ...     4 micro-batches a step:
    rank 1   1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1STEP | 1B0 1F3 ...     4 to 7 are the next one's
    rank 2   2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2STEP | 2B1 2F3 ...

    opening  0F4 0F5 0F6 0F7                1F4 1F5 1F6           2F4 2F5 2B4 2F6
    steady   as above
    closing  0B0 0B1 0B2 0B3 0STEP          1B0 1F3 1B1 1B2 1B3   2B1 2F3 2B2 2B3
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dpipe.schedule.action import COMPUTE, RECVS, Action
from dpipe.schedule.schedule import Schedule

Program = tuple[Action, ...]


def ahead_by(depths: Sequence[int]) -> list[int]:
    """By rank that holds `depths[rank]` micro-batches, its backwards of the next step when this one
    ends. Half of what is held are gradients on their way back: so all ranks end a step at about one
    time, and none waits long for the others' votes.
    """
    ahead = []
    for depth in depths:
        fewer = depths[0] - depth
        ahead.append(fewer // 2)
    return ahead


def opening(schedule: Schedule) -> Schedule:
    """What the ranks do of a step ahead of its own program; nothing else."""
    return _part(schedule, ahead=1)


def closing(schedule: Schedule) -> Schedule:
    """The program of a step that no other follows; any other schedule as it is."""
    return _part(schedule, ahead=0) if schedule.runs_ahead else schedule


def _part(schedule: Schedule, ahead: int) -> Schedule:
    programs = []
    for program in schedule.programs:
        part = []
        for action in program:
            _, is_ahead = schedule.in_its_step(action)
            if is_ahead == ahead:
                part.append(action)
        programs.append(tuple(part))
    return replace(schedule, programs=tuple(programs))


def unrolled(schedule: Schedule, num_steps: int) -> Schedule:
    """The same as one long step: opening, steady steps, closing. What holds of it, such as that it
    makes progress, holds of `num_steps` steps. The end of the step is there once.
    """
    num_pieces = num_steps * schedule.num_pieces
    programs = []
    for program in schedule.programs:
        whole: list[Action] = []
        ends = [action for action in program if action.microbatch is None]
        # From -1: the opening is what a step before the first would do of it.
        for step in range(-1, num_steps):
            for action in program:
                number = (action.microbatch or 0) + step * schedule.num_pieces
                if action not in ends and 0 <= number < num_pieces:
                    whole.append(action._replace(microbatch=number))
        programs.append((*whole, *ends))
    num_microbatches = num_steps * schedule.num_microbatches
    return replace(
        schedule, num_microbatches=num_microbatches, programs=tuple(programs), num_versions=1
    )


def with_receives(schedule: Schedule, ahead: int) -> Schedule:
    """As `lower` posts them, but a program's first ones at the end of the program before."""
    programs = []
    for program in schedule.programs:
        posts = _posts(schedule, program, ahead)
        rewritten: list[Action] = []
        for position, action in enumerate(program):
            rewritten += posts[position]
            rewritten.append(action)
        programs.append(tuple(rewritten))
    return replace(schedule, programs=tuple(programs))


def _posts(schedule: Schedule, program: Program, ahead: int) -> dict[int, list[Action]]:
    """By the position in `program` that they are posted in front of."""
    posts: defaultdict[int, list[Action]] = defaultdict(list)
    computes = []
    for position, action in enumerate(program):
        if action.op in COMPUTE:
            computes.append(position)
    wrapped = []
    for turn, position in enumerate(computes):
        for need in schedule.requires(program[position]):
            early = turn - ahead
            if need.op not in RECVS:
                continue
            later = need._replace(microbatch=(need.microbatch or 0) + schedule.num_pieces)
            if early < 0 and schedule.in_its_step(need) == (need, 0):
                wrapped.append((computes[early], later))
            else:
                posts[computes[max(0, early)]].append(need)
    # Behind the others: those at one position are of an earlier micro-batch.
    for position, receive in wrapped:
        posts[position].append(receive)
    return posts
