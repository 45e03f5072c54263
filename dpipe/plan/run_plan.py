"""What a run is, before any process talks to another: model, text, cut and schedule. Equal on every
rank.

Everything that can be wrong with what the user gave is found here, before anything is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dpipe.choices import function_at
from dpipe.config.load import Config
from dpipe.data.bert_data import SentencePairs, SentenceTokenizer
from dpipe.data.corpus import Corpus, prepare
from dpipe.data.feed import feed_of
from dpipe.data.tokenizer import open_tokenizer, vocabulary_of
from dpipe.errors import ConfigError, DataError
from dpipe.network.link import Network
from dpipe.plan.costs import LayerCosts, transformer_costs
from dpipe.plan.forecast import Choice, Forecast, choose_schedule, forecast
from dpipe.plan.memory.formulas import layers_memory, of_parameters, with_masters
from dpipe.plan.probe import LayerCost, measure, probe
from dpipe.stage.model import LayeredModel, load_layers
from dpipe.stage.scatter import part_spec
from dpipe.store.checkpoint import check_url
from dpipe.timeline.memory import LayerMemory
from dpipe.transport.kinds import TRANSPORTS
from dpipe.wire.format import wire_bytes
from dpipe.wire.spec import TensorSpec

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RunPlan:
    """`model` and `corpus` are None for replay. `boundaries[s]` is what a rank of stage s gives to
    one of the next.
    """

    config: Config
    model: LayeredModel | None
    corpus: Corpus | None
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    forecast: Forecast

    def layers_of(self, stage: int) -> range:
        start = sum(self.forecast.split[:stage])
        return range(start, start + self.forecast.split[stage])


def draft(
    config: Config,
    *,
    layer_s: tuple[float, ...] | None = None,
    network: Network | None = None,
    choose: Choice = choose_schedule,
) -> RunPlan:
    """Read the text, make out the layers, cut and schedule them. `layer_s` are measured seconds of
    each layer.
    """
    if not config.model.family.computes:
        message = TensorSpec((config.replay.message_bytes // 4,), torch.float32)
        messages = ((message,),) * (config.pipeline.stages - 1)
        return RunPlan(config, None, None, messages, forecast(config, None, network, choose))
    check_device(config.node.device)
    if config.run.checkpoint_url is not None:
        check_url(config.run.checkpoint_url)
    TRANSPORTS[config.transport.kind].check()
    model = make_model(config)
    probed = probe(model, _inputs(config), config.train.seed, _DTYPES[config.train.parameters])
    check_recompute(config, probed)
    found = forecast(config, layer_costs(config, probed, layer_s), network, choose)
    ends = [sum(found.split[: stage + 1]) - 1 for stage in range(config.pipeline.stages - 1)]
    corpus = read_text(config)  # last, because the first time it writes a cache
    return RunPlan(
        config, model, corpus, boundaries(config, [probed[end].outputs for end in ends]), found
    )


def check_device(device: str) -> None:
    """Raises `ConfigError` for a device that torch does not know, that dpipe does not, or that is
    not here.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"node.device {device!r} is no device: {error}") from None
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f'node.device is {device!r}; dpipe computes on "cpu" and on "cuda"')
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"node.device is {device!r}, but torch {torch.__version__} sees no CUDA GPU: install a "
            "CUDA build of torch "
            'and a driver (nvidia-smi must list the GPU), or set node.device = "cpu"'
        )


def local_device(device: str, local_rank: int) -> str:
    """ "cuda" shared out over the processes of a machine: they take its GPUs in turns. All else as
    it is.
    """
    count = torch.cuda.device_count() if device == "cuda" else 0
    return f"cuda:{local_rank % count}" if count else device


def check_recompute(config: Config, probed: tuple[LayerCost, ...]) -> None:
    """Raises `ConfigError` for attention to be recomputed in a model that shows none."""
    if config.pipeline.recompute == "selective" and not any(
        cost.attention_cores for cost in probed
    ):
        raise ConfigError(
            'pipeline.recompute = "selective" runs attention cores again, but no layer of '
            f"{config.model.layers} has "
            "one: set attention_core = True on the module between q, k, v and the output, or use "
            '"none" or "full"'
        )


def read_text(config: Config) -> Corpus:
    """Tokens of the configured files; raises `DataError` where they cannot make one batch."""
    model = config.model
    data = config.data

    def accept(corpus: Corpus) -> None:
        if model.vocab_size is not None and corpus.vocab_size > model.vocab_size:
            raise DataError(
                f"the tokenizer {data.tokenizer} has {corpus.vocab_size} entries, but "
                "model.vocab_size is "
                f"{model.vocab_size}; leave model.vocab_size out, or raise it"
            )
        need_held_out = config.train.eval_every is not None
        if isinstance(tokenizer, SentenceTokenizer):
            SentencePairs(corpus, tokenizer, model.context).check(need_held_out=need_held_out)
        else:
            corpus.check_length(model.context, need_held_out=need_held_out)

    pairs = model.family.reads_pairs
    tokenizer = SentenceTokenizer(data.tokenizer) if pairs else open_tokenizer(data.tokenizer)
    between = b"\n\n" if pairs else b"\n"  # each file is a document of its own
    return prepare(data.files, tokenizer, Path(data.cache), data.held_out, accept, between)


