"""What scripts/chaos says of the memory and descriptors of processes."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]


def test_levels_tell_first_and_last_of_what_was_there_for_long(script: Script) -> None:
    levels = script("levels").Levels()
    own = os.getpid()
    levels.look(0.0, {"m0": own})
    opened = []
    for minute in (1, 2, 3):
        levels.look(60.0 * minute, {"m0": own})
        levels.look(60.0 * minute + 1, {"m0": own})
        opened.append(open(os.devnull))  # noqa: SIM115 - a descriptor that stays
    levels.look(240.0, {"m1": own})
    for file in opened:
        file.close()
    (held,) = levels.looks["m0", own][:1]
    (line,) = levels.lines()
    assert line.startswith(f"m0 in 3 looks: {held}; at the end ")
    assert levels.looks["m0", own][-1].descriptors == held.descriptors + 2


def looks_at(script: Script, *memory_mb: float) -> Any:
    levels = script("levels").Levels()
    levels.looks["m0", 1] = [script("levels").Held(mb, 30, 9) for mb in memory_mb]
    return levels


SAWTOOTH = [100.0, 108.0, 101.0, 109.0, 99.0, 107.0] * 10
ONE_STEP = [100.0] * 25 + [140.0] * 35
LEAKING = [100 + 0.5 * minute + saw - 100 for minute, saw in enumerate(SAWTOOTH)]
EACH_QUARTER = [100.0] * 15 + [110.0] * 15 + [120.0] * 15 + [130.0] * 15


@pytest.mark.parametrize(
    ("memory_mb", "growing"),
    [
        ([100.0] * 60, []),
        (SAWTOOTH, []),
        (ONE_STEP, []),
        ([140.0 - minute for minute in range(60)], []),
        (LEAKING, ["m0"]),
        (EACH_QUARTER, ["m0"]),
        (LEAKING[:17], []),  # too short to judge
        (LEAKING[:18], ["m0"]),
    ],
)
def test_memory_that_keeps_rising_is_found(
    memory_mb: list[float], growing: list[str], script: Script
) -> None:
    levels = looks_at(script, *memory_mb)
    assert levels.growing() == growing
    (line,) = levels.lines()
    word = "GROWING" if growing else "level"
    assert (word in line) == (len(memory_mb) >= 18)


def test_slope_is_that_of_a_steady_leak(script: Script) -> None:
    held = script("levels").Held
    looks = [held(100 + 0.5 * minute, 30 + minute // 10, 9) for minute in range(60)]
    growth = script("levels").growth_of(looks)
    assert growth.memory_mb == pytest.approx(30.0)
    assert growth.descriptors == pytest.approx(6.0)
    assert growth.threads == 0.0


@pytest.mark.parametrize(("most_mb", "growing"), [(29.0, ["m0"]), (31.0, [])])
def test_bound_may_be_said(most_mb: float, growing: list[str], script: Script) -> None:
    levels = looks_at(script, *(100 + 0.5 * minute for minute in range(60)))
    levels.most = script("levels").Held(most_mb, 4.0, 4.0)
    assert levels.growing() == growing


def test_descriptors_that_keep_rising_are_found(script: Script) -> None:
    held = script("levels").Held
    levels = script("levels").Levels()
    levels.looks["coordinator", 1] = [held(100.0, 30 + minute, 9) for minute in range(20)]
    assert levels.growing() == ["coordinator"]
    assert "+60.0 descriptors" in levels.lines()[0]


def test_process_that_has_ended_holds_nothing(script: Script) -> None:
    assert script("levels").held_by(2**22 + 1) is None
