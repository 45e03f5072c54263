"""The configured GPT or BERT on megatron-core (Shoeybi et al. 2019, Narayanan et al. 2021), in all
its parallel ways.

    python -m dpipe.baselines.megatron CONFIG -o KEY=VALUE ...  one rank, placed as `dpipe train` is

Written against megatron-core 0.16.1, with its own layers: no Transformer Engine, no Apex. It starts
from our weights, reads our batches and has our optimizer's settings, so that its losses are ours
but for rounding. Ranks stand where ours do; blocks are shared out evenly over the stages, as
Megatron does. With tensor parallelism it is at its best where the environment says
CUDA_DEVICE_MAX_CONNECTIONS=1 (scripts/sweep.py says it).

Its BERT is ours: norms in front, one behind the last block, a transform with a norm before the
logits, a pooler with a tanh beside it. It masks what lies behind a sequence's end for the positions
there as well, of which nothing is read.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dpipe.baselines.foreign import Step, command, refuse
from dpipe.baselines.megatron_weights import BERT, GPT, load, parameters_by_layer
from dpipe.config.load import Config
from dpipe.config.run import TrainConfig
from dpipe.data.batch import Batch
from dpipe.data.feed import feed_of
from dpipe.dataparallel.kinds import KINDS, names_where
from dpipe.engine.update import GROWTH_INTERVAL, INITIAL_LOSS_SCALE, learning_rate
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import RunPlan, draft
from dpipe.ranks import ParallelRanks
from dpipe.schedule.generate import INTERLEAVED, ONE_F_ONE_B
from dpipe.stage.bert import IGNORED, NUM_TYPES
from dpipe.stage.model import materialise
from dpipe.streams import upload
from dpipe.tokenizer.tokenizer import vocabulary_of
from dpipe.wire.format import FORMATS

VERSION = "0.16.1"  # whose interfaces this file uses; they change with each release
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_config(config: Config) -> None:
    """Raises `ConfigError` for what this engine is not run on here, and where megatron-core is
    missing.
    """
    pipeline = config.pipeline
    agreement = config.data_parallel
    reasons = {
        'model.layers must be "gpt" or "bert"': not config.model.is_transformer,
        "model.dropout must be 0, its random numbers are others": config.model.dropout > 0,
        "train.precision and train.parameters must be the same, it has no autocast": (
            config.train.precision != config.train.parameters
        ),
        "train.compile must be false": config.train.compile,
        'train.optimizer must be "adamw"': config.train.optimizer != "adamw",
        'pipeline.schedule must be "1f1b" or "interleaved"': pipeline.schedule
        not in (ONE_F_ONE_B.name, INTERLEAVED.name),
        "pipeline.split must be left out, and model.num_layers divisible by pipeline.stages": (
            pipeline.split != "estimated" or config.model.num_layers % pipeline.stages > 0
        ),
        'pipeline.wire must be "none"': pipeline.may_round,
        "pipeline.sequence_slices must be 1": pipeline.sequence_slices > 1,
        "tensor_parallel.sequence_parallel must be false, its own layers need Apex for it": (
            config.tensor_parallel.sequence_parallel
        ),
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
        'node.device must be "cuda"': not config.node.device.startswith("cuda"),
    }
    refuse("Megatron", reasons)
    part_of_megatron("")


def part_of_megatron(name: str) -> Any:
    """`megatron.core` or a module below it. Raises `ConfigError` saying what to install where it is
    missing.
    """
    try:
        return importlib.import_module(f"megatron.core.{name}".rstrip("."))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ConfigError(
            f"the Megatron baseline needs megatron-core, which is not installed ({error}): "
            f"pip install megatron-core=={VERSION}"
        ) from None


def make_step(config: Config, rank: int) -> Step:
    """One rank's part of a step; every rank knows its loss."""
    run_plan = draft(config)
    here = config.ranks_of(rank)
    device = torch.device(config.node.device)
    assert run_plan.corpus is not None
    _place(config, here, device)
    settings = transformer_config(config, device)
    chunks = [
        _chunk(run_plan, settings, here, index, device)
        for index in range(config.pipeline.stages_per_rank)
    ]
    optimizer = _optimizer(config, chunks)
    settings.grad_scale_func = optimizer.scale_loss
    settings.finalize_model_grads_func = part_of_megatron("distributed").finalize_model_grads
    # Megatron chooses by its own state: 1F1B, the interleaved one, or none on one rank.
    run = part_of_megatron("pipeline_parallel").get_forward_backward_func()
    feed = feed_of(config, run_plan.corpus, here.dp_rank, here.dp_size)

    def step(number: int) -> float:
        batch = feed.training(number)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        # One iterator a chunk: each goes through all micro-batches at its own pace.
        feeds = [_microbatches(batch, device) for _ in chunks]
        reduced = run(
            forward_step_func=_forward_bert if config.model.layers == "bert" else _forward_gpt,
            data_iterator=feeds if len(chunks) > 1 else feeds[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=config.train.num_microbatches,
            seq_length=config.model.context,
            micro_batch_size=config.microbatch_size,
            forward_only=False,
        )
        _update(optimizer, config.train, number)
        return _mean_loss([each["loss"] for each in reduced], here, device)

    return step


def _place(config: Config, here: ParallelRanks, device: torch.device) -> None:
    """Megatron's groups over the default group's ranks, in our order: of a stage, the stages, the
    replicas.
    """
    per_rank = config.pipeline.stages_per_rank
    part_of_megatron("parallel_state").initialize_model_parallel(
        tensor_model_parallel_size=here.tp_size,
        pipeline_model_parallel_size=here.pp_size,
        virtual_pipeline_model_parallel_size=per_rank if per_rank > 1 else None,
        order="tp-cp-ep-pp-dp",
        create_gloo_process_groups=False,
    )
    if device.type == "cuda":  # its attention forks this generator, dropout or not
        part_of_megatron("tensor_parallel").model_parallel_cuda_manual_seed(config.train.seed)


def transformer_config(config: Config, device: torch.device) -> Any:
    """The configuration in Megatron's words.

    Parameters are initialised, although all are loaded: else those that are split are not marked
    so, and the norm that clips counts one part of each.
    """
    model = config.model
    pipeline = config.pipeline
    dtype = _DTYPES[config.train.parameters]
    per_rank = pipeline.stages_per_rank
    again: dict[str, Any] = {
        "recompute_granularity": None if pipeline.recompute == "none" else pipeline.recompute
    }
    if pipeline.recompute == "full":
        again |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return part_of_megatron("transformer").TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.width,
        num_attention_heads=model.num_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_parallel.size,
        pipeline_model_parallel_size=pipeline.ranks,
        virtual_pipeline_model_parallel_size=per_rank if per_rank > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        # gloo would still be sending what is freed
        deallocate_pipeline_outputs=device.type == "cuda",
        # in batches two ranks would mistake what each sends both forward and backward
        overlap_p2p_comm=per_rank > 1,
        batch_p2p_comm=per_rank == 1,
        use_cpu_initialization=device.type == "cpu",
        **again,
    )


