import pytest

from dpipe.search.inner_steps import LEAST, fewest_inner_steps


@pytest.mark.parametrize(
    ("agreeing_us", "fragments", "inner_steps"),
    [
        (100.0, 1, LEAST),  # an exchange that takes no time
        (90.0, 1, LEAST),
        (200.0, 1, 50),  # 100 in 50 steps of 100: 2 %
        (200.5, 1, 51),
        (125.0, 4, 50),  # four times in as many steps
        (100.0, 20, 20),  # one fragment is averaged at a step
        (1e9, 1, 1000),
    ],
)
def test_averaging_takes_two_percent_of_the_time(
    agreeing_us: float, fragments: int, inner_steps: int
) -> None:
    assert fewest_inner_steps(100.0, agreeing_us, fragments) == inner_steps
