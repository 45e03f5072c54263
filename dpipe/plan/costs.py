"""What layers and stages cost: seconds, and bytes on the wire. No torch.

LayerCosts   by layer, for one micro-batch     transformer_costs, or run_plan.py for any model
  on_ranks     shared out over a tensor-parallel group
  stage_cost   summed up by stage: a `Cost`, which the simulator takes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.memory.formulas import transformer_stages
from dpipe.memory.layers import Stages
from dpipe.network.link import Network
from dpipe.plan.tensor_parallel import Times, exchange_s, only_link, ring_us
from dpipe.stage.flops import attention_core_flops
from dpipe.timeline.cost import Cost
from dpipe.tokenizer.tokenizer import vocabulary_of
from dpipe.wire.format import HopFormats, MessageSize, sizes_on_hops

Number = TypeVar("Number", int, float)

_FLOAT_BYTES = 4
_HALF_BYTES = 2
_CORE_BACKWARD = 2  # an attention core's backward pass takes so many times its forward pass
_LENGTH_BYTES = 4  # of a sequence's length, which BERT's blocks pass on


@dataclass(frozen=True)
class LayerCosts:
    """One value a layer, for one micro-batch or the first of its slices. Empty tuples are zeros."""

    forward_s: Times  # of computing alone
    backward_s: Times  # the same; input and weight gradients together
    messages: tuple[MessageSize, ...]  # behind the layer
    tied_bytes: int = 0  # of the gradient that the first and the last layer exchange
    parameter_bytes: tuple[int, ...] = ()  # in fp32
    core_s: Times = ()  # of forward: its attention cores
    num_slices: int = 1  # of each sequence; one more of them takes an attention core as long again
    exchange_forward_s: Times = ()  # waiting for the tensor-parallel group
    exchange_backward_s: Times = ()  # the same, in backward
    input_s: Times = ()  # of a split backward its two parts;
    weight_s: Times = ()  # empty: half of backward each
    frozen: int = 0  # layers in front of the first that learns
    # Layers a stage -> what the stages hold; None if nobody asks for it.
    memory_of: Callable[[Sequence[int]], Stages] | None = None


def transformer_costs(config: Config) -> LayerCosts:
    """Of a GPT or a BERT, by formula, at `predict.gflops`. A BERT's messages carry the sequences'
    lengths besides.

    Backward is twice forward: one product for the input gradient, one for the weight's (Kaplan et
    al. 2020).
    """
    model = config.model
    flops_a_second = config.predict.gflops * 1e9
    forward_s = tuple(
        flops / flops_a_second for flops in layer_flops(config, config.microbatch_size)
    )
    num_layers = len(forward_s)
    core_flops = attention_core_flops(
        batch_size=config.microbatch_size, context=model.context, width=model.width
    )
    core_s = [core_flops / flops_a_second] * model.num_layers
    # Of what layers pass on: autocast makes it fp32 again, parameters in half precision do not.
    value_bytes = _FLOAT_BYTES if config.train.parameters == "fp32" else _HALF_BYTES
    shape = (config.microbatch_size, model.context, model.width)
    lengths_bytes = config.microbatch_size * _LENGTH_BYTES if model.family.reads_pairs else 0
    message = MessageSize(((shape, value_bytes),), lengths_bytes)
    return LayerCosts(
        forward_s=forward_s,
        backward_s=tuple(2 * seconds for seconds in forward_s),
        messages=(message,) * num_layers,
        tied_bytes=tied_bytes(config),
        parameter_bytes=layer_parameter_bytes(config),
        core_s=(0.0, *core_s, 0.0),  # neither embedding nor head has one
        memory_of=partial(transformer_stages, config),
    )


def tied_bytes(config: Config) -> int:
    """Of the embedding's gradient, which the first and the last stage exchange where it is tied."""
    if not (config.model.is_transformer and config.model.tie_embeddings):
        return 0
    return vocabulary_of(config) * config.model.width * _FLOAT_BYTES


