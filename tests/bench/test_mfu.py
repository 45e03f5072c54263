"""The plain loop and the engine train the same model; otherwise their times could not be
compared.
"""

from dataclasses import replace

import pytest

from dpipe.bench.mfu import TINY, Case, Measured, check_parity, measure, measure_both


@pytest.mark.parametrize(
    "case",
    [TINY, replace(TINY, parameters="bf16", precision="bf16"), replace(TINY, recompute="full")],
    ids=["fp32", "bf16 with masters", "recompute"],
)
def test_plain_loop_and_engine_have_the_same_losses(case: Case) -> None:
    plain, ours = measure_both(case)
    assert plain.losses == ours.losses
    check_parity(case, plain, ours)


def test_engine_alone_has_the_same_losses_as_beside_the_plain_loop() -> None:
    assert measure(TINY).losses == measure_both(TINY)[1].losses


def measured(*losses: float) -> Measured:
    return Measured(1.0, losses, None, {})


def test_losses_that_differ_by_more_than_rounding_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"the losses differ by 0\.0010"):
        check_parity(TINY, measured(5.0, 4.0), measured(5.0, 4.001))


def test_plain_loop_that_learns_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="the plain loop has learned nothing"):
        check_parity(TINY, measured(5.0, 5.0), measured(5.0, 5.0))
