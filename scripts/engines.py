"""The engines that a sweep compares, and the layout of a cell's model on its ranks.

dpipe       ours
torch       torch's own pipeline: on a real model (replicas: with FSDP) or on replay stages
fsdp        the same, on a real model alone
megatron    megatron-core, on a real model alone
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, assert_never

import torch
from pydantic import BaseModel, ConfigDict, Field
from trials import run_to_end
from venue import Venue

from dpipe.baselines import fsdp, megatron, torch_replay
from dpipe.config.load import Config, load
from dpipe.errors import ConfigError

Engine = Literal["dpipe", "torch", "fsdp", "megatron"]
# Of losses; above it the engines do not train the same model.
MOST_DIFFERENCE = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
# Relative, of the first loss in fp32; above it parameters or forward pass differ.
OF_ONE_MODEL = 1e-5


def module_of(engine: Engine, config: Config) -> ModuleType | None:
    """The baseline that runs `config`; None for dpipe."""
    match engine:
        case "dpipe":
            return None
        case "torch":
            return fsdp if config.model.family.computes else torch_replay
        case "fsdp":
            return fsdp
        case "megatron":
            return megatron
        case _:
            assert_never(engine)


def check_engine(engine: Engine, config: Config) -> None:
    """Raises `ConfigError` for a configuration that this engine cannot run."""
    if (module := module_of(engine, config)) is not None:
        module.check_config(config)


def command(engine: Engine, config: Config) -> tuple[str, ...]:
    """The arguments of `python -m` for one rank."""
    module = module_of(engine, config)
    return ("dpipe", "train") if module is None else (module.__name__,)


def environ(engine: Engine) -> dict[str, str]:
    """Environment variables of its ranks. Megatron overlaps all-reduces with matrix products only
    with one hardware queue.
    """
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if engine == "megatron" else {}


class Layout(BaseModel):
    """Tensor-parallel, pipeline-parallel and data-parallel sizes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    data: int = Field(default=1, ge=1)

    def overrides(self, batch_size: int, microbatch_size: int) -> tuple[str, ...]:
        """The layout as overrides. Raises `ConfigError` if replicas and micro-batches do not divide
        the batch.
        """
        num_microbatches, remainder = divmod(batch_size, self.data * microbatch_size)
        if remainder or not num_microbatches:
            raise ConfigError(
                f"train.batch_size {batch_size} is not divisible by {self.data} replicas of "
                "micro-batches of "
                f"{microbatch_size}; change the sweep's layouts, micro_batches or train.batch_size"
            )
        return (
            f"tensor_parallel.size={self.tensor}",
            f"pipeline.stages={self.pipeline}",
            f"data_parallel.replicas={self.data}",
            f"train.num_microbatches={num_microbatches}",
        )


def spread(
    layouts: Sequence[Layout], microbatch_sizes: Sequence[int], config: Config
) -> Iterator[tuple[str, ...]]:
    """Overrides for each layout with each micro-batch size; a single empty tuple without
    layouts.
    """
    if not layouts:
        yield ()
    for layout, size in product(layouts, microbatch_sizes or (config.microbatch_size,)):
        yield layout.overrides(config.train.batch_size, size)


def gpus_needed(config: Config) -> int:
    return config.world_size if config.node.device.startswith("cuda") else 0


def device_name(config: Config) -> str:
    """The device of a real run."""
    return (
        torch.cuda.get_device_name() if gpus_needed(config) and torch.cuda.is_available() else "CPU"
    )


def difference_in_training(
    engine: Engine, config_path: Path, overrides: Sequence[str], at: Venue, *, timeout_s: float
) -> float:
    """The largest difference between the engine's losses and ours, both on a small model with the
    cell's layout.

    Also in fp32, because a loss in half precision hardly shows whether the parameters are the same.
    Raises `AssertionError` if the losses differ too much, `RunError` if either run fails.
    """
    config = load(config_path, tuple(overrides))
    for precision in ("fp32", "fp32"), (config.train.precision, config.train.parameters):
        last = dict(text.split("=", 1) for text in (*overrides, *_small(config, *precision)))
        # Sorted and without duplicates, so that all micro-batch sizes of a layout share one result.
        small = tuple(f"{key}={value}" for key, value in sorted(last.items()))
        difference = _difference(engine, config_path, small, at, timeout_s)
    return difference


def trained(
    engine: Engine, config_path: Path, overrides: tuple[str, ...], at: Venue, timeout_s: float
) -> list[dict[str, Any]]:
    """The metrics of a run with this engine. Raises `RunError` if it fails."""
    module = command(engine, load(config_path, overrides))
    return run_to_end(
        config_path, overrides, at, timeout_s=timeout_s, module=module, environ=environ(engine)
    )


@cache
def _difference(
    engine: Engine, config_path: Path, small: tuple[str, ...], at: Venue, timeout_s: float
) -> float:
    config = load(config_path, small)
    engines: tuple[Engine, Engine] = "dpipe", engine
    ours, theirs = (
        [
            row["loss"]
            for row in trained(each_engine, config_path, small, at, timeout_s)
            if "loss" in row
        ]
        for each_engine in engines
    )
    if config.train.precision == "fp32":
        relative = abs(theirs[0] / ours[0] - 1)
        assert relative < OF_ONE_MODEL, (
            f"with the same parameters the first loss of {engine} is {theirs[0]}, ours {ours[0]}"
        )
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    bound = MOST_DIFFERENCE[config.train.precision]
    assert difference < bound, (
        f"the losses of {engine} differ from ours by {difference}: {theirs} against {ours}"
    )
    return difference


def _small(config: Config, precision: str, parameters: str) -> tuple[str, ...]:
    heads, stages = config.tensor_parallel.size * 2, config.pipeline.stages
    sizes = {
        "model.num_layers": 2 * stages,
        "model.width": 16 * heads,
        "model.num_heads": heads,
        "model.context": 32,
        "train.precision": precision,
        "train.parameters": parameters,
        "train.steps": 4,
        "train.num_microbatches": stages,
        "train.batch_size": stages * config.data_parallel.replicas,
    }
    return tuple(f"{key}={json.dumps(value)}" for key, value in sizes.items())
