from dataclasses import replace
from textwrap import dedent

import pytest

from dpipe.errors import ScheduleError
from dpipe.schedule.action import parse_action
from dpipe.schedule.check import check, peak_in_flight
from dpipe.schedule.generate import gpipe, interleaved, one_f_one_b, zero_bubble
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule


def with_program(schedule: Schedule, rank: int, text: str) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(map(parse_action, text.split()))
    return replace(schedule, programs=tuple(programs))


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as raised:
        check(schedule)
    return str(raised.value)


def test_check_draws_the_grid_and_marks_the_culprit():
    assert refusal(with_program(gpipe(2, 2), 1, "1F0 1F1 1B1 1B0")) == (
        dedent("""
            schedule 'gpipe': 1B1 on rank 1 is out of order: the next input gradient of stage 1 is for micro-batch 0
            rank 0 |  0F0   0F1    .     .     .    0B0   0B1
            rank 1 |   .    1F0   1F1  >1B1<  1B0    .     .
        """).strip()  # noqa: E501 - the message
    )


@pytest.mark.parametrize(
    ("rank", "program", "message"),
    [
        (1, "1F0 1F1 1B0", "1B1 is missing on rank 1: 2 stages, 2 micro-batches, compute-only"),
        (1, "1F0 1F1 1B0 1B1 1B1", "1B1 is 2 times on rank 1"),
        (1, "1F0 1F1 1B0 1B1 0F0", "0F0 is on rank 1, but stage 0 is on rank 0"),
        (1, "1F0 1F1 1B0 1B1 1B2", "1B2 on rank 1 does not belong here: 2 stages, 2 micro-batches"),
        (1, "1F0 1F1 1B0 1B1 7F0", "7F0 on rank 1 does not belong here"),
        (1, "1F0 1F1 1B0 1B1 1STEP", "1STEP on rank 1 does not belong here"),
        (1, "1F0 1F1 1B0 1B1 1I1", "1B1 on rank 1 does not belong here"),
        (1, "1F0 1F1 1B0 1I1", "1W1 is missing on rank 1"),
        (
            1,
            "1F1 1F0 1B0 1B1",
            "1F1 on rank 1 is out of order: the next output of stage 1 is for micro-batch 0",
        ),
        (
            0,
            "0F0 0F1 0I0 0I1 0W1 0W0",
            "0W1 on rank 0 is out of order: the next weight gradient of stage 0 is for micro-batch "
            "0",
        ),
        (
            0,
            "0F0 0F1 0I0 0B1 0W0",
            "0B1 on rank 0 is out of order: the next weight gradient of stage 0 is for",
        ),
        (0, "", "0F0 is missing on rank 0"),
    ],
)
def test_check_refuses_a_program_that_is_wrong(rank, program, message):
    assert message in refusal(with_program(gpipe(2, 2), rank, program))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "1RECV_F0 1F0 1B0 1COMPLETE 1VOTE 1STEP",
            "1SEND_B0 is missing on rank 1: 2 stages, 1 micro-batches, lowered",
        ),
        ("1RECV_F0 1F0 1B0 1SEND_B0 1COMPLETE 1VOTE", "1STEP is missing on rank 1"),
        ("1RECV_F0 1F0 1B0 1SEND_B0 1COMPLETE 1STEP", "1VOTE is missing on rank 1"),
        ("1RECV_F0 1F0 1B0 1SEND_B0 1VOTE 1STEP", "1COMPLETE is missing on rank 1"),
        (
            "1RECV_F0 1F0 1B0 1SEND_B0 1COMPLETE 1STEP 1VOTE",
            "rank 1 stops at 1STEP, which waits for 1VOTE on rank 1",
        ),
        (
            "1RECV_F0 1F0 1B0 1SEND_B0 1COMPLETE 1REDUCE_GRAD 1VOTE 1STEP",
            "0REDUCE_GRAD is missing on rank 0",
        ),
        (
            "1RECV_F0 1F0 1B0 1SEND_B0 1COMPLETE 1AGREE 1VOTE 1STEP",
            "0REDUCE_GRAD is missing on rank 0",
        ),
        (
            "1RECV_F0 1F0 1B0 1SEND_B0 1COMPLETE 1VOTE 1STEP 1SEND_TIED",
            "1SEND_TIED on rank 1 does not belong here",
        ),
    ],
)
def test_check_refuses_a_lowered_program_that_is_wrong(program, message):
    assert message in refusal(with_program(lower(gpipe(2, 1)), 1, program))


def test_check_refuses_a_link_whose_ends_disagree():
    broken = with_program(
        lower(gpipe(2, 2)),
        1,
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1COMPLETE 1VOTE 1STEP",
    )
    assert (
        "the link from rank 0 to rank 1 disagrees on message 0: "
        "rank 0 sends 0SEND_F0 where rank 1 posts 1RECV_F1, not 1RECV_F0"
    ) in refusal(broken)


def test_check_names_what_each_rank_is_stuck_at():
    text = refusal(with_program(gpipe(2, 1), 0, "0B0 0F0"))
    assert (
        "no progress: rank 0 stops at 0B0, which waits for 0F0 on rank 0; rank 1 stops at 1F0"
        in text
    )
    assert text.splitlines()[1:] == ["rank 0 | >0B0<  0F0", "rank 1 |  1F0   1B0"]


def test_check_refuses_a_receive_that_is_posted_after_its_use():
    broken = with_program(lower(gpipe(2, 1)), 1, "1F0 1RECV_F0 1B0 1SEND_B0 1COMPLETE 1VOTE 1STEP")
    assert "rank 1 stops at 1F0, which waits for 1RECV_F0 on rank 1" in refusal(broken)


def test_check_refuses_a_send_before_what_makes_it():
    broken = with_program(
        lower(gpipe(2, 1), recv_ahead=0), 0, "0SEND_F0 0F0 0RECV_B0 0B0 0COMPLETE 0VOTE 0STEP"
    )
    assert "rank 0 stops at 0SEND_F0, which waits for 0F0 on rank 0" in refusal(broken)


def test_check_refuses_ranks_that_wait_for_each_other():
    # Stage 2 is on rank 0 again: a rank that finishes stage 0 backward before stage 2 forward can
    # never start it.
    broken = with_program(interleaved(2, 2, 1), 0, "0F0 0B0 2F0 2B0")
    assert (
        "rank 0 stops at 0B0, which waits for 1B0 on rank 1; rank 1 stops at 3F0, which waits for "
        "2F0" in refusal(broken)
    )


@pytest.mark.parametrize(
    ("schedule", "peaks"),
    [
        (gpipe(3, 4), (4, 4, 4)),
        (gpipe(4, 3, stages_per_rank=2), (6, 6)),
        (one_f_one_b(3, 4), (3, 2, 1)),
        (one_f_one_b(3, 8, in_flight=6), (6, 4, 2)),
        (zero_bubble(3, 8, memory_limit=4), (4, 4, 4)),
        (lower(one_f_one_b(3, 4)), (3, 2, 1)),
    ],
)
def test_peak_in_flight_counts_activations_from_forward_to_weight_gradient(schedule, peaks):
    assert peak_in_flight(schedule) == peaks
