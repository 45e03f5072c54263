"""Weights & Biases, with the extra `wandb`: RUN/wandb, for `wandb sync` later.

Without WANDB_MODE=online nothing leaves the machine, and nobody is asked to log in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dpipe.trackers.tracker import TracedStep, TrackedRun

_PROJECT = "dpipe"


class WandbTracker:
    """A run of W&B. A resumed run is a new one of the same group."""

    def __init__(self, run: Any) -> None:
        self._run = run
        # Not W&B's own steps, which may not fall: a run that lost a machine makes some again.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def trace(self, steps: Sequence[TracedStep]) -> None:
        """It has no place for spans."""

    def close(self) -> None:
        self._run.finish()


def build(run: TrackedRun) -> WandbTracker:
    import wandb

    folder = run.folder.resolve()
    settings = wandb.Settings(
        console="off",
        silent=True,
    )
    started = wandb.init(
        project=run.environment.get("WANDB_PROJECT", _PROJECT),
        name=folder.name,
        group=folder.name,
        dir=folder,
        config=dict(run.config),
        mode=run.environment.get("WANDB_MODE", "offline"),
        settings=settings,
    )
    return WandbTracker(started)
