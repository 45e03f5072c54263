"""What the ranks of a published model hold in a step, by torch's memory tracker, on real tensors.

    PYTHONPATH=tests .venv/bin/python -m support.published_memory > scripts/results/hub_memory.jsonl

A line for each family and way to train it: predicted and measured bytes of the two ranks.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dpipe.config.load import Config, build
from dpipe.dataparallel.optimizer import Optimizer, trained, whole
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import RunPlan, draft, first_inputs
from dpipe.run.agreement import _settings
from dpipe.run.stages import make_stage
from dpipe.schedule.action import Op
from dpipe.stage.stage import Stage, Tensors
from dpipe.wire.spec import TensorSpec
from support.tracked import Tracker

# Wide enough that matrices weigh, as they do in models that people have.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 128,
}
_BF16 = {"parameters": "bf16", "precision": "bf16"}
_LORA = {"kind": "lora", "r": 8}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, recomputed": {"pipeline": {"recompute": "full"}},
    "LoRA, bf16": {"adapter": _LORA, "train": _BF16},
    "LoRA on int8": {"adapter": {**_LORA, "base": "int8"}},
    "LoRA on nf4, bf16": {"adapter": {**_LORA, "base": "nf4"}, "train": _BF16},
}


def configured(model: Path, way: str, data: str = "chat") -> Config:
    table: dict[str, dict[str, Any]] = {
        "model": {"hf": str(model), "context": 64},
        "data": {"format": data},
        "train": {"batch_size": 4, "num_microbatches": 4},
        "pipeline": {"stages": 2},
    }
    for section, values in WAYS[way].items():
        table.setdefault(section, {}).update(values)
    return build(table)


def predicted_and_measured(config: Config) -> list[tuple[int, int]]:
    """Bytes of each rank at its worst moment, in two steps."""
    plan = draft(config, reads_text=False)
    numbers = []
    for rank, memory in enumerate(plan.forecast.memory):
        numbers.append((memory.total, measured(plan, rank)))
    return numbers


def measured(plan: RunPlan, rank: int) -> int:
    stage = make_stage(plan, rank, replica=0, group=None, exchange=lambda: None, timed=nullcontext)
    assert isinstance(stage, Stage)
    settings = _settings(plan.config, plan.last_layer)
    optimizer = Optimizer(whole(trained(stage)), settings, whole=True)
    tracker = Tracker()
    tracker.track_external(*stage._layers.values(), *stage.parameters())
    with tracker:
        for step in range(2):
            stage.begin_step(step)
            run_step(plan, rank, stage)
            stage.complete()
            optimizer.step(1e-3)
            stage.zero_grad()
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak


def run_step(plan: RunPlan, rank: int, stage: Stage) -> None:
    first = first_inputs(plan.config)
    last = plan.forecast.schedule.is_last(rank)
    specs = plan.boundaries[rank - 1] if rank else first
    for action in plan.forecast.schedule.programs[rank]:
        if action.op is Op.F:
            targets = targets_of(first) if last else None
            stage.forward(action.microbatch, made(specs), targets)
        elif action.op is Op.B:
            gradients = () if last else made(plan.boundaries[rank])
            floats = tuple(each for each in gradients if each.is_floating_point())
            stage.backward(action.microbatch, floats)


def made(specs: tuple[TensorSpec, ...]) -> Tensors:
    """Values that a model can read: tokens below its vocabulary, the positions of one sample."""
    tensors = []
    for spec in specs:
        if spec.dtype is torch.int32:
            tensor = torch.arange(spec.shape[1], dtype=torch.int32).repeat(spec.shape[0], 1)
        elif spec.dtype is torch.int64:
            tensor = torch.ones(spec.shape, dtype=torch.int64)
        else:
            tensor = torch.randn(spec.shape, dtype=spec.dtype)
        tensors.append(tensor)
    return tuple(tensors)


def targets_of(first: tuple[TensorSpec, ...]) -> torch.Tensor:
    """A token behind each and, of samples, their number (`hub/model.py`)."""
    size, length = first[0].shape
    has_samples = len(first) > 1
    return torch.full((size, length + has_samples), length)


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    from hub import published, test_hub_encoder

    for family in (*published.FAMILIES, *test_hub_encoder.ENCODERS):
        is_encoder = family in test_hub_encoder.ENCODERS
        save = test_hub_encoder.save if is_encoder else published.save
        model = save(family, folder / family, **SIZES)
        for way in WAYS:
            config = configured(model, way, "text" if is_encoder else "chat")
            try:
                ranks = predicted_and_measured(config)
            except ConfigError:  # it has no linear layers to quantise
                continue
            predicted, torchs = zip(*ranks, strict=True)
            yield {"family": family, "way": way, "predicted": predicted, "measured": torchs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as temporary:
        for row in rows(Path(temporary)):
            sys.stdout.write(f"{json.dumps(row)}\n")
            sys.stdout.flush()
