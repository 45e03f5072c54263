"""`torch.distributed.pipelining` over gloo on a replay configuration: another engine with our waits
and our messages.

    python -m dpipe.baselines.torch_replay CONFIG -o KEY=VALUE ...   one rank, as `dpipe train`

It leaves the rows of a run behind (`metrics.jsonl`), so whatever reads ours reads it too. That both
engines learn the same on a real model is for `torch_pipelining` to say.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from dpipe.baselines.foreign import Step, command, refuse
from dpipe.baselines.torch_schedule import torch_schedule
from dpipe.config.load import Config
from dpipe.plan.costs import per_stage
from dpipe.plan.forecast import forecast
from dpipe.stage.replay import wait


class _Wait(torch.autograd.Function):
    """Takes `forward_s` there and `input_s` back. The weight is what makes autograd come back at
    all.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: "ReplayModule"
    ) -> torch.Tensor:
        ctx.stage = stage
        wait(stage.forward_s)
        return stage.output.detach()  # a view of its own: autograd marks what is returned here

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        wait(ctx.stage.input_s)
        grad = None
        if ctx.needs_input_grad[0]:
            grad = ctx.stage.input.detach()
        of_weight = torch.zeros(())
        return grad, of_weight, None


class ReplayModule(nn.Module):
    """`stage.ReplayStage` as a module. Every message is the same tensor: nobody writes to it."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        replay = config.replay
        stages = config.pipeline.stages
        message = torch.zeros(1, replay.message_bytes // 4)
        # Stands where no message is: before the first stage and behind the last one.
        nothing = torch.zeros(1, 1)
        forward_ms = per_stage(replay.forward_ms, stages)
        backward_ms = per_stage(replay.backward_ms, stages)
        self.forward_s = forward_ms[index] / 1e3
        backward_s = backward_ms[index] / 1e3
        self.input_s = backward_s * replay.input_share
        self._weight_s = backward_s * (1 - replay.input_share)
        last = stages - 1
        self.input = nothing if index == 0 else message
        self.output = nothing if index == last else message
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(x, self.weight, self)  # type: ignore[no-any-return, no-untyped-call]

    def weight_gradient(self) -> Callable[[], None]:
        """What torch calls for the rest of a backward pass: at once for a B, later for a W."""
        return lambda: wait(self._weight_s)


def check_config(config: Config) -> None:
    """Raises `ConfigError` for what this engine is not run on here."""
    pipeline = config.pipeline
    reasons = {
        'model.layers must be "replay"': config.model.family.computes,
        'pipeline.wire must be "none"': pipeline.may_round,
        "pipeline.sequence_slices must be 1": pipeline.sequence_slices > 1,
        "pipeline.ranks must be above 1": pipeline.ranks < 2,
        "data_parallel.replicas must be 1": config.data_parallel.replicas > 1,
        "transport.shape must be left out, its network is gloo's (shape the hosts instead: netem, "
        "or a lab)": config.transport.shape is not None,
    }
    refuse("torch.distributed.pipelining", reasons)


def make_step(config: Config, rank: int) -> Step:
    """One step on torch's engine; the loss of a replay is 0."""
    microbatches = config.train.num_microbatches
    last = config.pipeline.stages - 1
    order = forecast(config).schedule
    modules = {}
    stages = []
    for index in order.stages_of(rank):
        module = ReplayModule(config, index)
        modules[index] = module
        stage = _stage(module, index, order.num_stages)
        stages.append(stage)
    plan = torch_schedule(order, stages, lambda output, target: output.sum())
    inputs: tuple[torch.Tensor, ...] = ()
    if 0 in modules:
        inputs = (torch.zeros(microbatches, 1),)
    target = None
    if last in modules:
        target = torch.zeros(microbatches)

    def step(number: int) -> float:
        plan.step(*inputs, target=target)
        for module in modules.values():
            module.zero_grad()
        return 0.0

    return step


def _stage(module: ReplayModule, index: int, num_stages: int) -> PipelineStage:
    # As tensors that require grad: else torch takes the boundary for one that no gradient crosses.
    inputs = torch.empty_like(module.input, requires_grad=True)
    outputs = torch.empty_like(module.output, requires_grad=True)
    device = torch.device("cpu")
    weight_gradient = module.weight_gradient
    return PipelineStage(
        module,
        index,
        num_stages,
        device,
        input_args=inputs,
        output_args=outputs,
        dw_builder=weight_gradient,
    )


main = command(__doc__, check_config, make_step)

if __name__ == "__main__":
    main()
