"""Schedules for hypothesis: every generator over sizes and parameters that it accepts."""

from hypothesis import strategies as st

from dpipe.schedule.generate import (
    forward_only,
    generate,
    gpipe,
    interleaved,
    least_in_flight,
    zb_v,
)
from dpipe.schedule.schedule import Schedule

counts = st.integers(1, 6)


@st.composite
def generated(draw: st.DrawFn) -> Schedule:
    ranks, per_rank, microbatches = draw(counts), draw(st.integers(1, 3)), draw(st.integers(1, 13))
    name = draw(
        st.sampled_from(["gpipe", "forward-only", "1f1b", "interleaved", "zero-bubble", "zb-v"])
    )
    if name == "zb-v":
        return zb_v(2 * ranks, microbatches)
    if name in ("gpipe", "forward-only"):
        return (gpipe if name == "gpipe" else forward_only)(
            ranks * per_rank, microbatches, per_rank
        )
    least = least_in_flight(ranks, per_rank, microbatches) if name == "interleaved" else 1
    in_flight = draw(st.none() | st.integers(least, 40))
    if name == "interleaved":
        return interleaved(ranks, per_rank, microbatches, in_flight)
    memory_limit = draw(st.none() | st.integers(1, 15)) if name == "zero-bubble" else None
    return generate(name, ranks, microbatches, in_flight=in_flight, memory_limit=memory_limit)
