"""What replicas that are cut differently exchange: layers that lie in one stage of each.

    layers      0 1 2 3 4 5
    replica 0   [ 0     ][1 ]        stage 0 holds layers 0 to 3
    replica 1   [ 0 ][ 1    ]        stage 0 holds layers 0 and 1
    segments    [ 0 ][1 ][2 ]        1 is layers 2 and 3: stage 0 of replica 0, stage 1 of replica 1

Replicas that are cut alike have a segment for each stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class LayerSegment:
    layers: range
    stages: tuple[int, ...]  # by replica, the one that holds it


def segments_of(cuts: Sequence[Sequence[int]]) -> tuple[LayerSegment, ...]:
    """`cuts` are the layers of each stage, by replica; all of as many layers and stages."""
    ends = [tuple(accumulate(cut)) for cut in cuts]
    boundaries = sorted({0, *(end for of_replica in ends for end in of_replica)})
    segments = []
    for start, stop in pairwise(boundaries):
        stages = []
        for of_replica in ends:
            before = [end for end in of_replica if end <= start]
            stages.append(len(before))
        segments.append(LayerSegment(range(start, stop), tuple(stages)))
    return tuple(segments)


def on_stage(segments: Sequence[LayerSegment], replica: int, stage: int) -> tuple[int, ...]:
    """The numbers of those that a stage holds, the last layers first: their gradients are final
    first, and replicas that all keep to this order never wait for each other in a circle.
    """
    held = [number for number, segment in enumerate(segments) if segment.stages[replica] == stage]
    return tuple(reversed(held))
