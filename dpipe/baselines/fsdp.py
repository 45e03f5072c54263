"""The configured GPT on torch alone: `torch.distributed.pipelining`, and FSDP2 where there are
replicas.

    python -m dpipe.baselines.fsdp CONFIG -o KEY=VALUE ...      one rank, placed as `dpipe train` is

                stage 0    stage 1
    replica 0   rank 0     rank 1        along a row: torch's pipeline
    replica 1   rank 2     rank 3        down: FSDP (Zhao et al. 2023), each layer a unit

It starts from our parameters, reads our batches and ends each step as we do (decay, clipping,
learning rate), so that its losses are ours but for rounding.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dpipe.baselines.foreign import Step, command, refuse
from dpipe.baselines.torch_schedule import torch_schedule
from dpipe.config.load import Config
from dpipe.config.run import TrainConfig
from dpipe.data.batch import Batch
from dpipe.data.feed import feed_of
from dpipe.dataparallel.kinds import names_where
from dpipe.engine.update import learning_rate
from dpipe.passes.recompute import recompute_attention
from dpipe.plan.run_plan import RunPlan, draft
from dpipe.ranks import ParallelRanks
from dpipe.schedule.schedule import Schedule
from dpipe.stage.model import materialise
from dpipe.streams import upload
from dpipe.wire.format import FORMATS


def check_config(config: Config) -> None:
    """Raises `ConfigError` for what this engine is not run on here."""
    agreement = config.data_parallel
    reasons = {
        'model.layers must be "gpt"': config.model.layers != "gpt",
        "model.dropout must be 0, its random numbers are others": config.model.dropout > 0,
        "model.tie_embeddings must be false": config.model.tie_embeddings,
        'train.precision must be "fp32" or "bf16", and train.parameters "fp32"': (
            config.train.precision == "fp16" or config.train.parameters != "fp32"
        ),
        "train.compile must be false": config.train.compile,
        'train.optimizer must be "adamw"': config.train.optimizer != "adamw",
        "pipeline.ranks must be above 1": config.pipeline.ranks < 2,
        'pipeline.wire must be "none"': config.pipeline.may_round,
        "pipeline.sequence_slices must be 1": config.pipeline.sequence_slices > 1,
        'pipeline.split must not be "measured"': config.pipeline.split == "measured",
        "tensor_parallel.size must be 1": config.tensor_parallel.size > 1,
        f"data_parallel.kind must be {names_where(lambda kind: kind.synchronous)}, without delay "
        'and with data_parallel.wire "none"': (
            agreement.replicas > 1
            and (
                not agreement.active_kind.synchronous
                or agreement.delay
                or FORMATS[agreement.wire].lossy
            )
        ),
        "transport.shape must be left out, its network is torch's": config.transport.shape
        is not None,
    }
    refuse("torch's pipeline with FSDP", reasons)


def make_step(config: Config, rank: int) -> Step:
    """One rank's part of a step; every rank knows its loss."""
    run_plan = draft(config)
    here = config.ranks_of(rank)
    device = torch.device(config.node.device)
    assert run_plan.model is not None and run_plan.corpus is not None
    mesh = _mesh(here, device)
    order = run_plan.forecast.schedule
    replicas = mesh["dp"]
    own = order.stages_of(here.pp_rank)
    modules = {stage: _module(run_plan, stage, replicas) for stage in own}
    stages = _stages(modules, order, device, mesh)
    plan = torch_schedule(order, stages, run_plan.model.loss)
    whole = nn.ModuleList(modules.values())
    parameters = list(whole.parameters())
    update = _ShardedUpdate(config.train, parameters)
    feed = feed_of(config, run_plan.corpus, here.dp_rank, here.dp_size)
    first = 0 in own
    last_stage = order.num_stages - 1
    last = last_stage in own

    def step(number: int) -> float:
        losses = list[torch.Tensor]()
        batch = feed.training(number)
        inputs = []
        if first:
            inputs.append(_whole_inputs(batch, device))
        # torch takes targets on the last stage alone.
        if last:
            targets = _whole_targets(batch, device)
            plan.step(*inputs, target=targets, losses=losses)
        else:
            plan.step(*inputs)
        update.step(number)
        return mean_loss(losses, here.dp_size, device)

    return step


