"""Predicted memory beside the allocations of a GPU, counted on the stand-in: a real allocator
rounds more.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpipe.config.load import Config
from dpipe.plan.run_plan import draft
from dpipe.report.metrics import read_rows

Make = Callable[..., Config]
HALF = {"train__precision": "bf16", "train__parameters": "bf16"}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {"train__precision": "bf16"},
    "masters": HALF,
    "masters, made again": {**HALF, "pipeline__recompute": "full"},
    "masters, split backward": {**HALF, "pipeline__schedule": "zero-bubble"},
    "masters over NCCL": {**HALF, "transport__kind": "nccl"},
    "replicas over NCCL": {
        "data_parallel__kind": "all-reduce",
        "data_parallel__replicas": 2,
        "data_parallel__group": "torch",
    },
}


@pytest.mark.some_cases(3)
@pytest.mark.stand_in
@pytest.mark.parametrize("way", WAYS)
def test_gpus_use_the_predicted_memory(
    way: str, tiny: Make, losses: Callable[..., Any], tmp_path: Path
) -> None:
    """NCCL's receives are posted early, and have memory from then on: 2 % here."""
    sizes = {
        "model__width": 128,
        "model__context": 128,
        "train__batch_size": 16,
        "pipeline__stages": 2,
    }
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 600)
    config = tiny(**sizes, **WAYS[way], node__device="cuda", train__steps=2)
    predicted = [
        rank.total for rank in draft(config).forecast.memory
    ] * config.data_parallel.replicas
    gc.collect()  # left over from other tests
    before = [torch.cuda.memory_allocated(rank) for rank in range(config.world_size)]
    for rank in range(config.world_size):
        torch.cuda.reset_peak_memory_stats(rank)
    losses(config)
    held = read_rows(tmp_path / "run")[-1]["gpu_memory_mb"]
    assert [held[str(rank)] * 1e6 - before[rank] for rank in range(config.world_size)] == [
        pytest.approx(total, rel=0.025) for total in predicted
    ]
