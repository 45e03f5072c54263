"""Whole runs on GPUs have the losses of CPUs. Without GPUs they run on a stand-in that also looks
for races.
"""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dpipe.config.load import Config
from dpipe.report.metrics import read_rows
from dpipe.run.generate import generate_text

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
Way = dict[str, Any]

HALF: Way = {"train__precision": "bf16", "train__parameters": "bf16"}
SHAPED: Way = {
    "transport__shape": str(Path(__file__).parents[2] / "netem/profiles/0.1ms-10gbps.toml")
}
EXACT, ROUNDED = 1e-3, 0.02  # of a loss

ON_ONE_GPU: dict[str, tuple[Way, float]] = {
    "over tcp": ({"transport__kind": "tcp"}, EXACT),
    "shaped, bf16 between": (
        {"transport__kind": "tcp", "pipeline__wire": "bf16"} | SHAPED,
        ROUNDED,
    ),
    "shaped, int8 between": (
        {"transport__kind": "tcp", "pipeline__wire": "int8"} | SHAPED,
        ROUNDED,
    ),
    "bf16 parameters, recomputed": ({**HALF, "pipeline__recompute": "full"}, ROUNDED),
    "bf16 by autocast, attention recomputed": (
        {"train__precision": "bf16", "pipeline__recompute": "selective"},
        ROUNDED,
    ),
    "fp16 by autocast, int8 between, split backward": (
        {"train__precision": "fp16", "pipeline__wire": "int8", "pipeline__schedule": "zero-bubble"},
        ROUNDED,
    ),
    "interleaved over tcp": (
        {"transport__kind": "tcp", "pipeline__stages": 4, "pipeline__stages_per_rank": 2}
        | {"pipeline__schedule": "interleaved"},
        EXACT,
    ),
    "tied embeddings": ({"model__tie_embeddings": True}, EXACT),
    "split as measured": ({"pipeline__split": "measured"}, EXACT),
    "all-reduce": ({"data_parallel__kind": "all-reduce", "data_parallel__replicas": 2}, EXACT),
    "all-reduce of bf16": (
        {
            **HALF,
            "data_parallel__kind": "all-reduce",
            "data_parallel__replicas": 2,
            "data_parallel__wire": "bf16",
        },
        ROUNDED,
    ),
    "sharded optimizer": ({"data_parallel__kind": "sharded", "data_parallel__replicas": 2}, EXACT),
    "parameter server": (
        {"data_parallel__kind": "parameter-server", "data_parallel__replicas": 2},
        EXACT,
    ),
    "local SGD": (
        {
            "data_parallel__kind": "local-sgd",
            "data_parallel__replicas": 2,
            "data_parallel__inner_steps": 2,
        }
        | {"data_parallel__fragments": 2, "data_parallel__overlap": True},
        EXACT,
    ),
}

NCCL: Way = {"transport__kind": "nccl"}
GROUP: Way = {
    "data_parallel__kind": "all-reduce",
    "data_parallel__replicas": 2,
    "data_parallel__group": "torch",
}
ON_SEVERAL_GPUS: dict[str, tuple[int, Way, float]] = {
    "NCCL between stages": (2, {**NCCL, "pipeline__schedule": "zero-bubble"}, EXACT),
    "NCCL between stages, interleaved": (
        2,
        {
            **NCCL,
            "pipeline__stages": 4,
            "pipeline__stages_per_rank": 2,
            "pipeline__schedule": "interleaved",
        },
        EXACT,
    ),
    "NCCL between replicas": (4, GROUP, EXACT),
    "NCCL between replicas, a step late": (4, {**GROUP, "data_parallel__delay": True}, EXACT),
    "NCCL between stages and between replicas": (4, {**NCCL, **GROUP, **HALF}, ROUNDED),
    "NCCL within a stage": (
        4,
        {"tensor_parallel__size": 2, "tensor_parallel__sequence_parallel": True},
        EXACT,
    ),
    "NCCL between stages and within one": (4, {**NCCL, "tensor_parallel__size": 2}, EXACT),
}