def _mesh(here: ParallelRanks, device: torch.device) -> DeviceMesh:
    """In our order: the ranks of a replica are neighbours."""
    shape = (here.dp_size, here.pp_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp", "pp"))


def _stages(
    modules: Mapping[int, nn.Sequential],
    order: Schedule,
    device: torch.device,
    mesh: DeviceMesh,
) -> list[PipelineStage]:
    pipeline = mesh["pp"]
    group = pipeline.get_group()
    stages = []
    for stage, module in modules.items():
        each = PipelineStage(module, stage, order.num_stages, device, group=group)
        stages.append(each)
    return stages


def _whole_inputs(batch: Batch, device: torch.device) -> torch.Tensor:
    """On the first stage's rank, micro-batches put together."""
    tokens = [x for (x,) in batch.inputs]
    inputs = torch.cat(tokens)
    return upload(inputs, device)


def _whole_targets(batch: Batch, device: torch.device) -> torch.Tensor:
    """On the last stage's rank, micro-batches put together."""
    targets = torch.cat(list(batch.targets))
    return upload(targets, device)


class Layer(nn.Module):
    """One layer as our own stages run it: under autocast where half precision is asked for, fp32 at
    its boundary.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        half: bool,
        recompute: str,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._half = half
        self._again = recompute == "full"
        if recompute == "selective":
            recompute_attention(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run: Callable[[torch.Tensor], torch.Tensor] = self.layer
        if self._again:
            run = partial(checkpoint, self.layer, use_reentrant=False)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._half):
            y: torch.Tensor = run(x)
        return y.float()


def _module(run_plan: RunPlan, stage: int, replicas: DeviceMesh) -> nn.Sequential:
    config = run_plan.config
    model = run_plan.model
    assert model is not None
    half = config.train.precision == "bf16"
    recompute = config.pipeline.recompute
    seed = config.train.seed
    module = nn.Sequential()
    for index in run_plan.layers_of(stage):
        layer = materialise(model, index, seed, config.node.device)
        wrapped = Layer(layer, half=half, recompute=recompute)
        module.append(wrapped)
    if replicas.size() > 1:
        # Gathered once a step and kept for it: else each micro-batch would gather all parameters
        # again, twice.
        for unit in (*module, module):
            fully_shard(unit, mesh=replicas, reshard_after_forward=False)
    return module


class _ShardedUpdate:
    """AdamW and clipping as `engine/update.py` has them, on the slices of parameters that are
    here.
    """

    def __init__(self, train: TrainConfig, parameters: list[nn.Parameter]) -> None:
        self._train = train
        self._parameters = parameters
        # Of a sharded parameter, `ndim` is the whole one's.
        matrices = [p for p in parameters if p.ndim >= 2]
        others = [p for p in parameters if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = parameters[0].is_cuda or None  # as `dataparallel/optimizer.py` has it
        self._adamw = torch.optim.AdamW(
            groups, lr=train.learning_rate, betas=train.betas, fused=fused
        )

    def step(self, number: int) -> None:
        if self._train.clip_norm > 0:
            self._clip()
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._train, number)
        self._adamw.step()
        self._adamw.zero_grad()

    @torch.no_grad()
    def _clip(self) -> None:
        """By the norm over all stages. Every element of a gradient is on one rank alone, so squares
        just add up.
        """
        grads = []
        squares = []
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            grad = _here(parameter.grad)
            grads.append(grad)
            square = grad.float().square()
            squares.append(square.sum())
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        norm = math.sqrt(float(total))
        shrunk = self._train.clip_norm / (norm + 1e-6)  # 1e-6: as torch's own clipping
        scale = min(1.0, shrunk)
        for grad in grads:
            grad.mul_(scale)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def mean_loss(
    losses: Iterable[torch.Tensor],
    num_replicas: int,
    device: torch.device,
) -> float:
    """The mean over micro-batches and replicas, known to all ranks; those off the last stage give
    none.
    """
    known = [loss.detach() for loss in losses]
    total = torch.zeros((), device=device)
    if known:
        total = torch.stack(known).mean() / num_replicas
    dist.all_reduce(total)
    return float(total)


main = command(__doc__, check_config, make_step)

if __name__ == "__main__":
    main()
