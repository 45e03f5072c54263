"""The same GPT in two processes of one thread each: dpipe against `torch.distributed.pipelining`
over gloo.

Both engines live in the same two processes and take turns, step by step, on the same data and from
the same start, so that whatever else the machine does falls on both. Their losses must agree before
their times are worth comparing.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import truediv
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs do not export it
from torch.distributed.pipelining import PipelineStage

from dpipe.baselines.torch_schedule import torch_schedule
from dpipe.bench.gloo import connect
from dpipe.bench.gpt_size import GptSize
from dpipe.bench.processes import CONTEXT, run_processes
from dpipe.data.batch import Batch
from dpipe.dataparallel.single import Single
from dpipe.engine.executor import Executor, Parts
from dpipe.engine.hop_codecs import HopCodecs
from dpipe.engine.recorder import Recorder
from dpipe.processes.launch import free_port
from dpipe.report.pace import Pace, agreed_rounds, silent
from dpipe.schedule.generate import generate
from dpipe.schedule.lower import lower
from dpipe.stage.model import materialise
from dpipe.stage.stage import Stage
from dpipe.transport.base import Transport
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

NUM_RANKS = 2
_WARM_UP = 2  # steps of each engine that are not timed: they open links and allocate


@dataclass(frozen=True, kw_only=True)
class Size(GptSize):
    """Of the model and the batch that are compared."""

    num_layers: int = 4
    width: int = 256
    num_heads: int = 4
    context: int = 128
    vocab_size: int = 256
    microbatch_size: int = 4
    num_microbatches: int = 8
    num_steps: int = 42  # of each engine; the first two are not timed

    def layers_of(self, rank: int) -> range:
        num_layers = self.num_layers + 2  # and the embedding and the head
        half = num_layers // 2
        return range(half) if rank == 0 else range(half, num_layers)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_sequences = self.microbatch_size * self.num_microbatches
        shape = (num_sequences, self.context + 1)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].contiguous()
        return inputs, targets


# To compare losses alone, in seconds.
SMALL = Size(
    num_layers=2,
    width=16,
    num_heads=2,
    context=16,
    num_microbatches=4,
    microbatch_size=2,
    num_steps=4,
)

Step = Callable[[torch.Tensor, torch.Tensor], float | None]
Pair = tuple[list[float], list[float]]  # of ours, and of torch's


def compare_pipelining(
    schedule: str,
    size: Size | None = None,
    transport: str = "grpc",
    pace: Pace | None = None,
) -> dict[str, Any]:
    """The median seconds of a step of each engine; the median ratio of two steps in a row, and the
    middle half of those ratios; the largest difference between their losses.

    Raises `AssertionError` where the losses differ by more than rounding: the times would then mean
    nothing.
    """
    size = size or Size()
    pace = pace or silent()
    port = free_port()
    results = CONTEXT.SimpleQueue()
    args = (schedule, size, transport, port, pace, results)
    run_processes(_rank, args, NUM_RANKS)
    ours_s, theirs_s, ours, theirs = results.get()
    difference = 0.0
    for our_loss, their_loss in zip(ours, theirs, strict=True):
        difference = max(difference, abs(our_loss - their_loss))
    assert difference < 1e-3, f"the losses differ by {difference}: {ours} against {theirs}"
    ratios = list(map(truediv, ours_s, theirs_s))
    low, middle, high = quantiles(ratios, n=4, method="inclusive")  # of few, none is beyond them
    return {
        "schedule": schedule,
        "transport": transport,
        "dpipe_s": median(ours_s),
        "torch_s": median(theirs_s),
        "dpipe / torch": middle,
        "middle half": f"{low:.3f} to {high:.3f}",
        "loss difference": difference,
    }


def _rank(
    rank: int,
    schedule: str,
    size: Size,
    kind: str,
    port: int,
    pace: Pace,
    results: Any,
) -> None:
    torch.set_num_threads(1)  # a core a rank, for both engines
    store = TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    transport = connect(rank, f"{kind} x1", store)
    ours = our_step(rank, schedule, size, transport)
    theirs = torch_step(rank, schedule, size)
    turns = _Turns(ours, theirs)
    for index in range(_WARM_UP):
        turns.take(index, *size.batch(index))
    round_s = sum(times[-1] for times in turns.times)
    most = size.num_steps - _WARM_UP
    rounds = agreed_rounds(pace, rank, store, most, round_s)
    for number in range(rounds):
        index = _WARM_UP + number
        turns.take(index, *size.batch(index))
        if rank == 0:
            pace.done(number + 1, rounds)
    transport.close()
    last = rank == NUM_RANKS - 1
    if last:  # it knows the losses
        ours_s, theirs_s = (times[_WARM_UP:] for times in turns.times)
        our_losses, their_losses = turns.losses
        results.put((ours_s, theirs_s, our_losses, their_losses))
    dist.barrier()
    dist.destroy_process_group()


class _Turns:
    """Seconds and losses of the steps of two engines, ours first, that take turns."""

    def __init__(self, ours: Step, theirs: Step) -> None:
        self._steps = (ours, theirs)
        self.times: Pair = ([], [])
        self.losses: Pair = ([], [])

    def take(
        self,
        index: int,
        inputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """One step of each. Who goes first alternates: a step may slow down the next one."""
        for engine in (index % 2, 1 - index % 2):
            dist.barrier()
            began = time.perf_counter()
            loss = self._steps[engine](inputs, targets)
            dist.barrier()  # a step has ended when both ranks have
            took_s = time.perf_counter() - began
            self.times[engine].append(took_s)
            self.losses[engine].append(loss or 0.0)


def _layers(rank: int, size: Size) -> dict[int, nn.Module]:
    model = size.model()
    layers = {}
    for index in size.layers_of(rank):
        layers[index] = materialise(model, index, 0, "cpu")
    return layers


def our_step(
    rank: int,
    schedule: str,
    size: Size,
    transport: Transport,
) -> Step:
    order = generate(schedule, NUM_RANKS, size.num_microbatches)
    plan = lower(order)
    layers = _layers(rank, size)
    last = rank == NUM_RANKS - 1
    stage = Stage(
        rank,
        layers,
        num_microbatches=size.num_microbatches,
        loss=size.model().loss if last else None,
        splits_backward=plan.splits,
    )
    shape = (size.microbatch_size, size.context, size.width)
    boundary = TensorSpec(shape, torch.float32)
    parts = Parts(
        rank,
        {rank: stage},
        transport,
        HopCodecs(HopFormats.alike("none", 1)),
        ((boundary,),),
        Single(),
        Recorder(rank),
    )
    executor = Executor(parts)
    optimizer = torch.optim.AdamW(stage.parameters())
    steps = itertools.count()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        stage.begin_step(next(steps))
        # Cut here, within the time: torch's engine cuts the batch itself.
        x_of = inputs.split(size.microbatch_size)
        y_of = targets.split(size.microbatch_size)
        own = [(x,) for x in x_of]
        batch = Batch(own, list(y_of))
        result = executor.run(plan, batch)
        optimizer.step()
        stage.zero_grad()
        return result.loss

    return step


def torch_step(rank: int, schedule: str, size: Size) -> Step:
    layers = _layers(rank, size)
    module = nn.Sequential(*layers.values())
    cpu = torch.device("cpu")
    stage = PipelineStage(module, rank, NUM_RANKS, cpu)
    order = generate(schedule, NUM_RANKS, size.num_microbatches)
    model = size.model()
    plan = torch_schedule(order, [stage], model.loss)
    optimizer = torch.optim.AdamW(module.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        losses: list[torch.Tensor] = []
        if rank == 0:
            plan.step(inputs)
        else:
            plan.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if not losses:  # not the last stage
            return None
        total = sum(float(loss.detach()) for loss in losses)
        return total / len(losses)

    return step