def on_ranks(config: Config, layers: LayerCosts) -> LayerCosts:
    """The costs of whole layers as those of layers that a tensor-parallel group shares."""
    size = config.tensor_parallel.size
    if size == 1:
        return layers
    exchange_forward_s, exchange_backward_s = exchange_s(config, len(layers.forward_s))
    return replace(
        layers,
        forward_s=tuple(s / size for s in layers.forward_s),
        backward_s=tuple(s / size for s in layers.backward_s),
        core_s=tuple(s / size for s in layers.core_s),
        input_s=tuple(s / size for s in layers.input_s),
        weight_s=tuple(s / size for s in layers.weight_s),
        exchange_forward_s=exchange_forward_s,
        exchange_backward_s=exchange_backward_s,
    )


def in_slices(config: Config, layers: LayerCosts) -> LayerCosts:
    """The costs of whole micro-batches as those of the first of `pipeline.sequence_slices`.

    Of S slices, slice s has 1 / S of the tokens, whose queries meet (s + 1) / S of the keys.
    """
    number = config.pipeline.sequence_slices
    if number == 1:
        return layers
    cores_s = layers.core_s or (0.0,) * len(layers.forward_s)
    saved_s = tuple(core_s / number * (1 - 1 / number) for core_s in cores_s)

    def shared(seconds: Times, times: int) -> Times:
        pairs = zip(seconds, saved_s, strict=True)
        return tuple(s / number - times * saved for s, saved in pairs)

    return replace(
        layers,
        forward_s=shared(layers.forward_s, 1),
        backward_s=shared(layers.backward_s, _CORE_BACKWARD),
        # The attention core's backward pass is all in the input gradient.
        input_s=shared(layers.input_s, _CORE_BACKWARD) if layers.input_s else (),
        weight_s=tuple(s / number for s in layers.weight_s),
        core_s=tuple(core_s / number**2 for core_s in cores_s),
        messages=tuple(message.sliced(number) for message in layers.messages),
        num_slices=number,
    )


@dataclass(frozen=True)
class _StageTime:
    """Microseconds of one stage."""

    forward: float
    backward: float
    input: float  # of a split backward
    weight: float
    again: float  # in front of backward: what is recomputed, and waiting for the group
    later_forward: float  # for each slice before this one
    later_backward: float


def stage_cost(
    layers: LayerCosts,
    cut: tuple[int, ...],
    formats: HopFormats,
    *,
    recompute: str,
) -> Cost:
    """Sum up the layers of each stage; `cut` are layers a stage, `formats` those of the hops
    between them. Recomputation runs forward ("full") or the attention cores ("selective") once more
    in backward.
    """
    ranges = []
    start = 0
    for size in cut:
        ranges.append(range(start, start + size))
        start += size
    times = [_stage_time(layers, stage, recompute) for stage in ranges]
    parameter_bytes = [sum(_slice(layers.parameter_bytes, stage)) for stage in ranges]
    # A stage sends what its last layer passes on; behind the last stage there is nobody.
    messages = [layers.messages[stage.stop - 1] for stage in ranges[:-1]]
    activation_bytes, gradient_bytes = sizes_on_hops(messages, formats)
    frozen = sum(stage.stop <= layers.frozen for stage in ranges)
    return Cost(
        forward_us=tuple(time.forward for time in times),
        backward_us=tuple(time.backward + time.again for time in times),
        input_us=tuple(time.input + time.again for time in times),
        weight_us=tuple(time.weight for time in times),
        activation_bytes=activation_bytes,
        gradient_bytes=(0,) * frozen + gradient_bytes[frozen:],
        reduce_bytes=tuple(parameter_bytes),
        tied_bytes=layers.tied_bytes,
        frozen=frozen,
        num_slices=layers.num_slices,
        later_forward_us=tuple(time.later_forward for time in times),
        later_backward_us=tuple(time.later_backward for time in times),
    )


