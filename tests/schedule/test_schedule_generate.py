from dataclasses import replace
from itertools import pairwise, product
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import counts, generated

from dpipe.errors import ScheduleError
from dpipe.schedule.action import Op
from dpipe.schedule.check import check, peak_in_flight
from dpipe.schedule.generate import (
    GENERATORS,
    forward_only,
    generate,
    gpipe,
    interleaved,
    least_in_flight,
    one_f_one_b,
    zb_v,
    zero_bubble,
)
from dpipe.schedule.lower import lower
from dpipe.schedule.text import draw, from_csv, to_csv


def picture(text: str) -> str:
    return dedent(text).strip()


def test_gpipe_runs_all_forwards_then_all_backwards():
    assert draw(gpipe(3, 3)) == picture("""
        rank 0 | 0F0 0F1 0F2  .   .   .   .  0B0 0B1 0B2
        rank 1 |  .  1F0 1F1 1F2  .   .  1B0 1B1 1B2  .
        rank 2 |  .   .  2F0 2F1 2F2 2B0 2B1 2B2  .   .
    """)


def test_gpipe_goes_through_the_stages_of_a_rank_and_back():
    assert draw(gpipe(4, 2, stages_per_rank=2)) == picture("""
        rank 0 | 0F0 0F1 2F0 2F1  .   .  2B0 2B1 0B0 0B1
        rank 1 |  .  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1  .
    """)


def test_forward_only_has_no_backward():
    assert draw(forward_only(3, 4)) == picture("""
        rank 0 | 0F0 0F1 0F2 0F3  .   .
        rank 1 |  .  1F0 1F1 1F2 1F3  .
        rank 2 |  .   .  2F0 2F1 2F2 2F3
    """)


def test_1f1b_warms_up_by_the_distance_from_the_end():
    assert draw(one_f_one_b(3, 4)) == picture("""
        rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
        rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .
    """)


def test_zb_v_goes_down_the_ranks_and_up_again():
    assert draw(zb_v(4, 3)) == picture("""
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
        rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """)
    assert zb_v(8, 3).rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("microbatches", [1, 2, 7, 16])
def test_zb_v_holds_as_much_as_1f1b(ranks, microbatches):
    schedule = zb_v(2 * ranks, microbatches)
    check(schedule)
    # In stages half as large.
    assert max(peak_in_flight(schedule)) <= 2 * ranks


def test_1f1b_in_flight_deepens_every_rank_in_proportion():
    assert draw(one_f_one_b(3, 6, in_flight=5)) == picture("""
        rank 0 | 0F0 0F1 0F2 0F3 0F4  .  0B0 0F5 0B1  .  0B2  .  0B3  .  0B4 0B5
        rank 1 |  .  1F0 1F1 1F2 1F3 1B0 1F4 1B1 1F5 1B2  .  1B3  .  1B4 1B5  .
        rank 2 |  .   .  2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5  .   .
    """)


def test_1f1b_with_one_in_flight_runs_one_micro_batch_at_a_time():
    assert draw(one_f_one_b(2, 2, in_flight=1)) == picture("""
        rank 0 | 0F0  .   .  0B0 0F1  .   .  0B1
        rank 1 |  .  1F0 1B0  .   .  1F1 1B1  .
    """)


def test_1f1b_of_slices_goes_back_from_the_last_slice_to_the_first():
    schedule = one_f_one_b(3, 2, num_slices=2)
    check(lower(schedule))
    assert draw(schedule) == picture("""
        rank 0 | 0F0 0F1 0F2 0F3  .   .  0B1  .  0B0  .  0B3 0B2
        rank 1 |  .  1F0 1F1 1F2  .  1B1 1F3 1B0  .  1B3 1B2  .
        rank 2 |  .   .  2F0 2F1 2B1 2F2 2B0 2F3 2B3 2B2  .   .
    """)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("in_flight", [None, 1, 3, 40])
def test_slices_of_any_number_can_run(name, in_flight):
    parameters = {} if name == "gpipe" else {"in_flight": in_flight}
    for ranks, microbatches, slices in product((1, 2, 4), (1, 3), (2, 3, 4)):
        schedule = generate(name, ranks, microbatches, num_slices=slices, **parameters)
        check(lower(schedule, reduce=True))
        assert from_csv(to_csv(schedule), name, slices).programs == schedule.programs


def test_a_slice_waits_for_the_one_before_it_and_its_gradient_for_the_one_behind():
    schedule = one_f_one_b(2, 2, num_slices=3)
    needs = {str(a): set(map(str, schedule.requires(a))) for a in schedule.index}
    assert needs["0F3"] == set()  # the next sequence
    assert needs["0F4"] == {"0F3"}
    assert needs["1F1"] == {"1RECV_F1", "1F0"}
    assert needs["1B2"] == {"1F2"}
    assert needs["1B1"] == {"1F1", "1B2"}
    assert needs["0B0"] == {"0F0", "0RECV_B0", "0B1"}


def test_slices_out_of_order_are_refused():
    schedule = one_f_one_b(1, 1, num_slices=2)
    wrong = replace(schedule, programs=((*schedule.programs[0][:2], *schedule.programs[0][:1:-1]),))
    with pytest.raises(
        ScheduleError, match="the next input gradient of stage 0 is for micro-batch 1"
    ):
        check(wrong)


