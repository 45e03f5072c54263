import csv
from textwrap import dedent

import pytest
from hypothesis import given, settings
from strategies import generated

from dpipe.errors import ScheduleError
from dpipe.schedule.action import parse_action
from dpipe.schedule.generate import gpipe, interleaved, one_f_one_b, zero_bubble
from dpipe.schedule.lower import lower
from dpipe.schedule.text import draw, from_csv, to_csv


def test_draw_leaves_communication_out():
    assert draw(lower(one_f_one_b(3, 4))) == draw(one_f_one_b(3, 4))


def test_draw_marks_an_action_and_cuts_what_is_far_from_it():
    assert draw(gpipe(2, 20), mark=parse_action("1F9")) == (
        dedent("""
            rank 0 | ...  0F4   0F5   0F6   0F7   0F8   0F9  0F10  0F11  0F12  0F13  0F14  0F15  0F16  ...
            rank 1 | ...  1F3   1F4   1F5   1F6   1F7   1F8  >1F9< 1F10  1F11  1F12  1F13  1F14  1F15  ...
        """).strip()  # noqa: E501 - the grid
    )


def test_draw_aligns_the_labels_of_many_ranks():
    assert [line[:9] for line in draw(gpipe(11, 1)).splitlines()][-2:] == ["rank  9 |", "rank 10 |"]


def test_draw_names_the_ranks_of_one_replica():
    assert [line[:9] for line in draw(gpipe(2, 1), ranks=(4, 10)).splitlines()] == [
        "rank  4 |",
        "rank 10 |",
    ]


def test_csv_has_one_row_a_rank():
    assert to_csv(lower(zero_bubble(2, 2))) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_csv_drops_idle_slots():
    assert from_csv("0F0,,0B0\n,1F0,1B0\n", name="gpipe") == gpipe(2, 1)


@settings(deadline=None)
@given(generated())
def test_csv_round_trips(schedule):
    assert from_csv(to_csv(schedule), schedule.name) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the stages of a CSV must be 0, 1"),
        ("0F0,0B0\n2F0,2B0\n", r"got \(stage, rank\) \[\(0, 0\), \(2, 1\)\]"),
        ("0F0\n0B0\n", r"got \(stage, rank\) \[\(0, 0\), \(0, 1\)\]"),
        ("0F0,0SEND_F0\n", "row 0, cell 1: 0SEND_F0 is not a compute action"),
        ("0F0,0UNSHARD\n", "'0UNSHARD' is not an action"),
    ],
)
def test_from_csv_refuses_other_text(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


@pytest.mark.parametrize(
    "schedule", [gpipe(2, 3), zero_bubble(2, 3), interleaved(2, 2, 4)], ids=lambda s: s.name
)
def test_torch_reads_and_lowers_our_csv(schedule):
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _validate_schedule

    rows = enumerate(csv.reader(to_csv(schedule).splitlines()))
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in rows}
    places = _validate_schedule(
        actions, schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    )
    assert places == dict(enumerate(schedule.rank_of_stage))
    lowered = _add_send_recv(
        actions, stage_to_rank=places.__getitem__, num_stages=schedule.num_stages
    )
    ours = {str(action) for action in lower(schedule, step=False).index}
    assert {str(action) for row in lowered.values() for action in row} == ours


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\r0F0,0B0", "cannot be read: new-line character"),
        ("0" * 200_000, "cannot be read: field larger"),
        ("0F999999999,0B0", "1000000000 micro-batches .* too many"),
    ],
    ids=["carriage return", "long", "micro-batches"],
)
def test_csv_of_an_impossible_step_is_refused(text: str, words: str) -> None:
    """Fuzzing found the first. Ranks receive their schedule as CSV from rank 0."""
    with pytest.raises(ScheduleError, match=words):
        from_csv(text)
