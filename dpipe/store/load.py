"""Copying a checkpoint's values into the tensors of a model."""

import logging
from collections.abc import Iterable

import torch

from dpipe.errors import CheckpointError
from dpipe.store.checkpoint import Loaded

LOG = logging.getLogger("dpipe")


@torch.no_grad()
def fill(named: Iterable[tuple[str, torch.Tensor]], loaded: Loaded) -> None:
    """Copy the checkpoint's values into the tensors. Raises `CheckpointError` if shapes differ."""
    for name, tensor in named:
        saved = loaded.tensors[name]
        if saved.shape != tensor.shape:
            raise CheckpointError(
                f"{name} is {list(saved.shape)} in the checkpoint and {list(tensor.shape)} here; "
                "check [model]"
            )
        tensor.copy_(saved)


def fill_buffers(named: Iterable[tuple[str, torch.Tensor]], loaded: Loaded) -> None:
    """As `fill`, but a buffer that the checkpoint lacks stays as its layer made it, and the log
    says so: the layer makes it later, or the checkpoint is older than the saving of buffers.
    """
    buffers = dict(named)
    absent = sorted(buffers.keys() - loaded.tensors.keys())
    if absent:
        LOG.warning(
            "the checkpoint holds no %s: they are as the layers make them", ", ".join(absent)
        )
    saved = ((name, buffer) for name, buffer in buffers.items() if name in loaded.tensors)
    fill(saved, loaded)


def check_moments(named: Iterable[tuple[str, torch.Tensor]], loaded: Loaded) -> None:
    """Raises `CheckpointError` if the moments of a parameter have another size than it has here,
    with which the first step would fail.
    """
    for name, parameter in named:
        for key in (f"{name}.exp_avg", f"{name}.exp_avg_sq"):
            moment = loaded.optimizer.get(key)
            # Sizes, not shapes: shards of moments are stored flat.
            if moment is not None and moment.numel() != parameter.numel():
                raise CheckpointError(
                    f"{key} has {moment.numel()} values in the checkpoint and "
                    f"{parameter.numel()} here; check [model]"
                )
