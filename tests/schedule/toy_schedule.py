"""A complete example of a new schedule: a function, and its entry in the table of generators."""

from dpipe.schedule.action import Action, Op
from dpipe.schedule.generate import Generator
from dpipe.schedule.schedule import Schedule


def in_pairs(num_stages: int, num_microbatches: int) -> Schedule:
    """Two forwards, then their two backwards, on each rank; one stage a rank.

    in_pairs(2, 4):

        rank 0 | 0F0 0F1  .   .  0B0 0B1 0F2 0F3  .   .  0B2 0B3
        rank 1 |  .  1F0 1F1 1B0 1B1  .   .  1F2 1F3 1B2 1B3  .
    """
    programs = []
    for rank in range(num_stages):
        program: list[Action] = []
        for first in range(0, num_microbatches, 2):
            pair = range(first, min(first + 2, num_microbatches))
            for op in (Op.F, Op.B):
                program += [Action(rank, op, microbatch) for microbatch in pair]
        programs.append(tuple(program))
    return Schedule(num_microbatches, tuple(range(num_stages)), tuple(programs), TOY.name)


TOY = Generator("in-pairs", in_pairs)
