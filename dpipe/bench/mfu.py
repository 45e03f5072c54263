"""How much of a device a GPT's training uses: dpipe's engine, in one process or several, against a
plain loop.

    plain     for each micro-batch: forward, loss, backward; then fused AdamW  as anyone writes it
    dpipe     the same model, data and optimizer through schedule, executor and stages

Both in one process, a step of each in turns, so that a device that grows warm and slow does so for
both; the losses must agree before the times are worth comparing. Several stages are processes that
share the one device, with TCP between them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs do not export it
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

from dpipe.bench.gpt_size import GptSize
from dpipe.bench.hidden import hidden_share
from dpipe.config.load import build
from dpipe.data.batch import Batch
from dpipe.dataparallel.optimizer import whole
from dpipe.dataparallel.single import Single
from dpipe.engine.executor import Executor, Parts
from dpipe.engine.hop_codecs import HopCodecs
from dpipe.engine.recorder import Recorder
from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.passes.seeding import seeded
from dpipe.plan.forecast import forecast
from dpipe.plan.partition import split
from dpipe.report.efficiency import gpt_train_flops, mfu, peak_of
from dpipe.report.pace import Pace, silent
from dpipe.report.timers import timers_ms
from dpipe.schedule.action import Action, Op
from dpipe.schedule.generate import generate
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.stage.master_weights import MasterWeights
from dpipe.stage.stage import Stage
from dpipe.streams import Streams, streams_of, upload
from dpipe.timeline.span import Lane
from dpipe.transport.local import LocalHub
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADAM = OptimizerSettings(1e-4, 0.1, (0.9, 0.95))
_WAIT_S = 300.0  # for the other stages, which draw their layers first
_WARM_UP = 2  # steps that are not timed: they take memory, and load kernels


@dataclass(frozen=True, kw_only=True)
class Case(GptSize):
    """A model, a batch, and how it is run. GPT-3 XL and GPT-2 345M have 24 layers; the vocabulary
    is padded to 128s.
    """

    name: str
    vocab_size: int = 50_304
    microbatch_size: int = 4
    num_microbatches: int = 8
    stages: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    precision: str = "bf16"
    parameters: str = "bf16"
    compiled: bool = False
    device: str = "cuda"
    num_steps: int = 8

    def layers(self, indices: Sequence[int]) -> dict[int, nn.Module]:
        return {index: self._layer(index) for index in indices}

    def _layer(self, index: int) -> nn.Module:
        """Drawn on the device, unlike a run's, which is the same on any: a CPU takes half a minute
        for 1.3B numbers.
        """
        with seeded("layer", index, device=self.device), torch.device(self.device):
            return self.model().layers[index]()

    def layers_of(self, stage: int) -> range:
        """Blocks shared out evenly; the head counts as one block."""
        blocks_and_head = [1.0] * (self.num_layers + 1)
        counts = split([0.0, *blocks_and_head], self.stages)
        start = sum(counts[:stage])
        end = start + counts[stage]
        return range(start, end)

    @property
    def predicted_bytes(self) -> int:
        """The device memory of all ranks, as predicted for a run of this model."""
        table = {
            "model": {
                "num_layers": self.num_layers,
                "width": self.width,
                "num_heads": self.num_heads,
                "context": self.context,
                "vocab_size": self.vocab_size,
            },
            "train": {
                "batch_size": self.microbatch_size * self.num_microbatches,
                "num_microbatches": self.num_microbatches,
                "precision": self.precision,
                "parameters": self.parameters,
            },
            "pipeline": {
                "stages": self.stages,
                "split": [len(self.layers_of(stage)) for stage in range(self.stages)],
                "schedule": self.schedule,
                "recompute": self.recompute,
            },
            "node": {"device": self.device},
        }
        predicted = forecast(build(table))
        return sum(rank.total for rank in predicted.memory)

    def order(self) -> Schedule:
        return lower(generate(self.schedule, self.stages, self.num_microbatches))

    def batch(self) -> Batch:
        """The same at each step, so that there is something to learn and a loop that learns nothing
        is seen.
        """
        shape = (self.num_microbatches, self.microbatch_size, self.context + 1)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        inputs = []
        targets = []
        for each in tokens:
            shown = each[:, :-1].contiguous()
            following = each[:, 1:].contiguous()
            inputs.append((shown,))
            targets.append(following)
        return Batch(inputs, targets)

    @property
    def step_flops(self) -> float:
        return gpt_train_flops(
            num_sequences=self.microbatch_size * self.num_microbatches,
            context=self.context,
            width=self.width,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step, the loss of each, the most memory that each process took of the
    device, all together, and the share of the time of sends that compute hid.
    """

    step_s: float
    losses: tuple[float, ...]
    peak_bytes: int | None
    timers: dict[str, float]
    hidden: float | None = None


