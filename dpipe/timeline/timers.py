"""Where a rank's time goes, in the words of Megatron-LM's timers: from the spans of any step.

    forward-compute   forward-recv   forward-send   backward-compute   backward-recv   backward-send
    params-all-reduce   optimizer

A `recv` is the time in which a rank has nothing to do but wait; a `send` is bytes moving, mostly beside compute, so the
timers of a step do not add up to it.
"""

from collections.abc import Iterable
from typing import assert_never

from dpipe.schedule.action import Op
from dpipe.timeline.span import Lane, Span

TIMERS = (
    *("forward-compute", "forward-recv", "forward-send"),
    *("backward-compute", "backward-recv", "backward-send"),
    *("params-all-reduce", "optimizer"),
)


def timers_ms(spans: Iterable[Span]) -> dict[str, float]:
    """Milliseconds by timer, of those that ran, in the order of TIMERS."""
    sums: dict[str, float] = {}
    for span in spans:
        name = _timer(span.lane, span.action.op)
        if name is not None:
            sums[name] = sums.get(name, 0.0) + span.duration_us / 1e3
    return {name: sums[name] for name in TIMERS if name in sums}


class Timers:
    """One rank's timers over a logging interval."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []

    def add(self, spans: Iterable[Span]) -> None:
        """A step is over."""
        self._steps.append(timers_ms(spans))

    def line(self) -> str:
        """`time (ms) | forward-compute: 12.3 | optimizer: 1.0`: the mean of the steps since the last line."""
        steps, self._steps = self._steps, []
        ran = [name for name in TIMERS if any(name in step for step in steps)]
        means = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in ran}
        return " | ".join(["time (ms)", *(f"{name}: {value:.1f}" for name, value in means.items())])


def _timer(lane: Lane, op: Op) -> str | None:
    match lane:
        case Lane.COMPUTE:
            return "forward-compute" if op is Op.F else "backward-compute"
        case Lane.WAIT:
            return {Op.RECV_F: "forward-recv", Op.RECV_B: "backward-recv"}.get(op, "params-all-reduce")
        case Lane.SEND:
            return {Op.SEND_F: "forward-send", Op.SEND_B: "backward-send"}.get(op)
        case Lane.UPDATE:
            return "optimizer"
        # Bytes moving beside compute, of which what was waited for is in WAIT, or inside of it.
        case Lane.RECV | Lane.REDUCE | Lane.TENSOR:
            return None
    assert_never(lane)