def make_model(config: Config) -> LayeredModel:
    model = config.model
    builder = model.family.builder
    if builder is None:
        return load_layers(model.layers, model.options, config.train.seed)
    layered: LayeredModel = function_at(builder)(
        vocab_size=vocabulary_of(config),
        num_layers=model.num_layers,
        width=model.width,
        num_heads=model.num_heads,
        context=model.context,
        dropout=model.dropout,
        tied=model.tie_embeddings,
    )
    return layered


def layer_costs(
    config: Config, probed: tuple[LayerCost, ...], layer_s: tuple[float, ...] | None
) -> LayerCosts:
    """Measured seconds where there are; else by formula for a transformer, by count for a user's
    model.
    """
    if layer_s is None and config.model.is_transformer:
        return transformer_costs(config)
    forward = tuple(cost.forward_flops / (config.predict.gflops * 1e9) for cost in probed)
    if layer_s is not None:
        forward = tuple(seconds / 3 for seconds in layer_s)
    wire = config.pipeline.wire
    activation = tuple(sum(_wire_bytes(wire, spec) for spec in cost.outputs) for cost in probed)
    gradient = tuple(
        sum(_wire_bytes(wire, s) for s in cost.outputs if s.dtype.is_floating_point)
        for cost in probed
    )
    shares = config.model.is_transformer and config.model.tie_embeddings
    tied = vocabulary_of(config) * config.model.width * 4 if shares else 0  # a gradient, in fp32
    core = tuple(
        s * cost.core_flops / (cost.forward_flops or 1)
        for s, cost in zip(forward, probed, strict=True)
    )
    parameters = tuple(cost.parameter_bytes for cost in probed)
    memory = layers_memory(config) if config.model.is_transformer else probed_layers(config, probed)
    backward = tuple(2 * s for s in forward)
    costs = LayerCosts(forward, backward, activation, gradient, tied, parameters, core, memory)
    if config.model.is_transformer:
        return costs
    return replace(
        costs, output_bytes=tuple(sum(spec.num_bytes for spec in cost.outputs) for cost in probed)
    )


def probed_layers(config: Config, probed: tuple[LayerCost, ...]) -> tuple[LayerMemory, ...]:
    """A user's layers: what their graphs keep is counted, working memory is taken to be as much
    again.
    """
    again = config.pipeline.recompute == "full"
    rounded = config.train.parameters != "fp32"
    smaller = 2 if rounded else 1  # parameters are counted in fp32
    inputs = (0, *(sum(spec.num_bytes for spec in cost.outputs) for cost in probed[:-1]))
    layers = (
        of_parameters(
            cost.parameter_bytes // smaller,
            largest=cost.largest_parameter_bytes // smaller,
            held_bytes=given if again else given + cost.kept_bytes,
            deferred_bytes=given + cost.kept_bytes,
            forward_bytes=cost.kept_bytes,
            backward_bytes=cost.kept_bytes * (2 if again else 1),
            input_bytes=cost.kept_bytes * (2 if again else 1),
            weight_bytes=cost.largest_parameter_bytes,
        )
        for cost, given in zip(probed, inputs, strict=True)
    )
    return tuple(map(with_masters, layers)) if rounded else tuple(layers)


def measure_layers(run_plan: RunPlan) -> tuple[float, ...]:
    """Seconds that forward and backward of each layer take on this machine, for one micro-batch."""
    config = run_plan.config
    corpus = run_plan.corpus
    assert corpus is not None
    assert run_plan.model is not None
    batch = feed_of(config, corpus, 0, config.data_parallel.replicas).training(0)
    return measure(
        run_plan.model,
        batch.inputs[0],
        batch.targets[0],
        config.train.seed,
        device=config.node.device,
        precision=config.train.precision,
        parameters=config.train.parameters,
    )


def _inputs(config: Config) -> tuple[TensorSpec, ...]:
    """What the first layer reads: tokens, and for BERT their types and the sequences' lengths
    (`pairs.py`).
    """
    tokens = TensorSpec((config.microbatch_size, config.model.context), torch.int64)
    lengths = TensorSpec((config.microbatch_size,), torch.int32)
    return (tokens, tokens, lengths) if config.model.family.reads_pairs else (tokens,)


def _wire_bytes(wire: str, spec: TensorSpec) -> int:
    if not spec.dtype.is_floating_point:
        return spec.num_bytes
    return wire_bytes(wire, spec.num_bytes // spec.dtype.itemsize, spec.dtype.itemsize)


_SEQUENCE = 1  # the dimension of an activation that sequence parallelism splits


def boundaries(
    config: Config, whole: Sequence[tuple[TensorSpec, ...]]
) -> tuple[tuple[TensorSpec, ...], ...]:
    """What one rank sends from stage to stage, of what the model's layers give on."""
    chosen = config.tensor_parallel
    if chosen.size == 1 or not (chosen.sequence_parallel or chosen.scatter_gather):
        return tuple(whole)
    part = _positions_of if chosen.sequence_parallel else part_spec
    return tuple(tuple(part(spec, chosen.size) for spec in specs) for specs in whole)


def _positions_of(spec: TensorSpec, size: int) -> TensorSpec:
    if not spec.dtype.is_floating_point:
        return spec
    shape = list(spec.shape)
    shape[_SEQUENCE] //= size
    return spec._replace(shape=tuple(shape))
