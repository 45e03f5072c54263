from dataclasses import replace

import pytest

from dpipe.schedule.action import parse_action
from dpipe.schedule.generate import forward_only, gpipe, interleaved, zero_bubble
from dpipe.schedule.lower import lower


def needs(schedule, text: str) -> str:
    return " ".join(map(str, schedule.requires(parse_action(text))))


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0F1", ""),
        ("1F1", "1RECV_F1"),
        ("1RECV_F1", "0SEND_F1"),
        ("0SEND_F1", "0F1"),
        ("2B1", "2F1"),
        ("1B1", "1F1 1RECV_B1"),
        ("1RECV_B1", "2SEND_B1"),
        ("2SEND_B1", "2B1"),
        ("0COMPLETE", "0B0 0B1"),
        ("0VOTE", "0COMPLETE"),
        ("0STEP", "0VOTE"),
    ],
)
def test_requires_names_what_comes_before_over_a_link(action, expected):
    assert needs(lower(gpipe(3, 2)), action) == expected


def test_requires_names_the_compute_action_where_no_link_lies_between():
    schedule = interleaved(1, 2, 2)
    assert needs(schedule, "1F1") == "0F1"
    assert needs(schedule, "0B1") == "0F1 1B1"


def test_requires_of_a_split_backward_names_the_input_gradient():
    schedule = zero_bubble(2, 2)
    assert needs(schedule, "0I1") == "0F1 0RECV_B1"
    assert needs(schedule, "1SEND_B1") == "1I1"
    assert needs(schedule, "0W1") == "0I1"
    assert needs(schedule, "0STEP") == "0W0 0W1"


def test_requires_of_a_tied_stage_waits_for_the_other_half():
    schedule = lower(gpipe(3, 1), tied=True, reduce=True)
    assert needs(schedule, "0SEND_TIED") == "0B0"
    assert needs(schedule, "0RECV_TIED") == "2SEND_TIED"
    assert needs(schedule, "0COMPLETE") == "0B0 0RECV_TIED"
    assert needs(schedule, "0REDUCE_GRAD") == "0COMPLETE"
    assert needs(schedule, "1COMPLETE") == "1B0"
    assert needs(lower(gpipe(3, 1), tied=True), "2COMPLETE") == "2B0 2RECV_TIED"


def test_requires_of_a_rank_names_all_its_stages():
    schedule = lower(gpipe(4, 1, stages_per_rank=2), reduce=True)
    assert needs(schedule, "1AGREE") == "1REDUCE_GRAD 3REDUCE_GRAD"
    assert needs(schedule, "1VOTE") == "1AGREE"
    assert needs(schedule, "3STEP") == "1VOTE"
    assert needs(lower(gpipe(4, 1, stages_per_rank=2)), "1VOTE") == "1COMPLETE 3COMPLETE"


def test_requires_of_a_weight_tied_within_a_rank_adds_its_gradients_before_either_is_reduced():
    schedule = lower(gpipe(2, 1, stages_per_rank=2), tied=True, reduce=True)
    assert needs(schedule, "0COMPLETE") == "0B0"
    assert needs(schedule, "1COMPLETE") == "1B0 0COMPLETE"
    assert needs(schedule, "0REDUCE_GRAD") == needs(schedule, "1REDUCE_GRAD") == "1COMPLETE"


def test_requires_of_a_step_in_a_schedule_of_before_there_was_a_vote():
    """As in the traces of older runs."""
    lowered = lower(gpipe(1, 2), reduce=True)
    program = tuple(map(parse_action, ["0F0", "0F1", "0B0", "0B1", "0REDUCE_GRAD", "0STEP"]))
    schedule = replace(lowered, programs=(program,))
    assert needs(schedule, "0STEP") == "0REDUCE_GRAD"
    assert needs(schedule, "0REDUCE_GRAD") == "0B0 0B1"


def test_tied_stages_on_one_rank_exchange_nothing():
    schedule = lower(gpipe(2, 1, stages_per_rank=2), tied=True)
    assert schedule.tied
    assert schedule.tied_partner(0) is None


def test_index_says_where_an_action_stands():
    schedule = forward_only(2, 3)
    assert schedule.index[parse_action("1F2")] == (1, 2)


def test_splits_says_whether_any_backward_pass_is_split():
    assert [lower(schedule).splits for schedule in (gpipe(2, 2), zero_bubble(2, 2))] == [
        False,
        True,
    ]
