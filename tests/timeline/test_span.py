from dpipe.schedule.action import parse_action
from dpipe.timeline.span import Lane, Span, Timeline

LATE = Span(0, Lane.COMPUTE, parse_action("0F1"), 7.0, 9.0)
EARLY = Span(0, Lane.COMPUTE, parse_action("0F0"), 2.0, 5.0)
SEND = Span(0, Lane.SEND, parse_action("0SEND_F0"), 5.0, 6.0)
OTHER = Span(1, Lane.COMPUTE, parse_action("1F0"), 6.0, 8.0)


def test_timeline_lasts_from_the_first_start_to_the_last_end():
    assert Timeline(2, (LATE, EARLY, SEND, OTHER)).duration_us == 7.0
    assert Timeline(2, ()).duration_us == 0.0


def test_timeline_gives_a_lane_of_a_rank_by_start():
    assert Timeline(2, (LATE, EARLY, SEND, OTHER)).on(0, Lane.COMPUTE) == (EARLY, LATE)


def test_span_knows_how_long_it_took():
    assert EARLY.duration_us == 3.0