@dataclass
class _Loop:
    """Something that trains: `step(index)` gives the loss, `timers()` the last step's."""

    step: Callable[[int], float]
    timers: Callable[[], dict[str, float]] = dict
    peak_bytes: int | None = None
    hidden: float | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    warm_step_s: float = 0.0  # of the last step of the warm-up

    def run(self, index: int, device: torch.device) -> float:
        """One step; returns its seconds, from an idle device to an idle device."""
        began = time.perf_counter()
        loss = self.step(index)
        self.losses.append(loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def measured(self) -> Measured:
        return Measured(
            step_s=median(self.seconds),
            losses=tuple(self.losses),
            peak_bytes=self.peak_bytes,
            timers=dict(self.timers()),
            hidden=self.hidden,
        )


def compare_mfu(case: Case, pace: Pace | None = None) -> list[dict[str, Any]]:
    """A row for the plain loop and one for dpipe, in one stage.

    Raises `AssertionError` where the losses differ by more than rounding explains: then the times
    mean nothing.
    """
    plain, ours = measure_both(case, pace)
    check_parity(case, plain, ours)
    return [
        row(case, "plain", plain, plain),
        row(case, "dpipe", ours, plain),
    ]


def measure_both(case: Case, pace: Pace | None = None) -> tuple[Measured, Measured]:
    """The plain loop and dpipe's engine, in this process."""
    loops = [_plain_loop, _one_stage]
    plain, ours = _measure(case, loops, pace or silent())
    return plain, ours


def check_parity(case: Case, plain: Measured, ours: Measured) -> None:
    """Raises `AssertionError` where the two have not trained alike."""
    # In half precision the two engines' losses drift apart by rounding as the steps go on.
    bound = 1e-4 if case.precision == "fp32" else 0.05
    difference = 0.0
    for theirs, own in zip(plain.losses, ours.losses, strict=True):
        difference = max(difference, abs(theirs - own))
    assert difference < bound, (
        f"the losses differ by {difference}: {plain.losses} against {ours.losses}"
    )
    # Not the last against the first: without a warm-up, Adam's early steps may overshoot.
    first, *later = plain.losses
    assert min(later) < first, f"the plain loop has learned nothing: {plain.losses}"


def row(
    case: Case,
    engine: str,
    measured: Measured,
    plain: Measured | None,
) -> dict[str, Any]:
    """What a table shows; `mfu` is None on a device whose peak is not known."""
    name = "CPU"
    if torch.device(case.device).type == "cuda":
        name = torch.cuda.get_device_name(case.device)
    peak = peak_of(name)
    used = None
    if peak is not None:
        used = mfu(case.step_flops, measured.step_s, peak, case.precision)
    tokens = case.microbatch_size * case.num_microbatches * case.context
    memory_gb = None
    if measured.peak_bytes is not None:
        memory_gb = measured.peak_bytes / 1e9
    predicted = None
    if memory_gb is not None and engine == "dpipe":
        predicted = case.predicted_bytes / 1e9
    over_plain = None
    if plain is not None:
        over_plain = measured.step_s / plain.step_s
    return {
        "model": case.name,
        "context": case.context,
        "engine": engine,
        "stages": case.stages if engine == "dpipe" else 1,
        "recompute": case.recompute,
        "device": name,
        "step_s": measured.step_s,
        "tokens_per_s": tokens / measured.step_s,
        "mfu": used,
        "memory_gb": memory_gb,
        "predicted_gb": predicted,
        "hidden": measured.hidden,
        "over plain": over_plain,
    }


def _plain_loop(case: Case) -> _Loop:
    """A training loop without dpipe's engine, in this process."""
    layers = case.layers(range(case.num_layers + 2))
    device = torch.device(case.device)
    masters = None
    modules = nn.ModuleList(layers.values())
    named = list(modules.named_parameters())
    if case.parameters != "fp32":
        dtype = _DTYPES[case.parameters]
        masters = MasterWeights(layers, dtype)
        by_layer = masters.named.values()
        named = list(chain.from_iterable(by_layer))
    optimizer = _plain_adamw(named, device)
    forward = _plain_forward(case, list(layers.values()))
    batch = case.batch()

    def step(index: int) -> float:
        losses = []
        if masters is not None:
            masters.refresh()
        for (shown,), following in zip(batch.inputs, batch.targets, strict=True):
            tokens = upload(shown, device)
            targets = upload(following, device)
            loss = forward(tokens, targets)
            scaled = loss / case.num_microbatches
            scaled.backward()
            losses.append(loss.detach())
            # Each micro-batch, as dpipe's stages do: half precision must not round the sum.
            if masters is not None:
                masters.collect()
        optimizer.step()
        optimizer.zero_grad()
        total = sum(map(float, losses))
        return total / len(losses)

    return _Loop(step)


def _plain_adamw(
    named: Sequence[tuple[str, nn.Parameter]], device: torch.device
) -> torch.optim.AdamW:
    """With weight decay on what our optimizer decays."""
    slices = whole(named)
    groups = []
    for decays in (True, False):
        group = {
            "params": [each.values for each in slices if each.decays is decays],
            "weight_decay": 0.1 * decays,
        }
        groups.append(group)
    fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(
        groups,
        lr=_ADAM.learning_rate,
        betas=_ADAM.betas,
        fused=fused,
    )


def _plain_forward(
    case: Case, layers: list[nn.Module]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    dtype = _DTYPES[case.precision]
    autocasts = case.parameters == "fp32" and case.precision != "fp32"
    recomputes = case.recompute == "full"
    if case.compiled:
        for layer in layers:
            layer.compile()

    def run(layer: nn.Module, x: torch.Tensor) -> Any:
        if recomputes:
            return checkpoint(layer, x, use_reentrant=False)
        return layer(x)

    def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x: Any = tokens
        with torch.autocast(tokens.device.type, dtype, enabled=autocasts):
            for layer in layers:
                x = run(layer, x)
        model = case.model()
        return model.loss(x.float(), targets)

    return forward


def measure(case: Case) -> Measured:
    """dpipe's engine: in this process for one stage, else in one process a stage on the same
    device.
    """
    if case.stages == 1:
        [only] = _measure(case, [_one_stage], silent())
        return only
    # Of the context that starts the processes: a forked torch would lack its threads.
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = (case, store.port, results)
    spawn(_process, args=args, nprocs=case.stages)
    by_stage: dict[int, Measured] = {}
    peaks = []
    hidden = []
    for _ in range(case.stages):
        # They come in any order: a stage is done when its own last step is.
        rank, measured = results.get()
        by_stage[rank] = measured
        if measured.peak_bytes is not None:
            peaks.append(measured.peak_bytes)
        if measured.hidden is not None:
            hidden.append(measured.hidden)
    total = sum(peaks) if peaks else None
    least = min(hidden, default=None)
    first = by_stage[0]
    # The last stage alone knows the losses.
    last = by_stage[case.stages - 1]
    return replace(last, peak_bytes=total, timers=first.timers, hidden=least)


def _process(
    rank: int,
    case: Case,
    port: int,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    streams = streams_of(case.device)
    transport = TcpTransport(rank, connect_timeout_s=_WAIT_S, streams=streams)
    own = f"127.0.0.1:{transport.port}"
    store.set(str(rank), own)
    ranks = range(case.stages)
    addresses: dict[int, str | None] = {}
    for peer in ranks:
        address = store.get(str(peer))
        addresses[peer] = address.decode()
    peers = {rank - 1, rank + 1}
    transport.connect(addresses, peers.intersection(ranks))

    def make(case: Case) -> _Loop:
        return _dpipe_loop(case, rank, transport, streams)

    [measured] = _measure(case, [make], silent())
    results.put((rank, measured))
    # A transport that closes early is a lost peer to those still in their last step.
    store.set(f"done {rank}", "")
    done = [f"done {peer}" for peer in ranks]
    store.wait(done)
    transport.close()


def _one_stage(case: Case) -> _Loop:
    transport = LocalHub(1).transport(0)
    streams = streams_of(case.device)
    return _dpipe_loop(case, 0, transport, streams)


def _dpipe_stage(case: Case, rank: int, device: torch.device) -> Stage:
    last = rank == case.stages - 1
    layers = case.layers(case.layers_of(rank))
    return Stage(
        rank,
        layers,
        num_microbatches=case.num_microbatches,
        loss=case.model().loss if last else None,
        recompute=case.recompute,
        precision=case.precision,
        parameters=case.parameters,
        compiled=case.compiled,
        splits_backward=False,  # as for any run whose schedule does not
        device=device,
    )


def _dpipe_loop(
    case: Case,
    rank: int,
    transport: Any,
    streams: Streams,
) -> _Loop:
    batch = case.batch()
    stage = _dpipe_stage(case, rank, streams.device)
    replicas = Single({rank: stage}, _ADAM)
    recorder = Recorder(rank, streams)
    shape = (case.microbatch_size, case.context, case.width)
    boundary = TensorSpec(shape, _DTYPES[case.parameters])
    boundaries = [(boundary,)] * (case.stages - 1)
    parts = Parts(
        rank,
        {rank: stage},
        transport,
        HopCodecs(HopFormats.alike("none", case.stages - 1)),
        boundaries,
        replicas,
        recorder,
        streams=streams,
    )
    executor = Executor(parts)
    plan = case.order()
    timers: dict[str, float] = {}

    def step(index: int) -> float:
        stage.begin_step(index)
        replicas.begin(index, _ADAM.learning_rate, 1.0)
        result = executor.run(plan, batch)
        update = Action(rank, Op.STEP)
        with recorder.span(Lane.UPDATE, update):
            replicas.step(rank, 1.0)
            stage.zero_grad()
        spans = [*result.spans, *recorder.take()]
        timers.update(timers_ms(spans))
        if result.loss is None:
            return 0.0
        return result.loss

    return _Loop(step, lambda: timers)


def _measure(
    case: Case,
    makes: Sequence[Callable[[Case], _Loop]],
    pace: Pace,
) -> list[Measured]:
    """Make and warm up each loop, then let them take turns."""
    device = torch.device(case.device)
    loops = [_warmed_up(case, make, device) for make in makes]
    round_s = sum(loop.warm_step_s for loop in loops)
    most = case.num_steps - _WARM_UP
    rounds = pace.rounds(most, round_s)
    for number in range(rounds):
        index = _WARM_UP + number
        for loop in loops:
            took_s = loop.run(index, device)
            loop.seconds.append(took_s)
        pace.done(number + 1, rounds)
    if case.stages > 1 and device.type == "cuda":
        for loop in loops:
            loop.hidden = hidden_share(partial(loop.step, case.num_steps))
    return [loop.measured() for loop in loops]


def _warmed_up(
    case: Case,
    make: Callable[[Case], _Loop],
    device: torch.device,
) -> _Loop:
    """`peak_bytes` leaves out what the loops made before this one hold."""
    before = 0
    if device.type == "cuda":
        torch.cuda.init()  # else there is nothing yet that counts
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    loop = make(case)
    for index in range(_WARM_UP):
        loop.warm_step_s = loop.run(index, device)
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        loop.peak_bytes = most - before
    return loop


XL = Case(
    name="GPT-3 XL 1.3B",
    num_layers=24,
    width=2048,
    num_heads=16,
    context=2048,
)
MEDIUM = Case(
    name="GPT-2 345M",
    num_layers=24,
    width=1024,
    num_heads=16,
    context=1024,
    microbatch_size=8,
)
TINY = Case(
    name="tiny",
    num_layers=2,
    width=64,
    num_heads=2,
    context=32,
    vocab_size=256,
    microbatch_size=2,
    num_microbatches=4,
    device="cpu",
    precision="fp32",
    parameters="fp32",
)
# On a CPU a step of seconds, so that what is compared is the engine beside compute and not beside
# nothing.
SMALL = replace(
    TINY,
    name="small",
    num_layers=4,
    width=512,
    num_heads=8,
    context=256,
    vocab_size=8192,
)


def compare_here(pace: Pace) -> list[dict[str, Any]]:
    """`dpipe bench mfu`: the 1.3B model where there is a GPU, a small one where there is none."""
    case = XL if torch.cuda.is_available() else SMALL
    return compare_mfu(case, pace)
