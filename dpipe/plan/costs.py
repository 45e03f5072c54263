"""What layers and stages cost: seconds, and bytes on the wire."""

from dataclasses import dataclass, replace
from typing import TypeVar

from dpipe.config.load import Config
from dpipe.data.tokenizer import vocabulary_of
from dpipe.errors import ConfigError
from dpipe.network.link import Network
from dpipe.plan.memory.formulas import layers_memory
from dpipe.plan.tensor_parallel import exchange_s, only_link, ring_us
from dpipe.stage.flops import attention_core_flops
from dpipe.timeline.cost import Cost
from dpipe.timeline.memory import LayerMemory
from dpipe.wire.format import wire_bytes

Number = TypeVar("Number", int, float)


_LENGTH_BYTES = 4  # of a sequence's length, which BERT's blocks pass on


@dataclass(frozen=True)
class LayerCosts:
    """By layer, for one micro-batch: seconds forward and backward, and bytes on the wire each way
    behind it.

    `parameter_bytes` are in fp32, `core_s` the seconds of forward that are its attention cores',
    `memory` is what each layer holds, `exchange_.._s` what the ranks that share a layer wait for
    each other (defaults: none). `output_bytes` are what each gives on within a rank (default: as a
    transformer's).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    tied_bytes: int = 0
    parameter_bytes: tuple[int, ...] = ()
    core_s: tuple[float, ...] = ()
    memory: tuple[LayerMemory, ...] = ()
    exchange_forward_s: tuple[float, ...] = ()
    exchange_backward_s: tuple[float, ...] = ()
    output_bytes: tuple[int, ...] = ()


def transformer_costs(config: Config) -> LayerCosts:
    """Of a GPT or a BERT, whose blocks are the same and whose hops carry a sequence's length
    besides.

    Backward is twice forward: one product for the input gradient, one for the weight's (Kaplan et
    al. 2020).
    """
    model = config.model
    tokens = config.microbatch_size * config.model.context
    flops = layer_flops(config, config.microbatch_size)
    forward_s = tuple(f / (config.predict.gflops * 1e9) for f in flops)
    message = wire_bytes(
        config.pipeline.wire, tokens * model.width, 4 if config.train.parameters == "fp32" else 2
    )
    lengths = config.microbatch_size * _LENGTH_BYTES if model.family.reads_pairs else 0
    activation, gradient = ((size,) * len(flops) for size in (message + lengths, message))
    tied = vocabulary_of(config) * model.width * 4 if model.tie_embeddings else 0
    parameters = layer_parameter_bytes(config)
    core = attention_core_flops(
        batch_size=config.microbatch_size, context=model.context, width=model.width
    )
    core_s = (0.0, *(core / (config.predict.gflops * 1e9) for _ in range(model.num_layers)), 0.0)
    memory = layers_memory(config)
    backward_s = tuple(2 * s for s in forward_s)
    return LayerCosts(forward_s, backward_s, activation, gradient, tied, parameters, core_s, memory)


def on_ranks(config: Config, layers: LayerCosts) -> LayerCosts:
    """The costs of whole layers as those of layers on T ranks."""
    size = config.tensor_parallel.size
    if size == 1:
        return layers
    forward_s, backward_s, core_s = (
        tuple(seconds / size for seconds in each)
        for each in (layers.forward_s, layers.backward_s, layers.core_s)
    )
    there, back = exchange_s(config, len(forward_s))
    return replace(
        layers,
        forward_s=forward_s,
        backward_s=backward_s,
        core_s=core_s,
        exchange_forward_s=there,
        exchange_backward_s=back,
    )


def stage_cost(layers: LayerCosts, cut: tuple[int, ...], *, recompute: str) -> Cost:
    """Add up the layers of each stage; recomputation runs forward, or the attention cores, once
    more in backward.
    """
    starts = [sum(cut[:stage]) for stage in range(len(cut))]
    ranges = [range(start, start + size) for start, size in zip(starts, cut, strict=True)]
    forward = [sum(layers.forward_s[i] for i in r) * 1e6 for r in ranges]
    backward = [sum(layers.backward_s[i] for i in r) * 1e6 for r in ranges]
    exchanges_s = (layers.exchange_forward_s, layers.exchange_backward_s)
    there, back = ([sum(each[r.start : r.stop]) * 1e6 for r in ranges] for each in exchanges_s)
    repeated = {"none": (), "selective": layers.core_s, "full": layers.forward_s}[recompute]
    again = [sum(repeated[r.start : r.stop]) * 1e6 + e for r, e in zip(ranges, back, strict=True)]
    if recompute == "full":
        again = [a + e for a, e in zip(again, there, strict=True)]
    return Cost(
        forward_us=tuple(f + e for f, e in zip(forward, there, strict=True)),
        backward_us=tuple(b + a for b, a in zip(backward, again, strict=True)),
        input_us=tuple(b / 2 + a for b, a in zip(backward, again, strict=True)),
        weight_us=tuple(b / 2 for b in backward),
        activation_bytes=tuple(layers.activation_bytes[r[-1]] for r in ranges[:-1]),
        gradient_bytes=tuple(layers.gradient_bytes[r[-1]] for r in ranges[:-1]),
        reduce_bytes=tuple(sum(layers.parameter_bytes[r.start : r.stop]) for r in ranges),
        tied_bytes=layers.tied_bytes,
    )


def replay_cost(config: Config, network: Network) -> Cost:
    """Exchanges are waited for where they stand, as if nothing else left the ranks of a stage
    meanwhile.
    """
    replay = config.replay
    stages = config.pipeline.stages
    if config.tensor_parallel.size > 1:
        only_link(network)
    exchanges_us = replay.exchanges and replay.exchanges * ring_us(config, network)
    forward, backward = (
        per_stage(value, stages) for value in (replay.forward_ms, replay.backward_ms)
    )
    message = wire_bytes(config.pipeline.wire, replay.message_bytes // 4)
    return Cost(
        forward_us=tuple(f * 1e3 + exchanges_us for f in forward),
        backward_us=tuple(b * 1e3 + exchanges_us for b in backward),
        input_us=tuple(b * 1e3 * replay.input_share + exchanges_us for b in backward),
        weight_us=tuple(b * 1e3 * (1 - replay.input_share) for b in backward),
        activation_bytes=(message,) * (stages - 1),
        reduce_bytes=tuple(per_stage(replay.parameter_bytes, stages)),
    )


def per_stage(value: Number | list[Number], stages: int) -> list[Number]:
    """One number for all stages, or a list with one for each."""
    values = value if isinstance(value, list) else [value] * stages
    if len(values) != stages:
        raise ConfigError(f"replay lists {len(values)} values, but pipeline.stages is {stages}")
    return values


def layer_flops(config: Config, num_sequences: int) -> tuple[float, ...]:
    """Operations of the forward pass of each layer."""
    formula = config.model.family.layer_flops
    assert formula is not None, "only a family with a builder is costed by formula"
    return formula(batch_size=num_sequences, **_sizes(config))


def layer_parameter_bytes(config: Config) -> tuple[int, ...]:
    """The fp32 parameters of each layer."""
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
