"""What a rank takes into the next epoch: the state of its layers, whenever that is whole."""

from dataclasses import replace

import torch

from dpipe.engine.trainer import Job, Trainer
from dpipe.keeper.copies import LayerCopy, pack
from dpipe.store.tensor_shards import first_buffers


class EpochState:
    """The state of a rank's layers, as a checkpoint would have it, while they are trained."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._job = job
        self._trainer = trainer
        self._layers: set[int] = set()
        for stage in job.stages.values():
            self._layers.update(stage.layer_parameters())
        self._buffers: dict[str, torch.Tensor] = {}
        self.copy_buffers()

    def copy_buffers(self) -> None:
        """Between steps. Forward passes may change buffers: of a step that is not finished they are
        worth nothing.
        """
        self._buffers = first_buffers(self._job.stages, replace(self._job.here, rank=0))

    @property
    def next_step(self) -> int:
        return self._trainer.next_step

    @property
    def is_whole(self) -> bool:
        """Parameters change in the update alone: before and after it they are those of a step."""
        return not self._trainer.updating

    def take(self, step: int) -> list[LayerCopy]:
        """Copies of the state before `step`, which it is in."""
        numbers, moments = self._job.update.state()
        tensors: dict[str, torch.Tensor] = dict(self._buffers)
        for stage in self._job.stages.values():
            tensors.update(stage.named_parameters())
        return pack(step, tensors, moments, numbers, self._layers)
