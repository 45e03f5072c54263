"""How much of the time of a GPU's sends is hidden behind compute, in the eyes of torch's profiler.

    kernels    [  1F4  ][  1F5  ]      [  1F6  ]
    to the host         [1F4]   [ 1F5  ]
                       hidden    not at all

Sends alone: whether a receive is hidden depends on who waits for whom, not on streams.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

Interval = tuple[float, float]  # start and end, in one unit

_TO_HOST = "Memcpy DtoH"


def hidden_share(step: Callable[[], object]) -> float | None:
    """Of the time of copies from the GPU to the host in `step`, the share during which this
    process's kernels ran; None if nothing was copied.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    copies = []
    kernels = []
    for event in profile.events():
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(_TO_HOST):
            copies.append(span)
        elif _is_kernel(event):
            kernels.append(span)
    return covered(copies, kernels)


def _is_kernel(event: Any) -> bool:
    on_gpu = event.device_type.name == "CUDA"
    return on_gpu and not event.name.startswith(("Memcpy", "Memset"))


def covered(spans: Iterable[Interval], others: Iterable[Interval]) -> float | None:
    """The share of the total length of `spans` that lies within any of `others`; None for 0."""
    together = merged(others)
    total = 0.0
    within = 0.0
    for start, end in spans:
        total += end - start
        within += sum(
            max(0.0, min(end, other_end) - max(start, other_start))
            for other_start, other_end in together
        )
    return within / total if total else None


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """In order of time, those that touch as one."""
    apart: list[Interval] = []
    for start, end in sorted(spans):
        if apart and start <= apart[-1][1]:
            first, last = apart[-1]
            apart[-1] = (first, max(last, end))
        else:
            apart.append((start, end))
    return apart