def test_schedules_that_cut_no_sequences_say_which_do():
    with pytest.raises(ScheduleError, match='takes no num_slices: use "gpipe" or "1f1b"'):
        generate("zero-bubble", 4, 4, num_slices=2)


def test_interleaved_takes_a_group_through_one_stage_after_the_other():
    assert draw(interleaved(2, 2, 4)) == picture("""
        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
        rank 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .
    """)


def test_interleaved_takes_a_number_of_micro_batches_that_is_no_multiple_of_the_ranks():
    assert draw(interleaved(2, 2, 3)) == picture("""
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 2B0  .  2B1  .  2B2 0B0 0B1 0B2
        rank 1 |  .  1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2  .
    """)


def test_zero_bubble_fills_the_gaps_with_weight_gradients():
    assert draw(zero_bubble(3, 4)) == picture("""
        rank 0 | 0F0 0F1 0F2  .   .  0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3
        rank 1 |  .  1F0 1F1  .  1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3
        rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3
    """)


def test_zero_bubble_under_a_memory_limit_runs_weight_gradients_sooner():
    assert draw(zero_bubble(2, 4, memory_limit=2)) == picture("""
        rank 0 | 0F0 0F1  .  0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0W3
        rank 1 |  .  1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1F3 1I3 1W2 1W3
    """)


@settings(deadline=None)
@given(generated())
def test_every_generated_schedule_passes_check(schedule):
    check(schedule)


@settings(deadline=None)
@given(counts, st.integers(1, 3), st.integers(1, 12), st.integers(0, 30))
def test_in_flight_is_what_the_first_rank_holds_at_most(ranks, per_rank, microbatches, more):
    in_flight = least_in_flight(ranks, per_rank, microbatches) + more
    peaks = peak_in_flight(interleaved(ranks, per_rank, microbatches, in_flight))
    assert peaks[0] == min(in_flight, per_rank * microbatches)
    assert all(later <= earlier for earlier, later in pairwise(peaks))


@settings(deadline=None)
@given(counts, st.integers(1, 12), st.integers(1, 15), st.integers(1, 15))
def test_zero_bubble_keeps_both_limits(stages, microbatches, in_flight, memory_limit):
    schedule = zero_bubble(stages, microbatches, in_flight, memory_limit)
    assert max(peak_in_flight(schedule)) <= memory_limit
    forwards, gradients = 0, 0
    for action in schedule.programs[0]:
        forwards += action.op == Op.F
        gradients += action.op == Op.I
        assert forwards - gradients <= in_flight


@pytest.mark.parametrize("name", GENERATORS)
def test_generate_makes_each_schedule_by_name(name):
    per_rank = GENERATORS[name].only_stages_per_rank or 1
    schedule = generate(name, 4 * per_rank, 8, stages_per_rank=per_rank)
    assert schedule.name == name
    assert (schedule.num_ranks, schedule.num_microbatches) == (4, 8)


def test_generate_deals_stages_out_round_robin():
    assert generate("interleaved", 6, 4, stages_per_rank=2).rank_of_stage == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "parameters", "message"),
    [
        (("dualpipe", 4, 8), {}, "no schedule is called 'dualpipe'; choose one of gpipe, 1f1b"),
        (("1f1b", 0, 8), {}, "num_stages must be at least 1, got 0"),
        (("1f1b", 4, 0), {}, "num_microbatches must be at least 1, got 0"),
        (("gpipe", 4, 0), {}, "num_microbatches must be at least 1, got 0"),
        (("1f1b", 4, 8), {"in_flight": 0}, "in_flight must be at least 1, got 0"),
        (("zero-bubble", 4, 8), {"memory_limit": 0}, "memory_limit must be at least 1, got 0"),
        (("1f1b", 4, 8), {"memory_limit": 3}, "'1f1b' takes no memory_limit"),
        (("1f1b", 4, 8), {"stages_per_rank": 2}, "'1f1b' takes no stages_per_rank"),
        (("gpipe", 4, 8), {"in_flight": 2}, "'gpipe' takes no in_flight"),
        (("gpipe", 4, 8), {"stages_per_rank": 0}, "stages_per_rank must be at least 1, got 0"),
        (("interleaved", 5, 8), {"stages_per_rank": 2}, "5 stages cannot be dealt out by 2 a rank"),
        (("zb-v", 5, 8), {"stages_per_rank": 2}, "5 stages cannot be dealt out by 2 a rank"),
        (("zb-v", 4, 0), {"stages_per_rank": 2}, "num_microbatches must be at least 1, got 0"),
        (("zb-v", 4, 8), {}, "stages_per_rank must be 2, got 1"),
        (
            ("interleaved", 8, 8),
            {"stages_per_rank": 2, "in_flight": 4},
            "in_flight is 4, but .* needs at least 5",
        ),
    ],
)
def test_generate_refuses_invalid_sizes(arguments, parameters, message):
    with pytest.raises(ScheduleError, match=message):
        generate(*arguments, **parameters)


def test_interleaved_refuses_no_ranks():
    with pytest.raises(ScheduleError, match="num_ranks must be at least 1, got 0"):
        interleaved(0, 2, 4)