@pytest.fixture
def same(tiny: Make, losses: Losses, tmp_path: Path) -> Callable[[str, Way, float], None]:
    """`same("cuda", way, bound)`: training and held-out losses equal those of CPUs."""

    def compare(device: str, way: Way, bound: float) -> None:
        way = {"pipeline__stages": 2, "train__eval_every": 1, "train__eval_batches": 1} | way
        on_cpus = {"node__device": "cpu", "run__folder": str(tmp_path / "cpu")}
        if way.get("transport__kind") == "nccl":
            on_cpus["transport__kind"] = "tcp"
        expected = losses(tiny(**way | on_cpus))
        got = losses(tiny(**way, node__device=device, run__folder=str(tmp_path / "gpu")))
        assert got == pytest.approx(expected, rel=bound)
        held_out = [
            [r["held_out_loss"] for r in read_rows(tmp_path / f) if "held_out_loss" in r]
            for f in ("gpu", "cpu")
        ]
        assert held_out[0] == pytest.approx(held_out[1], rel=bound)
        assert len(expected) == 3
        assert len(held_out[0]) == 4

    return compare


@pytest.mark.some_cases(7)
@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_ONE_GPU)
def test_one_gpu_is_enough_for_all_stages_and_replicas(
    way: str, same: Callable[[str, Way, float], None]
) -> None:
    same("cuda:0", *ON_ONE_GPU[way])


@pytest.mark.some_cases(3)
@pytest.mark.gpu
@pytest.mark.parametrize("way", ON_SEVERAL_GPUS)
def test_gpus_communicate_by_nccl(way: str, same: Callable[[str, Way, float], None]) -> None:
    num_gpus, settings, bound = ON_SEVERAL_GPUS[way]
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    same("cuda", settings, bound)


COUNTING = """
import torch
from torch import nn

seen = []

class Counts(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        seen.append(self.calls.clone())
        return super().forward(x)

def layers():
    layers = [nn.Embedding(256, 8), Counts(), nn.Linear(8, 256)]
    return layers, lambda logits, targets: logits.square().mean()
"""


@pytest.mark.gpu
def test_step_that_is_rehearsed_for_nccl_leaves_nothing_behind(
    tiny: Make, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers, gradients, random numbers: the first step is as if there had been none before it."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    (tmp_path / "counting_layers.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    losses(
        tiny(
            model__layers="counting_layers:layers", **NCCL, node__device="cuda", pipeline__stages=2
        )
    )
    calls = [
        int(count) for count in importlib.import_module("counting_layers").seen if count.is_cuda
    ]
    assert calls == [*range(1, 5), *range(1, 13)]  # four micro-batches, rehearsed; then three steps


@pytest.mark.gpu
def test_rows_say_how_much_memory_of_each_gpu_was_taken(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    losses(tiny(node__device="cuda:0", pipeline__stages=2, run__folder=str(tmp_path / "gpu")))
    rows = [row for row in read_rows(tmp_path / "gpu") if "loss" in row]
    assert rows
    assert all(min(row["gpu_memory_mb"].values()) > 0 for row in rows)


@pytest.mark.gpu
def test_run_resumes_from_a_gpu_on_a_cpu_and_back(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    """Checkpoints do not depend on devices."""
    steady: Way = {"train__decay": "none"}
    whole = losses(tiny(train__steps=5, **steady, run__folder=str(tmp_path / "whole")))
    for steps, device in ((2, "cuda:0"), (3, "cpu"), (5, "cuda:0")):
        got = losses(tiny(train__steps=steps, **steady, node__device=device), resume=steps > 2)
        assert got == pytest.approx(whole[:steps], rel=EXACT)


@pytest.mark.gpu
def test_text_is_written_on_the_gpu_as_on_a_cpu(
    tiny: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(node__device="cuda:0", train__steps=1)
    losses(config)
    write = partial(
        generate_text, Path(config.run.folder), "The quick", tokens=8, temperature=0, seed=0
    )
    on_gpu = write()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert write() == on_gpu
