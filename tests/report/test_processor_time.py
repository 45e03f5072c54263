"""Where the processor time of ranks goes, on sums that are known."""

import pytest

from dpipe.report.processor_time import Ends, MessageCpu, StepCpu, cpu_now, message_cpu, python_us
from dpipe.schedule.action import parse_action
from dpipe.timeline.span import Lane, Span


def ends(count: int, megabytes: float, message_us: float, us_per_mb: float) -> Ends:
    return Ends(count, megabytes, count * message_us + megabytes * us_per_mb)


def test_message_s_two_parts_are_told_apart_by_ranks_that_differ() -> None:
    found = message_cpu([ends(18, 2.1, 400, 700), ends(18, 4.2, 400, 700), ends(10, 2.1, 400, 700)])
    assert (found.message_us, found.us_per_mb) == pytest.approx((400, 700))


def test_ranks_that_are_alike_have_one_number() -> None:
    found = message_cpu([ends(10, 2.0, 400, 700)] * 3)
    assert found == MessageCpu(pytest.approx(540), 0.0)


@pytest.mark.parametrize(
    ("first_us", "second_us", "expected"),
    [
        (100, 0, MessageCpu(50.0, 0.0)),  # the bytes would give processor time back
        (0, 100, MessageCpu(0.0, 50.0)),  # every message would
    ],
)
def test_no_part_of_a_message_is_less_than_nothing(
    first_us: float, second_us: float, expected: MessageCpu
) -> None:
    by_count = Ends(2, 1.0, first_us)
    by_bytes = Ends(1, 2.0, second_us)
    found = message_cpu([by_count, by_bytes])
    assert min(found.message_us, found.us_per_mb) == 0
    least = message_cpu([by_count, by_bytes])
    assert least == found
    assert found.message_us == pytest.approx(expected.message_us, abs=15)
    assert found.us_per_mb == pytest.approx(expected.us_per_mb, abs=15)


def test_python_is_what_no_span_of_the_rank_s_own_thread_has() -> None:
    def span(lane: Lane, action: str, cpu_us: float) -> Span:
        return Span(0, lane, parse_action(action), 0, 100, cpu_us=cpu_us)

    spans = [
        span(Lane.COMPUTE, "0F0", 10),
        span(Lane.COMPUTE, "0B0", 20),
        span(Lane.TENSOR, "0B0", 1000),  # of other threads
        span(Lane.WAIT, "0RECV_B0", 3),  # of the rank's own, beside the computation
        span(Lane.WAIT, "0VOTE", 4),
        span(Lane.UPDATE, "0STEP", 5),
    ]
    assert python_us(spans, StepCpu(own_us=59, others_us=9)) == 10


def test_processor_time_is_of_the_thread_that_asks() -> None:
    began = cpu_now()
    while cpu_now().since(began).own_us < 1000:
        pass
    assert cpu_now().since(began).own_us >= 1000
