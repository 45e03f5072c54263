from dpipe.report.timers import PARTS, TIMERS, Timers, timers_ms
from dpipe.schedule.action import parse_action
from dpipe.timeline.span import Lane, Span


def span(lane: Lane, action: str, ms: float) -> Span:
    return Span(0, lane, parse_action(action), 1000.0, 1000.0 + ms * 1e3)


SPANS = (
    span(Lane.WAIT, "1RECV_F0", 3),
    span(Lane.COMPUTE, "0F0", 10),
    span(Lane.COMPUTE, "0F1", 10),
    span(Lane.COMPUTE, "0I0", 12),
    span(Lane.COMPUTE, "0W0", 8),
    span(Lane.WAIT, "0RECV_B0", 4),
    span(Lane.WAIT, "0AGREE", 2),
    span(Lane.WAIT, "0RECV_TIED", 7),
    span(Lane.TENSOR, "0F0", 100),
    span(Lane.TENSOR, "0COMPLETE", 9),
    span(Lane.SEND, "0SEND_F0", 5),
    span(Lane.SEND, "1SEND_B0", 6),
    span(Lane.RECV, "0RECV_B0", 100),
    span(Lane.REDUCE, "0REDUCE_GRAD", 100),
    span(Lane.UPDATE, "0VOTE", 0.25),
    span(Lane.WAIT, "0VOTE", 0.5),
    span(Lane.UPDATE, "0STEP", 0.25),
)


def test_spans_are_summed_by_timer() -> None:
    measured = (name for name in TIMERS if name != "backward-send-forward-recv")
    assert timers_ms(SPANS) == dict(zip(measured, (20, 3, 5, 20, 4, 6, 9, 7, 2, 1), strict=True))


def test_wait_for_an_activation_after_a_backward_pass_has_its_own_timer() -> None:
    lanes = (Lane.WAIT, Lane.COMPUTE, Lane.WAIT, Lane.COMPUTE, Lane.WAIT)
    actions = ("1RECV_F0", "1F0", "1RECV_F1", "1B0", "1RECV_F2")
    spans = [
        Span(1, lane, parse_action(action), 10.0 * start, 10.0 * start + 1000 * 2**start)
        for start, (lane, action) in enumerate(zip(lanes, actions, strict=True))
    ]
    timers = timers_ms(reversed(spans))
    assert (timers["forward-recv"], timers["backward-send-forward-recv"]) == (1 + 4, 16)


def test_line_is_the_mean_of_the_steps_since_the_last() -> None:
    timers = Timers()
    timers.add([span(Lane.COMPUTE, "0F0", 10), span(Lane.UPDATE, "0STEP", 1)], {})
    timers.add([span(Lane.COMPUTE, "0F0", 20)], {})
    assert timers.line() == "time (ms) | forward-compute: 15.0 | optimizer: 0.5"
    timers.add([span(Lane.COMPUTE, "0F0", 7)], {})
    assert timers.line() == "time (ms) | forward-compute: 7.0"


def test_parts_of_the_optimizer_stand_behind_it() -> None:
    timers = Timers()
    timers.add([span(Lane.UPDATE, "0STEP", 3)], {PARTS[3]: 2.0, PARTS[1]: 1.0})
    assert timers.line() == (
        "time (ms) | optimizer: 3.0 | optimizer-unscale-and-check-inf: 1.0 | optimizer-inner-step: "
        "2.0"
    )


def test_line_of_no_step_is_empty() -> None:
    assert Timers().line() == "time (ms)"
