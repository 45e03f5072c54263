"""Where a rank's time goes, in the words of Megatron-LM's timers: from the spans of any step.

    forward-compute   forward-recv   forward-send   backward-compute   backward-recv   backward-send
    backward-send-forward-recv   backward-layernorm-all-reduce   backward-embedding-all-reduce
    backward-params-all-reduce   optimizer   batch-generator

    optimizer: -unscale-and-check-inf | -clip-main-grad         | -inner-step
               norms, what is finite  | what all ranks agree on | scaled by that, the step itself

A `recv` is the time in which a rank has nothing to do but wait; a `send` is bytes moving, mostly
beside compute, so the timers of a step do not add up to it. backward-send-forward-recv is the wait
for an activation behind a backward pass, where Megatron sends and receives in one call; here the
gradient leaves meanwhile. Gradients in half precision are added to the masters' behind each
backward pass, and masters rounded before the first forward: those two parts of the optimizer are in
-compute as well.
"""

from collections.abc import Iterable, Mapping
from typing import assert_never

from dpipe.schedule.action import Op
from dpipe.timeline.span import Lane, Span

TIMERS = (
    *(
        "forward-compute",
        "forward-recv",
        "forward-send",
    ),
    *(
        "backward-compute",
        "backward-recv",
        "backward-send",
        "backward-send-forward-recv",
    ),
    *(
        "backward-layernorm-all-reduce",
        "backward-embedding-all-reduce",
        "backward-params-all-reduce",
    ),
    "optimizer",
)
PARTS = (
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "batch-generator",
)

_WAITS = {
    Op.RECV_F: "forward-recv",
    Op.RECV_B: "backward-recv",
    Op.RECV_TIED: "backward-embedding-all-reduce",
    Op.AGREE: "backward-params-all-reduce",
    Op.VOTE: "optimizer",
}


def timers_ms(
    spans: Iterable[Span],
) -> dict[str, float]:
    """Milliseconds by timer, of those that ran on a rank, in the order of TIMERS."""
    sums: dict[str, float] = {}
    computed = None
    # By time: a wait is called after what the rank computed before it.
    for span in sorted(spans, key=lambda span: span.start_us):
        name = _timer(span.lane, span.action.op)
        if span.lane is Lane.COMPUTE:
            computed = name
        if name == "forward-recv" and computed == "backward-compute":
            name = "backward-send-forward-recv"
        if name is not None:
            sums[name] = sums.get(name, 0.0) + span.duration_us / 1e3
    return {name: sums[name] for name in TIMERS if name in sums}


class Timers:
    """One rank's timers over a logging interval."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []

    def add(
        self,
        spans: Iterable[Span],
        parts: Mapping[str, float],
    ) -> None:
        """A step is over; `parts` are milliseconds by the names of PARTS."""
        self._steps.append({**timers_ms(spans), **parts})

    def line(self) -> str:
        """The mean of the steps since the last line, such as `time (ms) | forward-compute: 12.3 |
        optimizer: 1.0`.
        """
        steps = self._steps
        self._steps = []
        shown = ["time (ms)"]
        for name in (*TIMERS, *PARTS):
            if any(name in step for step in steps):
                # Over all steps, also those in which it did not run, so that the timers add up.
                mean = sum(step.get(name, 0.0) for step in steps) / len(steps)
                shown.append(f"{name}: {mean:.1f}")
        return " | ".join(shown)


def _timer(lane: Lane, op: Op) -> str | None:
    match lane:
        case Lane.COMPUTE:
            return "forward-compute" if op is Op.F else "backward-compute"
        case Lane.WAIT:
            return _WAITS.get(op)
        case Lane.SEND:
            return {
                Op.SEND_F: "forward-send",
                Op.SEND_B: "backward-send",
            }.get(op)
        case Lane.UPDATE:
            return "optimizer"
        case Lane.TENSOR:
            # All others are inside of compute.
            return "backward-layernorm-all-reduce" if op is Op.COMPLETE else None
        case Lane.RECV | Lane.REDUCE | Lane.BETWEEN:
            # Bytes moving beside compute: what of it was waited for is in WAIT. And what is done
            # between two steps has PARTS of its own.
            return None
    assert_never(lane)
