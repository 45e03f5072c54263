"""One of our schedules on `torch.distributed.pipelining`: by its own class where it has that very
order, else by CSV.

Torch lowers what it loads in its own way, so only the order of compute is ours: when it receives,
and that it waits for its sends at the end of a step, is torch's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineSchedule, _PipelineScheduleRuntime

from dpipe.schedule.generate import gpipe, one_f_one_b
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.text import to_csv

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_OWN = {gpipe: ScheduleGPipe, one_f_one_b: Schedule1F1B}


def torch_schedule(
    order: Schedule, stages: Sequence[PipelineStage], loss: Loss
) -> _PipelineSchedule:
    """What runs `order` on this rank, whose stages are `stages`, lowest first."""
    text = to_csv(order)
    microbatches = order.num_microbatches
    # Its own classes post messages in another way than its runtime, and are what its users run.
    for make, engine in _OWN.items():
        if text == to_csv(make(order.num_stages, microbatches)):
            return engine(stages[0], microbatches, loss_fn=loss)
    runtime = _PipelineScheduleRuntime(list(stages), microbatches, loss_fn=loss)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(text, encoding="utf-8")
        runtime._load_csv(str(path))  # it has no public name yet
    return runtime
