"""What a checkpoint may leave out."""

from types import SimpleNamespace
from typing import Any

import torch

from dpipe.engine.checkpoint import Loaded, Tensors
from dpipe.engine.replicas import Seat
from dpipe.engine.resume import restore
from dpipe.stage.replay import ReplayStage


def test_parameter_whose_moments_were_never_kept_has_moments_of_zero() -> None:
    """As one replica alone once wrote a checkpoint, where a parameter had no gradient."""
    stage = ReplayStage(
        0,
        num_microbatches=1,
        forward_s=0.0,
        backward_s=0.0,
        input_share=0.5,
        message_bytes=4,
        parameter_bytes=12,
        first=True,
        last=True,
    )
    start = Loaded(3, {}, Tensors("here"), Tensors("here"))
    start.tensors["layers.0.weight"] = torch.ones(3)
    taken: dict[str, torch.Tensor] = {}
    update: Any = SimpleNamespace(restore=lambda numbers, moments: taken.update(moments))
    restore(start, {0: stage}, update, Seat())
    assert {name: moment.tolist() for name, moment in taken.items()} == {
        "layers.0.weight.exp_avg": [0.0, 0.0, 0.0],
        "layers.0.weight.exp_avg_sq": [0.0, 0.0, 0.0],
    }
