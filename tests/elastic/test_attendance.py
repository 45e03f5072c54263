"""What an agent decides by its clock alone."""

from unittest.mock import MagicMock

from dpipe.elastic.agents import Enlistment
from dpipe.elastic.attendance import Attendance


def away(wait_s: float = 60.0) -> tuple[Attendance, MagicMock]:
    """An agent whose coordinator went away at second 10."""
    surroundings = MagicMock()
    surroundings.held.return_value = {}
    enlistment = Enlistment(agent="a", name="a", host="a", keeper="a:1")
    attendance = Attendance(surroundings, enlistment, silence_s=40.0, wait_s=wait_s, now=0.0)
    attendance.connected(0.0)
    attendance.enlisted(epoch=0, newest_valid=0, newest_step=0)
    for second in range(11):
        attendance.tick(float(second))
    attendance.disconnected(10.0)
    return attendance, surroundings


def test_coordinator_that_stays_away_is_given_up() -> None:
    attendance, surroundings = away()
    for second in range(11, 71):
        attendance.tick(float(second))
    surroundings.exit.assert_not_called()
    attendance.tick(71.0)
    surroundings.exit.assert_called_once_with("the coordinator has not come back for 60 s")


def test_time_in_which_the_agent_itself_was_stopped_does_not_count() -> None:
    attendance, surroundings = away()
    for second in range(100, 155):
        attendance.tick(float(second))
    surroundings.exit.assert_not_called()


def test_age_of_the_last_answer_is_that_of_what_was_answered() -> None:
    attendance, _ = away()
    assert attendance.unanswered_s(10.0) == 10.0
    attendance.answered(sent_at=8.0)
    attendance.answered(sent_at=6.0)
    assert attendance.unanswered_s(10.0) == 2.0
