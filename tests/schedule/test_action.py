import pytest

from dpipe.errors import ScheduleError
from dpipe.schedule.action import Action, Op, parse_action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Op.F, 0)),
        ("12W345", Action(12, Op.W, 345)),
        (" 1SEND_B3 ", Action(1, Op.SEND_B, 3)),
        ("0STEP", Action(0, Op.STEP)),
        ("3REDUCE_GRAD", Action(3, Op.REDUCE_GRAD)),
        ("1COMPLETE", Action(1, Op.COMPLETE)),
        ("0AGREE", Action(0, Op.AGREE)),
        ("2VOTE", Action(2, Op.VOTE)),
    ],
)
def test_action_has_a_text_form(text, action):
    assert parse_action(text) == action
    assert str(action) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "0STEP1", "0VOTE1", "-1F0", "2F0 2F1", "2f0"]
)
def test_action_refuses_other_text(text):
    with pytest.raises(ScheduleError, match="is not an action; one looks like 2F0"):
        parse_action(text)
