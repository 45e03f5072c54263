import pytest

from dpipe.errors import ScheduleError
from dpipe.schedule.action import parse_action
from dpipe.schedule.generate import gpipe, interleaved
from dpipe.schedule.links import compute_needs, counterpart, peer, receives_by_link, sends_by_link
from dpipe.schedule.lower import lower


@pytest.mark.parametrize(
    ("send", "receive"),
    [("0SEND_F3", "1RECV_F3"), ("2SEND_B3", "1RECV_B3"), ("0SEND_TIED", "3RECV_TIED")],
)
def test_counterpart_is_the_other_end_of_a_message(send, receive):
    assert counterpart(parse_action(send), num_stages=4) == parse_action(receive)
    assert counterpart(parse_action(receive), num_stages=4) == parse_action(send)


@pytest.mark.parametrize("text", ["0F0", "0B0", "0I0", "0W0", "0STEP", "0REDUCE_GRAD"])
def test_counterpart_refuses_actions_without_a_link(text):
    with pytest.raises(ScheduleError, match=f"{text} crosses no link"):
        counterpart(parse_action(text), num_stages=4)


def test_peer_is_a_rank_where_a_rank_has_several_stages():
    assert peer(gpipe(4, 1, stages_per_rank=2), parse_action("1SEND_F0")) == 0


def test_a_link_carries_what_both_stages_of_a_rank_send():
    schedule = lower(interleaved(2, 2, 2))
    sends = {link: " ".join(map(str, actions)) for link, actions in sends_by_link(schedule).items()}
    assert sends == {
        (0, 1): "0SEND_F0 0SEND_F1 2SEND_F0 2SEND_F1 2SEND_B0 2SEND_B1",
        (1, 0): "1SEND_F0 1SEND_F1 3SEND_B0 3SEND_B1 1SEND_B0 1SEND_B1",
    }
    assert " ".join(map(str, receives_by_link(schedule)[0, 1])) == (
        "1RECV_F0 1RECV_F1 3RECV_F0 3RECV_F1 1RECV_B0 1RECV_B1"
    )


def test_compute_needs_look_through_the_link():
    schedule = gpipe(3, 2)
    assert " ".join(map(str, compute_needs(schedule, parse_action("1B1")))) == "1F1 2B1"