def _stage_time(layers: LayerCosts, stage: range, recompute: str) -> _StageTime:
    def total_us(seconds: Times) -> float:
        return sum(_slice(seconds, stage)) * 1e6

    forward_us = total_us(layers.forward_s)
    exchange_forward_us = total_us(layers.exchange_forward_s)
    # In front of the first layer that learns there is no backward pass.
    stage = range(max(stage.start, min(layers.frozen, stage.stop)), stage.stop)
    exchange_backward_us = total_us(layers.exchange_backward_s)
    # The group's exchanges of backward stand in front of it: whichever half a split backward pass
    # runs, they belong to the input gradient, which the neighbour waits for.
    if recompute == "full":
        again_us = total_us(layers.forward_s) + exchange_backward_us
        again_us += total_us(layers.exchange_forward_s)
    elif recompute == "selective":
        again_us = total_us(layers.core_s) + exchange_backward_us
    else:
        again_us = exchange_backward_us
    backward_us = total_us(layers.backward_s)
    input_us = backward_us / 2
    weight_us = backward_us / 2
    if layers.input_s:
        input_us = total_us(layers.input_s)
        weight_us = total_us(layers.weight_s)
    later_us = total_us(layers.core_s) if layers.num_slices > 1 else 0.0
    runs_again = recompute != "none"
    return _StageTime(
        forward_us + exchange_forward_us,
        backward_us,
        input_us,
        weight_us,
        again_us,
        later_forward=later_us,
        later_backward=later_us * (_CORE_BACKWARD + runs_again),
    )


def _slice(values: tuple[Number, ...], stage: range) -> tuple[Number, ...]:
    return values[stage.start : stage.stop]


def replay_cost(config: Config, formats: HopFormats, network: Network) -> Cost:
    """Of replay stages. Exchanges are waited for where they stand, as if nothing else left the
    ranks of a stage meanwhile.
    """
    replay = config.replay
    stages = config.pipeline.stages
    slices = config.pipeline.sequence_slices
    if config.tensor_parallel.size > 1:
        only_link(network)
    exchanges_us = replay.exchanges * ring_us(config, network) if replay.exchanges else 0.0
    forward_us = [ms * 1e3 / slices for ms in per_stage(replay.forward_ms, stages)]
    backward_us = [ms * 1e3 / slices for ms in per_stage(replay.backward_ms, stages)]
    whole = MessageSize((((replay.message_bytes // _FLOAT_BYTES,), _FLOAT_BYTES),))
    message = whole.sliced(slices)
    activation_bytes, gradient_bytes = sizes_on_hops([message] * (stages - 1), formats)
    return Cost(
        forward_us=tuple(us + exchanges_us for us in forward_us),
        backward_us=tuple(us + exchanges_us for us in backward_us),
        input_us=tuple(us * replay.input_share + exchanges_us for us in backward_us),
        weight_us=tuple(us * (1 - replay.input_share) for us in backward_us),
        activation_bytes=activation_bytes,
        gradient_bytes=gradient_bytes,
        reduce_bytes=tuple(per_stage(replay.parameter_bytes, stages)),
        num_slices=slices,
    )


def per_stage(value: Number | list[Number], stages: int) -> list[Number]:
    """One number for all stages, or a list with one for each. Raises `ConfigError` for a list of
    another length.
    """
    values = value if isinstance(value, list) else [value] * stages
    if len(values) != stages:
        raise ConfigError(f"replay lists {len(values)} values, but pipeline.stages is {stages}")
    return values


def layer_flops(config: Config, num_sequences: int) -> tuple[float, ...]:
    """Operations of the forward pass of each layer of a transformer."""
    formula = config.model.family.layer_flops
    assert formula is not None, "only a family with a builder is costed by formula"
    return formula(batch_size=num_sequences, **_sizes(config))


def layer_parameter_bytes(config: Config) -> tuple[int, ...]:
    """The fp32 parameters of each layer of a transformer."""
    formula = config.model.family.layer_parameter_bytes
    assert formula is not None, "only a family with a builder is costed by formula"
    return formula(**_sizes(config))


def _sizes(config: Config) -> dict[str, int]:
    model = config.model
    return {
        "context": model.context,
        "width": model.width,
        "num_layers": model.num_layers,
        "vocab_size": vocabulary_of(config),
    }
