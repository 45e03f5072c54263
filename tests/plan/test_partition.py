import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpipe.errors import ConfigError
from dpipe.plan.partition import split, split_by_stage


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 2, (2, 2)),
        ([1, 1, 1, 1, 4], 2, (4, 1)),
        ([1, 1, 1, 1, 4, 1, 1], 3, (4, 1, 2)),
        (
            [9, 1, 1, 1],
            3,
            (1, 1, 2),
        ),  # the most expensive stage is fixed; the others still share evenly
        ([0, 5, 5, 5, 5, 2], 4, (2, 1, 1, 2)),
        ([1, 1, 1, 1, 1], 2, (2, 3)),  # the earlier stage holds more micro-batches
        ([3], 1, (1,)),
    ],
)
def test_split_minimises_the_most_expensive_stage(
    costs: list[float], num_stages: int, expected: tuple[int, ...]
) -> None:
    assert split(costs, num_stages) == expected


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
def test_split_is_as_good_as_trying_all(costs: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))

    def value(sizes: tuple[int, ...]) -> tuple[int, int]:
        ends = [0, *itertools.accumulate(sizes)]
        stages = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max(stages), sum(cost**2 for cost in stages)

    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    all_sizes = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts]
    found = split(costs, num_stages)
    assert sum(found) == len(costs)
    assert value(found) == min(map(value, all_sizes))


def test_split_refuses_fewer_layers_than_stages() -> None:
    with pytest.raises(
        ConfigError, match=r"3 layers cannot make 4 stages.*lower pipeline.stages to 3"
    ):
        split([1, 1, 1], 4)


def test_slower_stages_get_fewer_layers() -> None:
    """The stages are on machines of speeds 4, 1 and 2."""
    costs = [[1.0] * 14, [4.0] * 14, [2.0] * 14]
    assert split_by_stage(costs) == (8, 2, 4)
