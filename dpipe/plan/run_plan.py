"""What a run is, before any process talks to another: model, text, cut and schedule. It is the same
on every rank.

Whatever is wrong with the configuration is found here, before anything is written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from dpipe.choices import function_at
from dpipe.config.load import Config
from dpipe.data.bert_data import SentencePairs, SentenceTokenizer
from dpipe.data.corpus import Corpus, prepare
from dpipe.data.feed import Text, feed_of
from dpipe.data.masked import MaskedText
from dpipe.data.samples import Samples, check_samples, prepare_samples
from dpipe.data.stream import SampleStream, open_stream
from dpipe.errors import ConfigError, DataError
from dpipe.hub.extra import hub_function
from dpipe.memory.formulas import transformer_stages
from dpipe.network.link import Network
from dpipe.optimizers.kinds import check_library
from dpipe.plan.costs import LayerCosts, transformer_costs
from dpipe.plan.forecast import Forecast, ScheduleChoice, choose_schedule, forecast
from dpipe.plan.recurring import DeltaLinks, RecurringSequences
from dpipe.plan.tensor_parallel import Times
from dpipe.probe.layer_costs import LayerCost, measure, on_meta, probe
from dpipe.probe.measured import StageRunner, measured_stages
from dpipe.stage.model import LayeredModel, load_layers
from dpipe.stage.scatter import part_spec
from dpipe.store.checkpoint import check_url
from dpipe.store.run_folder import checkpoint_url, revision_of
from dpipe.tokenizer.tokenizer import tokenizer_of, vocabulary_of, words_of
from dpipe.transport.kinds import TRANSPORTS
from dpipe.wire.format import MessageSize
from dpipe.wire.spec import TensorSpec

_FLOAT_BYTES = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RunPlan:
    """The configuration, and what follows from it."""

    config: Config
    model: LayeredModel | None  # None for replay
    corpus: Text | None  # None for replay, and where it was not read
    # [s]: what a rank of stage s sends to the next, in replica 0
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    forecast: Forecast
    probed: tuple[LayerCost, ...] = ()  # none for replay

    @property
    def parameter_bytes(self) -> int:
        """Of the whole model, in fp32; 0 for replay."""
        return sum(cost.parameter_bytes for cost in self.probed)

    @property
    def last_layer(self) -> int | None:
        """The number of the model's last layer; None for replay."""
        return None if self.model is None else len(self.model.layers) - 1

    @property
    def checkpoint_url(self) -> str | None:
        """None for replay: there is nothing to keep."""
        return None if self.model is None else checkpoint_url(self.config)

    def cut_of(self, replica: int) -> tuple[int, ...]:
        """Layers a stage: replicas may be cut differently."""
        splits = self.config.pipeline.splits
        return splits[replica] if splits else self.forecast.split

    def layers_of(self, stage: int, replica: int = 0) -> range:
        """The layers of the model that make a stage."""
        cut = self.cut_of(replica)
        start = sum(cut[:stage])
        return range(start, start + cut[stage])

    def boundaries_of(self, replica: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """[s]: what a rank of stage s sends to the next."""
        if not self.config.pipeline.splits:
            return self.boundaries
        return _sent(self.config, self.probed, self.cut_of(replica))

    @property
    def sequences(self) -> RecurringSequences | None:
        """What links with "+delta" go by; None where there are none, or no text was read."""
        if not (self.forecast.formats.by_sample and isinstance(self.corpus, Samples)):
            return None
        return RecurringSequences(self.corpus, self.config.train.seed, self.config.model.context)

    def delta_links(self, replica: int) -> DeltaLinks:
        sequences = self.sequences
        return DeltaLinks(
            self.forecast.formats,
            self.forecast.schedule.rank_of_stage,
            self.boundaries_of(replica),
            self.config.microbatch_size,
            0 if sequences is None else sequences.count,
        )


def draft(
    config: Config,
    *,
    layer_s: Times | None = None,
    probed: tuple[LayerCost, ...] | None = None,
    network: Network | None = None,
    choose: ScheduleChoice = choose_schedule,
    predicts_memory: bool = True,
    reads_text: bool = True,
) -> RunPlan:
    """Build the model without memory, cut and schedule its layers, read the text. No prediction
    depends on the text: without `reads_text` it and its tokenizer need not be there.

    `layer_s` are measured seconds of each layer, `probed` their costs if they are known already.
    Without `predicts_memory` what a user's own model
    holds is measured only where `pipeline.memory_gb` limits it: that takes as long as some passes
    over it.
    """
    if not config.model.family.computes:
        return _replay_plan(config, forecast(config, None, network, choose))
    # What takes no time comes first: an error is there before seconds of counting and reading.
    _check_surroundings(config)
    config = pinned(config)
    model = make_model(config)
    stored = DTYPES[config.train.parameters]
    if probed is None:
        probed = probe(model, first_inputs(config), config.train.seed, stored)
    check_recompute(config, probed)
    layers = layer_costs(config, model, probed, layer_s)
    if config.model.is_transformer:
        layers = replace(layers, memory_of=partial(transformer_stages, config))
    elif predicts_memory or config.pipeline.memory_gb is not None:
        runner = stage_runner(config, model)
        layers = replace(layers, memory_of=partial(measured_stages, runner, probed))
    predicted = forecast(config, layers, network, choose)
    corpus = None
    if reads_text:
        corpus = read_text(config)  # last, because the first time it writes a cache
        config = _with_steps(config, corpus)
    sent = _sent(config, probed, predicted.split)
    return _with_room(RunPlan(config, model, corpus, sent, predicted, probed))


def _with_room(run_plan: RunPlan) -> RunPlan:
    """Raises `ConfigError` where what links keep of samples would be more than it may."""
    config = run_plan.config
    if run_plan.sequences is not None:
        for replica in range(config.data_parallel.replicas):
            run_plan.delta_links(replica).check_room(config.pipeline.delta_cache_gb)
    return run_plan


def _with_steps(config: Config, corpus: Text) -> Config:
    """With as many steps as the epochs take, if those are set."""
    train = config.train
    if train.epochs is None:
        return config
    context = config.model.context
    if isinstance(corpus, Samples):
        sequences = corpus.sequences_in(train.epochs, train.seed, context)
    else:
        assert not isinstance(corpus, SampleStream), "checks.py refuses epochs of a stream"
        tokens = train.epochs * corpus.num_train_tokens
        sequences = round(tokens / context)
    steps = math.ceil(sequences / train.batch_size)
    return config.with_(train__steps=max(1, steps))


def pinned(config: Config) -> Config:
    """With the commit of a model on the hub as its revision: a branch may move between the
    downloads of two ranks, or after the run.
    """
    model = config.model
    if model.hf is None:
        return config
    commit = hub_function("model:commit_of")(model.hf, revision_of(config))
    return config if commit is None else config.with_(model__revision=commit)


def _sent(
    config: Config, probed: Sequence[LayerCost], cut: Sequence[int]
) -> tuple[tuple[TensorSpec, ...], ...]:
    ends = [end - 1 for end in accumulate(cut)][:-1]
    return boundaries(config, [probed[end].outputs for end in ends])


def _replay_plan(config: Config, predicted: Forecast) -> RunPlan:
    message = TensorSpec((config.replay.message_bytes // _FLOAT_BYTES,), torch.float32)
    messages = ((message,),) * (config.pipeline.stages - 1)
    return RunPlan(config, None, None, messages, predicted)


def _check_surroundings(config: Config) -> None:
    """The device, the place for checkpoints, the transport and the optimizer's library. Raises what
    they raise.
    """
    check_device(config.node.device)
    check_library(config.train.optimizer)
    if config.run.checkpoint_url is not None:
        check_url(config.run.checkpoint_url)
    TRANSPORTS[config.transport.kind].check()


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
    """ "cuda" is shared out: the processes of a machine take its GPUs in turns. Other devices stay
    as they are.
    """
    if device != "cuda":
        return device
    # With more processes than GPUs some share one.
    count = torch.cuda.device_count()
    return f"cuda:{local_rank % count}" if count else device


def check_recompute(config: Config, probed: tuple[LayerCost, ...]) -> None:
    """Raises `ConfigError` for selective recomputation of a model that marks no attention core."""
    if config.pipeline.recompute != "selective":
        return
    if not any(cost.attention_cores for cost in probed):
        raise ConfigError(
            'pipeline.recompute = "selective" runs attention cores again, but no layer of '
            f"{config.model.layers} has one: set attention_core = True on the module between q, k, "
            'v and the output, or use "none" or "full"'
        )


def read_text(config: Config) -> Text:
    """Tokens of the configured files. Raises `DataError` if they cannot make one batch."""
    model = config.model
    data = config.data
    if data.has_samples:
        return _read_samples(config)

    if model.hf is not None and hub_function("model:is_encoder")(config):
        return _read_masked(config)

    def accept(corpus: Corpus) -> None:
        if model.vocab_size is not None and corpus.vocab_size > model.vocab_size:
            raise DataError(
                f"the tokenizer {data.tokenizer} has {corpus.vocab_size} entries, but "
                f"model.vocab_size is {model.vocab_size}; leave model.vocab_size out, or raise it"
            )
        need_held_out = config.train.eval_every is not None
        if isinstance(tokenizer, SentenceTokenizer):
            SentencePairs(corpus, tokenizer, model.context).check(need_held_out=need_held_out)
        else:
            corpus.check_length(model.context, need_held_out=need_held_out)

    pairs = model.family.reads_pairs
    tokenizer = SentenceTokenizer(data.tokenizer) if pairs else tokenizer_of(config)
    between = b"\n\n" if pairs else b"\n"  # each file is a document of its own
    return prepare(data.files, tokenizer, Path(data.cache), data.held_out, accept, between)


def _read_masked(config: Config) -> MaskedText:
    """A text for an encoder, which finds masked words of it."""
    data = config.data
    words = words_of(config)
    frame = words.frame
    need_held_out = config.train.eval_every is not None

    def accept(corpus: Corpus) -> None:
        text = MaskedText(corpus, frame)
        text.check(config.model.context, need_held_out=need_held_out)

    corpus = prepare(data.files, words, Path(data.cache), data.held_out, accept)
    return MaskedText(corpus, frame)


def _read_samples(config: Config) -> Samples | SampleStream:
    data = config.data
    context = config.model.context
    words = words_of(config)
    need_held_out = config.train.eval_every is not None
    if data.streaming:
        stream = open_stream(data, words, context, config.train.seed)
        stream.check(need_held_out=need_held_out)
        return stream
    samples = prepare_samples(data, words, context)
    check_samples(samples, need_held_out=need_held_out)
    return samples


def make_model(config: Config) -> LayeredModel:
    """Raises `ConfigError` for a model that cannot be made as configured."""
    model = config.model
    if model.hf is not None:
        published: LayeredModel = hub_function("model:layered_model")(config)
        return published
    builder = model.family.builder
    if builder is None:
        return load_layers(model.layers, model.options, config.train.seed)
    bottlenecks = {}
    if model.bottleneck_width is not None:
        bottlenecks = {
            "bottleneck_width": model.bottleneck_width,
            "bottleneck_every": model.bottleneck_every,
        }
    layered: LayeredModel = function_at(builder)(
        vocab_size=vocabulary_of(config),
        num_layers=model.num_layers,
        width=model.width,
        num_heads=model.num_heads,
        context=model.context,
        dropout=model.dropout,
        tied=model.tie_embeddings,
        **bottlenecks,
    )
    return layered


def tied_gradient_bytes(config: Config, model: LayeredModel) -> int:
    """Of the gradient that the first and the last layer exchange where they share a weight."""
    if model.tied is None:
        return 0
    first = on_meta(model, 0, config.train.seed)
    return first.get_parameter(model.tied[0]).numel() * _FLOAT_BYTES


def layer_costs(
    config: Config,
    model: LayeredModel,
    probed: tuple[LayerCost, ...],
    layer_s: Times | None,
) -> LayerCosts:
    """Measured seconds where there are; otherwise by formula for a transformer, and counted for a
    user's model.
    """
    if layer_s is None and config.model.is_transformer:
        return transformer_costs(config)
    if layer_s is None:
        flops_a_second = config.predict.gflops * 1e9
        forward_s = tuple(cost.forward_flops / flops_a_second for cost in probed)
    else:
        forward_s = tuple(seconds / 3 for seconds in layer_s)  # backward takes two thirds
    core_s = []
    for seconds, cost in zip(forward_s, probed, strict=True):
        # By its share of the operations: the cores are not timed apart from their layer.
        core_s.append(seconds * cost.core_flops / (cost.forward_flops or 1))
    return LayerCosts(
        forward_s=forward_s,
        backward_s=tuple(2 * seconds for seconds in forward_s),
        messages=tuple(_message(cost.outputs) for cost in probed),
        tied_bytes=tied_gradient_bytes(config, model),
        parameter_bytes=tuple(cost.parameter_bytes for cost in probed),
        core_s=tuple(core_s),
        frozen=model.frozen,
    )


def stage_runner(config: Config, model: LayeredModel) -> StageRunner:
    """How the stages of a user's own model compute."""
    inputs = first_inputs(config)
    targets = inputs[0]  # the token behind each
    if config.data.has_samples:
        size, length = targets.shape
        targets = targets._replace(shape=(size, length + 1))  # and their number (`hub/model.py`)
    return StageRunner(
        model,
        inputs,
        targets=targets,
        seed=config.train.seed,
        recompute=config.pipeline.recompute,
        precision=config.train.precision,
        stored=DTYPES[config.train.parameters],
        device=config.node.device,
        frozen=model.frozen,
    )


def measure_layers(run_plan: RunPlan) -> Times:
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


def first_inputs(config: Config) -> tuple[TensorSpec, ...]:
    """What the first layer reads: tokens; of pairs also their types and the sequences' lengths
    (`data/bert_data.py`), of samples the tokens' positions (`data/samples.py`).
    """
    tokens = TensorSpec((config.microbatch_size, config.model.context), torch.int64)
    if config.data.has_samples:
        return tokens, tokens._replace(dtype=torch.int32)
    if not config.model.family.reads_pairs:
        return (tokens,)
    lengths = TensorSpec((config.microbatch_size,), torch.int32)
    return tokens, tokens, lengths


def _message(specs: Sequence[TensorSpec]) -> MessageSize:
    tensors = []
    other_bytes = 0
    for spec in specs:
        if spec.dtype.is_floating_point:
            tensors.append((spec.shape, spec.dtype.itemsize))
        else:
            other_bytes += spec.num_bytes
    return MessageSize(tuple(tensors), other_bytes)


_SEQUENCE = 1  # the dimension of an activation that sequence parallelism splits


def boundaries(
    config: Config, whole: Sequence[tuple[TensorSpec, ...]]
) -> tuple[tuple[TensorSpec, ...], ...]:
    """What one rank sends from stage to stage, given what the stages' last layers return."""
    group = config.tensor_parallel
    sends_part = group.sequence_parallel or group.scatter_gather
    if group.size == 1 or not sends_part:
        return tuple(whole)
    part = _positions_of if group.sequence_parallel else part_spec
    return tuple(tuple(part(spec, group.size) for spec in specs) for specs in whole)


def _positions_of(spec: TensorSpec, size: int) -> TensorSpec:
    if not spec.dtype.is_floating_point:
        return spec
    shape = list(spec.shape)
    shape[_SEQUENCE] //= size
    return spec._replace(shape=tuple(shape))