def _chunk(
    run_plan: RunPlan,
    settings: Any,
    here: ParallelRanks,
    index: int,
    device: torch.device,
) -> Any:
    """The model chunk `index` of this rank, with our parameters, wrapped for half precision and for
    its replicas.
    """
    config = run_plan.config
    bare = _bare_model(config, settings, here, index)
    model = bare.to(device)
    assert run_plan.model is not None
    names = BERT if config.model.layers == "bert" else GPT
    seed = config.train.seed
    by_layer = parameters_by_layer(model, names, config.model.num_layers)
    for layer, theirs in by_layer:
        ours = materialise(run_plan.model, layer, seed, "cpu")
        load(
            theirs,
            ours,
            config.model.num_heads,
            here.tp_rank,
            here.tp_size,
        )
    if config.train.parameters != "fp32":
        model = part_of_megatron("transformer.module").Float16Module(settings, model)
    distributed = part_of_megatron("distributed")
    shares = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,  # as ours: masters and gradients are fp32
        use_distributed_optimizer=KINDS[config.data_parallel.kind].shards_optimizer,
    )
    return distributed.DistributedDataParallel(settings, shares, model)


def _bare_model(
    config: Config,
    settings: Any,
    here: ParallelRanks,
    index: int,
) -> Any:
    per_rank = config.pipeline.stages_per_rank
    stage = index * here.pp_size + here.pp_rank  # interleaved: chunk 1 begins behind the last rank
    options: dict[str, Any] = {
        "config": settings,
        "vocab_size": vocabulary_of(config),
        "max_sequence_length": config.model.context,
        "pre_process": stage == 0,
        "post_process": stage == config.pipeline.stages - 1,
        "share_embeddings_and_output_weights": config.model.tie_embeddings,
        "position_embedding_type": "learned_absolute",
        "vp_stage": index if per_rank > 1 else None,
    }
    # Its local layers: those of Transformer Engine need that library.
    if config.model.layers == "bert":
        layer = part_of_megatron("models.bert.bert_layer_specs").bert_layer_local_spec
        kind = part_of_megatron("models.bert.bert_model").BertModel
        return kind(num_tokentypes=NUM_TYPES, transformer_layer_spec=layer, **options)
    layer = part_of_megatron("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    return part_of_megatron("models.gpt").GPTModel(transformer_layer_spec=layer, **options)


def _optimizer(config: Config, chunks: list[Any]) -> Any:
    train = config.train
    optimizers = part_of_megatron("optimizer")
    settings = optimizers.OptimizerConfig(
        optimizer="adam",
        lr=train.learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        clip_grad=train.clip_norm,
        params_dtype=_DTYPES[train.parameters],
        bf16=train.parameters == "bf16",
        fp16=train.parameters == "fp16",
        initial_loss_scale=INITIAL_LOSS_SCALE,
        loss_scale_window=GROWTH_INTERVAL,
        hysteresis=1,  # one overflow halves the scale, as with us
        use_distributed_optimizer=KINDS[config.data_parallel.kind].shards_optimizer,
    )
    return optimizers.get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False)


