"""What share of copies runs beside kernels."""

import pytest

from dpipe.bench.hidden import covered, merged


def test_copies_behind_no_kernel_are_not_hidden() -> None:
    assert covered([(0, 10)], [(10, 20)]) == 0
    assert covered([(0, 10)], []) == 0


def test_kernels_that_run_at_once_hide_a_copy_once() -> None:
    assert covered([(0, 10)], [(5, 9), (6, 8), (9, 12)]) == pytest.approx(0.5)


def test_longer_copies_count_for_more() -> None:
    assert covered([(0, 30), (50, 60)], [(0, 30)]) == pytest.approx(0.75)


def test_nothing_copied_has_no_share() -> None:
    assert covered([], [(0, 1)]) is None


def test_spans_that_touch_are_one() -> None:
    assert merged([(4, 6), (0, 2), (2, 3)]) == [(0, 3), (4, 6)]
