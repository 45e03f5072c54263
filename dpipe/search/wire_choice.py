"""`pipeline.wire = "auto"`: what the simulator finds best of the formats that the user allows.

smallest everywhere -> the shortest step; where a larger format makes it no longer, it is taken
"""

from collections.abc import Callable, Sequence

from dpipe.wire.format import HopFormats, wire_bytes

# Of the step with the smallest formats: what a larger one may cost.
AS_FAST = 1.005
_MUCH = 1 << 20  # values of a tensor, by which formats are compared


def largest_first(names: Sequence[str]) -> list[str]:
    """By their bytes; of those that take as many the first that is listed is the first."""
    return sorted(dict.fromkeys(names), key=lambda name: -wire_bytes(name, _MUCH))


def choose_formats(
    allowed: Sequence[str],
    num_hops: int,
    step_us: Callable[[HopFormats], float],
) -> HopFormats:
    """The largest formats with which a step is as fast as with the smallest; larger ones round
    less. `step_us` simulates a step.
    """
    names = largest_first(allowed)
    chosen = [names[-1]] * (2 * num_hops)  # forward, then backward
    if len(names) == 1 or not num_hops:
        return _by_direction(chosen)
    limit_us = AS_FAST * step_us(_by_direction(chosen))
    still_open = list(range(2 * num_hops))
    for name in names[:-1]:
        # Many at once: on most networks few links are short of bandwidth, or all are.
        groups = [still_open]
        while groups:
            group = groups.pop()
            larger = list(chosen)
            for place in group:
                larger[place] = name
            if step_us(_by_direction(larger)) <= limit_us:
                chosen = larger
                still_open = [place for place in still_open if place not in group]
            elif len(group) > 1:
                half = len(group) // 2
                groups += [group[half:], group[:half]]
        if not still_open:
            break
    return _by_direction(chosen)


def _by_direction(names: Sequence[str]) -> HopFormats:
    num_hops = len(names) // 2
    return HopFormats(tuple(names[:num_hops]), tuple(names[num_hops:]))
