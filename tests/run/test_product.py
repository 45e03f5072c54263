"""Every synchronous kind, schedule and number of replicas, over local links, compared with one
process.

What must be equal is the parameters after two steps of the same batch: to fp32 rounding, since the
sum over replicas groups its terms in another way than the sum over micro-batches.
"""

import threading
from functools import cache

import pytest
import torch
from torch import nn

from dpipe.config.load import Config, build
from dpipe.coordinator.alone import Alone
from dpipe.data.batch import Batch
from dpipe.engine.executor import Executor, Parts
from dpipe.engine.hop_codecs import HopCodecs
from dpipe.engine.recorder import Recorder
from dpipe.ranks import ParallelRanks
from dpipe.run.agreement import data_parallel
from dpipe.schedule.generate import generate
from dpipe.schedule.lower import lower
from dpipe.stage.stage import Stage
from dpipe.transport.local import LocalHub
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

STAGES, WIDTH, BATCH, STEPS = 4, 6, 24, 2
ROUNDING = 2e-6  # absolute, of parameters around 0.5 that two steps of 1e-2 have moved


def layer(index: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, targets


class Rank:
    """One rank, composed as in `run/build.py`, but without a coordinator."""

    def __init__(self, config: Config, rank: int, hub: LocalHub) -> None:
        self.here, self.config = config.ranks_of(rank), config
        pipeline, microbatches = config.pipeline, config.train.num_microbatches
        plan = generate(
            pipeline.schedule,
            STAGES,
            microbatches,
            stages_per_rank=pipeline.stages_per_rank,  # type: ignore[arg-type]
        )
        self.schedule = lower(plan, reduce=True)
        owner = self.schedule.rank_of_stage
        self.stages = {
            s: Stage(
                s,
                {s: layer(s)},
                num_microbatches=microbatches,
                loss=loss if s == STAGES - 1 else None,
            )
            for s in range(STAGES)
            if owner[s] == self.here.pp_rank
        }
        transport = hub.transport(rank)
        self.kind = data_parallel(config, self.here, self.stages, transport, Alone(), None)
        boundary = (TensorSpec((BATCH // self.here.dp_size // microbatches, WIDTH), torch.float32),)
        self.executor = Executor(
            Parts(
                self.here.pp_rank,
                self.stages,
                transport,
                HopCodecs(HopFormats.alike("none", STAGES - 1)),
                [boundary] * (STAGES - 1),
                self.kind,
                Recorder(rank),
                pp_group=self.here.pp_group,
            )
        )

    def train(self) -> None:
        for step in range(STEPS):
            cut = [t.chunk(self.here.dp_size)[self.here.dp_rank] for t in batch(step)]
            inputs, targets = (t.chunk(self.config.train.num_microbatches) for t in cut)
            self.kind.begin(step, 1e-2, 1.0)
            self.executor.run(self.schedule, Batch([(x,) for x in inputs], list(targets)))
            self.kind.report(measure=False)
            for index, stage in self.stages.items():
                self.kind.step(index, 1.0)
                stage.zero_grad()
        for stage in self.stages:
            self.kind.finish(stage)
        self.kind.close()


def trained(kind: str, schedule: str, replicas: int) -> list[dict[str, torch.Tensor]]:
    """All parameters of each replica, by name."""
    per_rank = 2 if schedule in ("interleaved", "zb-v") else 1
    config = build(
        {
            "train": {
                "batch_size": BATCH,
                "num_microbatches": 4 if replicas < 4 else 2,
                "learning_rate": 1e-2,
            },
            "pipeline": {"stages": STAGES, "stages_per_rank": per_rank, "schedule": schedule},
            "data_parallel": {"kind": kind, "replicas": replicas, "chunk_bytes": 4096},
        }
    )
    hub = LocalHub(config.world_size, transfer_timeout_s=20)
    ranks = [Rank(config, rank, hub) for rank in range(config.world_size)]
    threads = [threading.Thread(target=rank.train) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [
        {
            name: parameter.detach()
            for rank in ranks
            if rank.here.dp_rank == replica
            for stage in rank.stages.values()
            for name, parameter in stage.named_parameters()
        }
        for replica in range(replicas)
    ]


@cache
def alone() -> dict[str, torch.Tensor]:
    """Plain torch with the whole batch at once."""
    model = nn.Sequential(*(layer(index) for index in range(STAGES)))
    parameters = list(model.parameters())
    groups = [[p for p in parameters if (p.ndim >= 2) == decays] for decays in (True, False)]
    adamw = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(STEPS):
        inputs, targets = batch(step)
        adamw.zero_grad()
        loss(model(inputs), targets).backward()
        adamw.step()
    names = [
        f"layers.{i}.{name}"
        for i, block in enumerate(model)
        for name, _ in block.named_parameters()
    ]
    return dict(zip(names, (p.detach() for p in parameters), strict=True))


@pytest.mark.some_cases(11)
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"])
@pytest.mark.parametrize("kind", ["all-reduce", "sharded"])
def test_replicas_equal_one_process_and_each_other(kind: str, schedule: str, replicas: int) -> None:
    first, *others = trained(kind, schedule, replicas)
    for name, expected in alone().items():
        torch.testing.assert_close(first[name], expected, rtol=0, atol=ROUNDING)
        assert all(torch.equal(first[name], other[name]) for other in others)


def test_ranks_are_numbered_replica_by_replica() -> None:
    assert [(ParallelRanks(r, 2, 3).dp_rank, ParallelRanks(r, 2, 3).pp_rank) for r in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
