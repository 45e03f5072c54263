"""What torch's own memory tracker sees of a rank's program, on fake tensors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from dpipe.schedule.action import Action
from dpipe.schedule.schedule import Schedule
from dpipe.stage.stage import Stage


class Tracker(MemTracker):
    """Without statistics by module, because their hooks keep every block's output alive."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = SilentModules(is_bw=False, parents=frozenset())  # type: ignore[assignment]


class SilentModules(SimpleNamespace):
    def register_user_hooks(self, *hooks: object) -> None: ...
    def clear_user_hooks(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@contextmanager
def _tracked(stages: dict[int, Stage], *optimizers: torch.optim.Optimizer) -> Iterator[Tracker]:
    tracker = Tracker()
    tracker.track_external(
        *(layer for stage in stages.values() for layer in stage._layers.values()), *optimizers
    )
    tracker.track_external(
        *(p for stage in stages.values() if stage._masters for p in stage.parameters())
    )
    with tracker:
        yield tracker


def tracked_peak(
    schedule: Schedule,
    rank: int,
    make_stage: Callable[[int], Stage],
    act: Callable[[Stage, Action], None],
) -> int:
    """Bytes at the worst moment of the rank's program, the optimizer's step included.

    `make_stage(index)` makes a stage of fake tensors, `act` does one action on it.
    """
    with FakeTensorMode():
        stages = {
            s: make_stage(s) for s, owner in enumerate(schedule.rank_of_stage) if owner == rank
        }
        optimizers = [torch.optim.AdamW(stage.parameters()) for stage in stages.values()]
        with _tracked(stages, *optimizers) as tracker:
            # The optimizer makes its state in its first step.
            for stage in stages.values():
                for parameter in stage.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            _step(stages, optimizers)
            for action in schedule.programs[rank]:
                act(stages[action.stage], action)
            _step(stages, optimizers)
            return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def _step(stages: dict[int, Stage], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
    for stage in stages.values():
        stage.zero_grad()
