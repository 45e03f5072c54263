"""What the layers of this model take on this machine, run for real on one micro-batch.

    a chain of layers   1  2  3  ...  forward, each timed by itself
                        1  2  3  ...  backward, from the last

    plain   forward  backward                          as torch has them
    split   forward  backward_input  backward_weight   as zero-bubble schedules need them

In a chain, as a stage has them: the others' parameters and activations pass through the cache
between two uses of a layer. By itself, repeated, it would find its own there.

Means over a stretch of time, not the best of a few: a machine of which this process has a share
computes at full speed for a moment, and then not at all. Between two micro-batches it rests as a
stage does: the core of a virtual machine that rests now and then may be 5 % slower when it computes
than one that never does.
"""

import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch

from dpipe.config.load import Config
from dpipe.machines.machine import LayerTime
from dpipe.plan.run_plan import DTYPES, check_device, local_device, make_model
from dpipe.probe.layer_costs import recipe_of
from dpipe.stage.base import Tensors
from dpipe.stage.bert import IGNORED
from dpipe.stage.model import LayeredModel, materialise
from dpipe.stage.stage import Stage
from dpipe.streams import Streams, streams_of
from dpipe.tokenizer.tokenizer import vocabulary_of

_STRETCH_S = 0.5  # of each layer, plain and split; some periods of a scheduler's quota
_MOST = 1000  # repetitions
# Of a slow layer few fit into that. With a quarter of a core, three were up to 15 % off.
_ENOUGH = 12
_LONGEST_S = 2.0
_FEWEST = 3
_MOST_IDLE = 0.5  # of the time, lest measuring takes long
# Parameters of a chain: more than caches hold, and little beside what a stage of such layers takes.
_CHAIN_BYTES = 256 << 20
_MASKED = 0.15  # of the words, which a BERT predicts

Passes = Mapping[str, float]  # seconds of each
Known = dict[Hashable, tuple[Passes, Tensors]]  # by recipe, with what the layer passes on


def time_layers(config: Config, micro_batch_sizes: tuple[int, ...]) -> tuple[LayerTime, ...]:
    """Each kind of layer at each size; of a user's own model each layer, alike ones measured once.
    Nothing for replay. Raises what `make_model` and the layers raise.
    """
    if not config.model.family.computes:
        return ()
    device = local_device(config.node.device, 0)
    check_device(device)
    model = make_model(config)
    times: list[LayerTime] = []
    streams = streams_of(device)
    for size in micro_batch_sizes:
        times += _Trial(config, model, device, streams, size).times()
    return tuple(times)


@dataclass(frozen=True)
class _Trial:
    config: Config
    model: LayeredModel
    device: str
    streams: Streams
    micro_batch_size: int

    def times(self) -> Iterator[LayerTime]:
        inputs, targets = self._batch()
        known: Known = {}
        kinds: set[str | int] = set()
        for index in range(len(self.model.layers)):
            recipe = self._recipe(index, inputs)
            if recipe not in known:
                known = self._chain(index, inputs, targets) | known
            passes, inputs = known[recipe]
            kind = self._kind(index)
            if kind in kinds:
                continue
            kinds.add(kind)
            yield LayerTime(
                kind,
                self.micro_batch_size,
                forward_ms=passes["forward"] * 1e3,
                backward_ms=passes["backward"] * 1e3,
                backward_input_ms=passes["input"] * 1e3,
                backward_weight_ms=passes["weight"] * 1e3,
            )

    def _kind(self, index: int) -> str | int:
        if not self.config.model.is_transformer:
            return index
        ends = {0: "embedding", len(self.model.layers) - 1: "head"}
        return ends.get(index, "block")

    def _recipe(self, index: int, inputs: Tensors) -> Hashable:
        """Equal for layers that take as long; that of one which is like no other is its index."""
        stored = DTYPES[self.config.train.parameters]  # which is what layers pass on
        recipe = recipe_of(self.model.layers[index], inputs, stored)
        return index if recipe is None else recipe

    def _batch(self) -> tuple[Tensors, torch.Tensor]:
        """Random words: no layer takes longer for some than for others."""
        model = self.config.model
        shape = (self.micro_batch_size, model.context)
        generator = torch.Generator().manual_seed(self.config.train.seed)
        vocabulary = vocabulary_of(self.config)
        tokens = torch.randint(vocabulary, shape, generator=generator)
        if self.config.data.has_samples:  # one that fills the sequence, and how much of it learns
            positions = torch.arange(model.context, dtype=torch.int32).expand(shape)
            counts = torch.full((self.micro_batch_size, 1), tokens.numel())
            return (tokens, positions), torch.cat([tokens, counts], 1)
        if not model.family.reads_pairs:
            return (tokens,), tokens
        masked = torch.rand(shape, generator=generator) < _MASKED
        targets = torch.where(masked, tokens, IGNORED)
        targets[:, 0] = 0  # the second passage follows the first
        passages = torch.zeros_like(tokens)
        lengths = torch.full((self.micro_batch_size,), model.context, dtype=torch.int32)
        inputs = (tokens, passages, lengths)
        return inputs, targets

    def _chain(self, first: int, inputs: Tensors, targets: torch.Tensor) -> Known:
        """Of layer `first` and those behind it, no more than a stage has."""
        # One after the other: of a large layer there may be room for one alone.
        plain = self._timed_chain(first, inputs, targets, splits_backward=False)
        split = self._timed_chain(first, inputs, targets, splits_backward=True)
        known: Known = {}
        for recipe, (passes, outputs) in plain.items():
            halves, _ = split[recipe]
            known[recipe] = {**passes, **halves}, outputs
        return known

    def _timed_chain(
        self, first: int, inputs: Tensors, targets: torch.Tensor, *, splits_backward: bool
    ) -> Known:
        links = self._links(first, inputs, targets, splits_backward=splits_backward)
        means = _repeated(links, targets, self.streams, self._idle())
        known: Known = {}
        # Of alike ones the first: the model's last layer passes on the loss.
        for link in links:
            known.setdefault(link.recipe, (means[link.recipe], link.outputs))
        return known

    def _idle(self) -> float:
        """The share of its time that a rank waits for others: the bubble of 1F1B, interleaved where
        a rank has several stages (Narayanan et al. 2021).
        """
        pipeline = self.config.pipeline
        waits = pipeline.stages // pipeline.stages_per_rank - 1
        works = pipeline.stages_per_rank * self.config.train.num_microbatches
        return min(waits / (waits + works), _MOST_IDLE)

    def _links(
        self, first: int, inputs: Tensors, targets: torch.Tensor, *, splits_backward: bool
    ) -> "list[_Link]":
        """Each has run forward and backward: that loads kernels and makes the gradients' memory."""
        links: list[_Link] = []
        last = len(self.model.layers) - 1
        length = math.ceil(len(self.model.layers) / self.config.pipeline.stages)
        size = 0
        for index in range(first, min(first + length, last + 1)):
            recipe = self._recipe(index, inputs)
            stage = self._stage(index, splits_backward)
            link = _Link(recipe, stage, inputs, splits_backward, ends=index == last)
            clock = _Clock(self.streams)
            link.forward(targets, clock)
            link.backward(clock)
            links.append(link)
            inputs = link.outputs
            size += link.num_bytes
            if size >= _CHAIN_BYTES:
                break
        return links

    def _stage(self, index: int, splits_backward: bool) -> Stage:
        train = self.config.train
        last = index == len(self.model.layers) - 1
        return Stage(
            index,
            {index: materialise(self.model, index, train.seed, self.device)},
            num_microbatches=1,
            loss=self.model.loss if last else None,
            precision=train.precision,
            parameters=train.parameters,
            # A compiled layer makes its two gradients together.
            compiled=train.compile and not splits_backward,
            seed=train.seed,
            splits_backward=splits_backward,
            device=self.device,
        )


