"""What a rank takes into the next epoch: the state of its layers, whenever that is whole."""

from dataclasses import replace

import torch

from dpipe.config.load import Config
from dpipe.engine.trainer import Job, Trainer
from dpipe.epoch.pieces import num_keeping, pieces_of
from dpipe.keeper.copies import PieceCopy, pack
from dpipe.store.tensor_shards import first_buffers


class EpochState:
    """The state of a rank's layers while they are trained, named as a checkpoint has it: of each
    layer the part that this rank keeps (`pieces.py`).
    """

    def __init__(self, job: Job, trainer: Trainer, config: Config) -> None:
        self._job = job
        self._pieces = pieces_of(config)
        self._part = self._pieces.part_of(job.here)
        self._is_alone = num_keeping(config) == 1
        self._looks_ahead = config.data_parallel.replicas > 1 and config.data_parallel.delay
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
        """Also amid a step. Parameters change in the update alone: before and after it they are
        those of a step; unless replicas look ahead, which changes them as a step begins.
        """
        return not (self._trainer.updating or self._looks_ahead)

    def take(self, step: int) -> list[PieceCopy]:
        """Copies of the state before `step`, which it is in."""
        job = self._job
        numbers, moments = job.update.state(alone=self._is_alone)
        tensors: dict[str, torch.Tensor] = dict(self._buffers)
        # As in a checkpoint: what differs on others is among their moments.
        if self._is_alone or job.here.dp_rank == 0:
            for stage in job.stages.values():
                tensors.update(stage.named_parameters())
        return pack(step, tensors, moments, numbers, self._layers, self._part, self._pieces)
