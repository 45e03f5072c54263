from dataclasses import replace
from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import generated

from dpipe.errors import ScheduleError
from dpipe.schedule.action import COMPUTE, RECVS, SENDS, Action, Op, parse_action
from dpipe.schedule.check import check
from dpipe.schedule.generate import forward_only, gpipe, one_f_one_b, zero_bubble
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule


def programs(schedule: Schedule) -> str:
    return "\n".join(" ".join(map(str, program)) for program in schedule.programs)


def parse_program(text: str) -> tuple[Action, ...]:
    return tuple(map(parse_action, text.split()))


def lines(text: str) -> str:
    return dedent(text).strip()


def test_lower_adds_communication_and_the_step():
    assert programs(lower(gpipe(2, 2), recv_ahead=0)) == lines("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0COMPLETE 0VOTE 0STEP
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1COMPLETE 1VOTE 1STEP
    """)


def test_lower_posts_receives_ahead_of_need():
    lowered = lower(gpipe(2, 3), step=False, recv_ahead=2)
    assert programs(lowered) == lines("""
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B0 0B1 0B2
        1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2
    """)


def test_lower_splits_off_the_input_gradient_to_send():
    assert programs(lower(zero_bubble(2, 1), recv_ahead=0)) == lines("""
        0F0 0SEND_F0 0RECV_B0 0I0 0W0 0COMPLETE 0VOTE 0STEP
        1RECV_F0 1F0 1I0 1SEND_B0 1W0 1COMPLETE 1VOTE 1STEP
    """)


def test_lower_sends_no_gradient_to_stages_that_do_not_learn():
    lowered = lower(gpipe(3, 1), recv_ahead=0, frozen=1)
    check(lowered)
    assert programs(lowered) == lines("""
        0F0 0SEND_F0 0B0 0COMPLETE 0VOTE 0STEP
        1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1COMPLETE 1VOTE 1STEP
        2RECV_F0 2F0 2B0 2SEND_B0 2COMPLETE 2VOTE 2STEP
    """)


@given(generated(), st.data())
def test_lower_of_any_schedule_runs_with_stages_that_do_not_learn(schedule, data):
    frozen = data.draw(st.integers(0, schedule.num_stages - 1))
    lowered = lower(schedule, frozen=frozen)
    check(lowered)
    sent = {action.stage for action in lowered.index if action.op is Op.SEND_B}
    assert all(stage > frozen for stage in sent)


def test_lower_sends_nothing_inside_a_rank():
    assert programs(lower(gpipe(2, 1, stages_per_rank=2))) == (
        "0F0 1F0 1B0 0B0 0COMPLETE 1COMPLETE 0VOTE 0STEP 1STEP"
    )


def test_lower_posts_in_the_order_of_the_link_although_a_later_message_is_needed_sooner():
    # Rank 1 finishes stage 3 first, so it sends that tied gradient before the gradient for 0B0.
    lowered = lower(gpipe(4, 1, stages_per_rank=2), tied=True, recv_ahead=0)
    end = "0RECV_TIED 0RECV_B0 0B0 0SEND_TIED 0COMPLETE 2COMPLETE 0VOTE 0STEP 2STEP"
    assert programs(lowered).splitlines()[0].endswith(end)


def test_lower_exchanges_a_tied_gradient_once_it_is_final():
    assert programs(lower(gpipe(3, 1), tied=True, recv_ahead=0)) == lines("""
        0F0 0SEND_F0 0RECV_B0 0B0 0SEND_TIED 0RECV_TIED 0COMPLETE 0VOTE 0STEP
        1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1COMPLETE 1VOTE 1STEP
        2RECV_F0 2F0 2B0 2SEND_B0 2SEND_TIED 2RECV_TIED 2COMPLETE 2VOTE 2STEP
    """)


def test_lower_reduces_a_stage_at_once_and_a_tied_one_last():
    lowered = lower(gpipe(4, 1, stages_per_rank=2), tied=True, reduce=True)
    kept = set(Op) - RECVS - SENDS | {Op.SEND_TIED}
    shown = replace(
        lowered,
        programs=tuple(tuple(a for a in program if a.op in kept) for program in lowered.programs),
    )
    assert programs(shown) == lines("""
        0F0 2F0 2B0 2COMPLETE 2REDUCE_GRAD 0B0 0SEND_TIED 0COMPLETE 0REDUCE_GRAD 0AGREE 0VOTE 0STEP 2STEP
        1F0 3F0 3B0 3SEND_TIED 1B0 1COMPLETE 1REDUCE_GRAD 3COMPLETE 3REDUCE_GRAD 1AGREE 1VOTE 1STEP 3STEP
    """)  # noqa: E501 - programs


def test_lower_completes_both_ends_of_a_weight_tied_within_a_rank_before_it_reduces_either():
    lowered = lower(gpipe(2, 1, stages_per_rank=2), tied=True, reduce=True)
    assert programs(lowered).endswith(
        "0B0 0COMPLETE 1COMPLETE 0REDUCE_GRAD 1REDUCE_GRAD 0AGREE 0VOTE 0STEP 1STEP"
    )


def test_vote_is_the_only_thing_between_the_gradients_and_the_steps():
    lowered = lower(gpipe(4, 1, stages_per_rank=2), reduce=True)
    assert lowered.vote_and_steps(0) == parse_program("0VOTE 0STEP 2STEP")
    assert lowered.programs[0][-3:] == lowered.vote_and_steps(0)


def test_lower_adds_no_gradient_work_to_an_evaluation():
    assert programs(lower(forward_only(2, 1), tied=True, reduce=True)) == lines("""
        0F0 0SEND_F0
        1RECV_F0 1F0
    """)
    assert not lower(forward_only(2, 1), tied=True).tied


def test_lower_without_a_step_still_receives_the_tied_gradient():
    lowered = lower(gpipe(2, 1), tied=True, step=False, recv_ahead=0)
    assert programs(lowered).splitlines()[0] == ("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_TIED 0RECV_TIED")
    check(lowered)


@settings(deadline=None)
@given(generated(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 6))
def test_lowering_keeps_the_compute_order_and_passes_check(
    schedule, tied, reduce, step, recv_ahead
):
    lowered = lower(schedule, tied=tied, reduce=reduce, step=step, recv_ahead=recv_ahead)
    check(lowered)
    assert (
        tuple(tuple(a for a in program if a.op in COMPUTE) for program in lowered.programs)
        == schedule.programs
    )


@settings(deadline=None)
@given(generated())
def test_a_send_directly_follows_what_makes_it(schedule):
    for program in lower(schedule).programs:
        for before, action in pairwise(program):
            if action.op in (Op.SEND_F, Op.SEND_B):
                assert (before.stage, before.microbatch) == (action.stage, action.microbatch)
                assert before.op in (Op.F if action.op == Op.SEND_F else Op.B, Op.I)


def test_lower_refuses_a_lowered_schedule():
    with pytest.raises(ScheduleError, match="is lowered already"):
        lower(lower(gpipe(2, 2)))


def test_lower_refuses_a_negative_recv_ahead():
    with pytest.raises(ScheduleError, match="recv_ahead must not be negative, got -1"):
        lower(one_f_one_b(2, 2), recv_ahead=-1)