@dataclass
class _Link:
    """One layer of a chain."""

    recipe: Hashable
    stage: Stage
    inputs: Tensors
    splits_backward: bool
    ends: bool  # in the loss, whose gradient is known
    outputs: Tensors = ()

    @property
    def num_bytes(self) -> int:
        tensors = (*self.stage.parameters(), *self.stage.buffers())
        return sum(tensor.nbytes for tensor in tensors)

    def forward(self, targets: torch.Tensor, clock: "_Clock") -> None:
        with clock.timing(self.recipe, "forward"):
            self.outputs = self.stage.forward(0, self.inputs, targets)

    def backward(self, clock: "_Clock") -> None:
        gradients: Tensors = ()
        if not self.ends:
            gradients = tuple(torch.ones_like(o) for o in self.outputs if o.is_floating_point())
        if not self.splits_backward:
            with clock.timing(self.recipe, "backward"):
                self.stage.backward(0, gradients)
            return
        with clock.timing(self.recipe, "input"):
            self.stage.backward_input(0, gradients)
        with clock.timing(self.recipe, "weight"):
            self.stage.backward_weight(0)


class _Clock:
    """Seconds of passes that are repeated, from an idle device to an idle device."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._taken: dict[Hashable, dict[str, list[float]]] = {}

    @contextmanager
    def timing(self, recipe: Hashable, name: str) -> Iterator[None]:
        self._streams.catch_up()
        began = time.perf_counter()
        yield
        self._streams.catch_up()
        took = time.perf_counter() - began
        self._taken.setdefault(recipe, {}).setdefault(name, []).append(took)

    def means(self) -> dict[Hashable, Passes]:
        return {
            recipe: {name: fmean(seconds) for name, seconds in passes.items()}
            for recipe, passes in self._taken.items()
        }


def _repeated(
    links: Sequence[_Link], targets: torch.Tensor, streams: Streams, idle: float
) -> dict[Hashable, Passes]:
    """Mean seconds of each pass, by recipe. Nothing is done for `idle` of the time."""
    clock = _Clock(streams)
    number = 0
    busy_s = 0.0
    while _goes_on(number, busy_s / len(links)):
        began = time.perf_counter()
        for link in links:
            link.forward(targets, clock)
        for link in reversed(links):
            link.backward(clock)
        took_s = time.perf_counter() - began
        time.sleep(took_s * idle / (1 - idle))
        busy_s += took_s
        number += 1
    return clock.means()


def _goes_on(number: int, seconds: float) -> bool:
    """Whether so many repetitions in so long, a layer, are too few."""
    if number < _FEWEST:
        return True
    if number < _ENOUGH:
        return seconds < _LONGEST_S
    return number < _MOST and seconds < _STRETCH_S
