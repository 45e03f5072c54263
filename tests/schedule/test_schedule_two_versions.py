"""Schedules whose steps overlap: their programs, how they begin and end, what is checked."""

from dataclasses import replace

import pytest

from dpipe.errors import ScheduleError
from dpipe.schedule import two_versions
from dpipe.schedule.action import Action, Op
from dpipe.schedule.check import check, peak_in_flight
from dpipe.schedule.generate import generate
from dpipe.schedule.links import counterpart
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.two_versions import closing, opening, unrolled


def made(stages: int = 3, microbatches: int = 4, in_flight: int | None = 4) -> Schedule:
    return generate("2bw", stages, microbatches, in_flight=in_flight)


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]


def test_programs_are_what_the_docstring_draws() -> None:
    drawing = (two_versions.__doc__ or "").splitlines()
    ranks = [line.split("|")[0].split() for line in drawing if line.startswith("    rank ")]
    steady = [" ".join(actions[2:-1]) for actions in ranks]  # without "rank 0" and its STEP
    assert steady == lines(made())
    for name, part in (("opening", opening), ("closing", closing)):
        (line,) = (line for line in drawing if line.startswith(f"    {name} "))
        actions = [word for word in line.split()[1:] if "STEP" not in word]
        assert " ".join(actions) == " ".join(lines(part(made())))


@pytest.mark.parametrize("in_flight", [None, 1, 2, 8])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 8), (5, 3), (12, 16)])
def test_schedules_that_run_ahead_are_right(
    stages: int, microbatches: int, in_flight: int | None
) -> None:
    schedule = made(stages, microbatches, in_flight)
    check(schedule)
    check(lower(schedule))


def test_first_rank_holds_as_many_as_it_may() -> None:
    assert peak_in_flight(made()) == (4, 3, 2)
    assert peak_in_flight(made(12, 16, 16))[0] == 16


def test_steps_in_a_row_are_one_long_step() -> None:
    """0F4 of one step is 0F0 of the next: each is done once."""
    whole = unrolled(made(), 2)
    assert whole.programs[0][:6] == tuple(
        Action(0, op, number)
        for op, number in [(Op.F, 0), (Op.F, 1), (Op.F, 2), (Op.F, 3), (Op.B, 0), (Op.F, 4)]
    )
    assert len(whole.index) == 3 * 2 * 8


def test_what_one_rank_sends_in_a_program_the_other_takes_in_it_or_in_the_next() -> None:
    schedule = lower(made(12, 16, 16))
    for action in schedule.index:
        if action.op not in (Op.SEND_F, Op.SEND_B):
            continue
        receive = counterpart(action, schedule.num_stages)
        own, ahead = schedule.in_its_step(receive)
        assert receive in schedule.index or (ahead and own in schedule.index) or not ahead


def test_rank_that_waits_for_what_comes_behind_the_vote_is_refused() -> None:
    schedule = made()
    first, *others = schedule.programs
    # Rank 0 has done nothing of the next step, of which rank 1 needs three forwards.
    behind = tuple(
        action._replace(microbatch=(action.microbatch or 0) - 4) if action.op is Op.F else action
        for action in first
    )
    forwards_first = tuple(sorted(behind, key=lambda action: action.op is Op.B))
    with pytest.raises(ScheduleError, match="waits for 0F4, .* behind the next vote"):
        check(replace(schedule, programs=(forwards_first, *others)))


def test_action_of_a_step_after_the_next_is_refused() -> None:
    schedule = made()
    first, *others = schedule.programs
    later = (*first[:-1], Action(0, Op.F, 8))
    with pytest.raises(ScheduleError, match="0F8 on rank 0 is of a later step than the next"):
        check(replace(schedule, programs=(later, *others)))


def test_action_that_is_done_twice_is_refused() -> None:
    schedule = made()
    first, *others = schedule.programs
    with pytest.raises(ScheduleError, match="0B3 is missing"):
        check(replace(schedule, programs=(first[:-2] + first[-1:], *others)))


def test_weight_that_both_ends_share_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"set model\.tie_embeddings = false"):
        lower(made(), tied=True)
