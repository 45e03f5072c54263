"""What the layers of this model take on this machine, run for real on one micro-batch.

    plain   forward  backward                          as torch has them
    split   forward  backward_input  backward_weight   as zero-bubble schedules need them

Means over a stretch of time, not the best of a few: a machine of which this process has a share
computes at full speed for a moment, and then not at all.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

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
_MASKED = 0.15  # of the words, which a BERT predicts

Passes = Mapping[str, float]  # seconds of each


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
    for size in micro_batch_sizes:
        times += _Trial(config, model, device, size).times()
    return tuple(times)


@dataclass(frozen=True)
class _Trial:
    config: Config
    model: LayeredModel
    device: str
    micro_batch_size: int

    def times(self) -> Iterator[LayerTime]:
        streams = streams_of(self.device)
        inputs, targets = self._batch()
        known: dict[Hashable, tuple[Passes, Tensors]] = {}
        for kind, index in self._kinds():
            # As stored parameters have them, which is what layers pass on.
            recipe = recipe_of(self.model.layers[index], inputs, self._stored)
            if recipe is None or recipe not in known:
                found = self._layer(index, inputs, targets, streams)
                known[recipe] = found
            passes, inputs = known[recipe]
            yield LayerTime(
                kind,
                self.micro_batch_size,
                forward_ms=passes["forward"] * 1e3,
                backward_ms=passes["backward"] * 1e3,
                backward_input_ms=passes["input"] * 1e3,
                backward_weight_ms=passes["weight"] * 1e3,
            )

    @property
    def _stored(self) -> torch.dtype:
        return DTYPES[self.config.train.parameters]

    def _kinds(self) -> list[tuple[str | int, int]]:
        """With the index of a layer of that kind."""
        last = len(self.model.layers) - 1
        if self.config.model.is_transformer:
            return [("embedding", 0), ("block", 1), ("head", last)]
        return [(index, index) for index in range(last + 1)]

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

    def _layer(
        self, index: int, inputs: Tensors, targets: torch.Tensor, streams: Streams
    ) -> tuple[Passes, Tensors]:
        """Seconds of each pass, and what the layer passes on."""
        last = index == len(self.model.layers) - 1

        def gradients_of(outputs: Tensors) -> Tensors:
            if last:
                return ()
            return tuple(torch.ones_like(o) for o in outputs if o.is_floating_point())

        def plain(stage: Stage, clock: "_Clock") -> Tensors:
            with clock.timing("forward"):
                outputs = stage.forward(0, inputs, targets)
            gradients = gradients_of(outputs)
            with clock.timing("backward"):
                stage.backward(0, gradients)
            return outputs

        def split(stage: Stage, clock: "_Clock") -> Tensors:
            outputs = stage.forward(0, inputs, targets)
            gradients = gradients_of(outputs)
            with clock.timing("input"):
                stage.backward_input(0, gradients)
            with clock.timing("weight"):
                stage.backward_weight(0)
            return outputs

        passes: dict[str, float] = {}
        # One after the other: of a large layer there may be room for one alone.
        for run, splits in ((plain, False), (split, True)):
            stage = self._stage(index, last, splits_backward=splits)
            means, outputs = _repeated(run, stage, streams)
            passes |= means
        return passes, outputs

    def _stage(self, index: int, last: bool, *, splits_backward: bool) -> Stage:
        train = self.config.train
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


class _Clock:
    """Seconds of parts that are repeated, from an idle device to an idle device."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        self._streams.catch_up()
        began = time.perf_counter()
        yield
        self._streams.catch_up()
        took = time.perf_counter() - began
        self.seconds[name] = self.seconds.get(name, 0.0) + took


def _repeated(
    run: Callable[[Stage, _Clock], Tensors], stage: Stage, streams: Streams
) -> tuple[Passes, Tensors]:
    """Mean seconds of each part, and the outputs."""
    run(stage, _Clock(streams))  # may load kernels, and makes the gradients' memory
    clock = _Clock(streams)
    number = 0
    began = time.perf_counter()
    while _goes_on(number, time.perf_counter() - began):
        outputs = run(stage, clock)
        number += 1
    return {name: seconds / number for name, seconds in clock.seconds.items()}, outputs


def _goes_on(number: int, seconds: float) -> bool:
    """Whether so many repetitions in so long are too few."""
    if number < _FEWEST:
        return True
    if number < _ENOUGH:
        return seconds < _LONGEST_S
    return number < _MOST and seconds < _STRETCH_S
