"""Which core each rank computes on, where tensor-parallel groups share the cores of a machine.

    cores       0         1
    group 0     rank 0    rank 1
    group 1     rank 2    rank 3

The ranks of a group wait for each other at every exchange. Linux lets a thread wait for the core
that it was on though another is free, until a tick; with two of a group on one core, all of it
waits.
"""

import os


def cores_in_turn(num_ranks: int, group_size: int, threads: int) -> list[list[int]]:
    """The cores of each rank, `threads` each, of those that this process may use.

    Empty where ranks are better left to the scheduler: there are cores for all, a group has not one
    for each of its ranks, or some cores would get more ranks than others.
    """
    usable = sorted(os.sched_getaffinity(0))
    places = [usable[first : first + threads] for first in range(0, len(usable), threads)]
    whole = [place for place in places if len(place) == threads]
    if group_size == 1 or len(whole) < group_size:
        return []
    if len(whole) >= num_ranks or num_ranks % len(whole):
        return []
    return [whole[rank % len(whole)] for rank in range(num_ranks)]
