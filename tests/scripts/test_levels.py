"""What scripts/chaos says of the memory and descriptors of processes."""

import os
from collections.abc import Callable
from types import ModuleType

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


def test_process_that_has_ended_holds_nothing(script: Script) -> None:
    assert script("levels").held_by(2**22 + 1) is None