def _update(optimizer: Any, train: TrainConfig, number: int) -> None:
    """What Megatron's own scheduler would set; it decays what has one dimension as little as we
    do.
    """
    for group in optimizer.param_groups:
        rate = learning_rate(train, number)
        group["lr"] = rate * group["lr_mult"]
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
    optimizer.step()


Tensors = tuple[torch.Tensor, ...]
Feed = Iterator[tuple[Tensors, torch.Tensor]]  # of micro-batches: inputs, targets
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]  # to go back from, and to report


def _microbatches(batch: Batch, device: torch.device) -> Feed:
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        here = tuple(upload(tensor, device) for tensor in inputs)
        yield here, upload(targets, device)


def _forward_gpt(feed: Feed, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """As `get_forward_backward_func` wants it: the output of a chunk, and what makes the loss of
    the last one's.
    """
    (tokens,), targets = next(feed)
    context = tokens.shape[1]
    row = torch.arange(context, device=tokens.device)
    # The same for all sequences; expanded, it takes the memory of one.
    positions = row.expand_as(tokens)
    output = model(tokens, positions, None, labels=targets)
    return output, _mean_of_words


def _mean_of_words(losses: torch.Tensor) -> Loss:
    """Of the loss of each token [B, T]."""
    return _loss(losses.float().mean())


def _forward_bert(
    feed: Feed, model: Any
) -> tuple[torch.Tensor | Tensors, Callable[[Tensors], Loss]]:
    """As `_forward_gpt`; the last chunk gives the loss of each token [B, T], and logits of the
    pairs [B, 2].
    """
    (tokens, types, lengths), targets = next(feed)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    within = positions < lengths[:, None]
    asked = targets != IGNORED
    asked[:, 0] = False  # there the target is the pair's
    words = targets.where(asked, 0)
    pairs = targets[:, 0]
    output = model(tokens, within, tokentype_ids=types, lm_labels=words)
    loss = partial(_masked_words_and_pairs, asked, pairs)
    return output, loss


def _masked_words_and_pairs(
    asked: torch.Tensor,
    pairs: torch.Tensor,
    output: Tensors,
) -> Loss:
    """As `stage.bert.masked_and_pair_loss`, of losses."""
    losses, judged = (tensor.float() for tensor in output)
    # Multiplied, not picked out: the host would wait to hear how many there are.
    words = (losses * asked).sum() / asked.sum()
    return _loss(words + F.cross_entropy(judged, pairs))


def _loss(loss: torch.Tensor) -> Loss:
    return loss, {"loss": loss.detach().clone()}  # Megatron scales the first in place


def _mean_loss(
    losses: list[torch.Tensor],
    here: ParallelRanks,
    device: torch.device,
) -> float:
    """Over micro-batches and replicas. All ranks of a last stage know the same, and count once."""
    total = torch.zeros((), device=device)
    if losses:
        total = torch.stack(losses).mean()
    total /= here.tp_size * here.dp_size
    dist.all_reduce(total)
    return float(total)


main = command(__doc__, check_config, make_step)

if __name__ == "__main__":
    main()
