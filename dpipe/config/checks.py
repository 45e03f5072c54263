"""What spans sections: each function takes the sections that it compares, and raises `ValueError`
naming the keys that do not go together and what to change.
"""

from dpipe.config.model import AdapterConfig, DataConfig, ModelConfig, ReplayConfig
from dpipe.config.parallel import (
    DataParallelConfig,
    PipelineConfig,
    TensorParallelConfig,
    elementwise_formats,
)
from dpipe.config.run import NodeConfig, RunConfig, TrainConfig, TransportConfig
from dpipe.dataparallel.kinds import names_where
from dpipe.optimizers.kinds import OPTIMIZERS
from dpipe.optimizers.kinds import names_where as names_of_optimizers
from dpipe.schedule.generate import may_split_backward, names_that_keep_backward_whole
from dpipe.schedule.size import too_large, too_many_messages
from dpipe.transport.kinds import TRANSPORTS
from dpipe.wire.format import FORMATS


def check_replay(
    model: ModelConfig,
    replay: ReplayConfig,
    pipeline: PipelineConfig,
    tensor_parallel: TensorParallelConfig,
    node: NodeConfig,
) -> None:
    if replay.exchanges and tensor_parallel.size == 1:
        raise ValueError(
            "replay.exchanges are among the ranks of a tensor-parallel group: set "
            "tensor_parallel.size, or drop them"
        )
    if model.family.computes:
        return
    if pipeline.split != "estimated" or pipeline.splits:
        raise ValueError("pipeline.split is of layers, and a replayed stage has none: leave it out")
    if node.device != "cpu":
        raise ValueError(
            f'model.layers "{model.layers}" computes nothing and moves host memory: set '
            'node.device = "cpu"'
        )


def check_published(model: ModelConfig, adapter: AdapterConfig, data: DataConfig) -> None:
    """What only a model of the hub has: an adapter, a tokenizer of its own, samples."""
    if model.hf is None:
        if adapter.kind != "none":
            raise ValueError(
                f'adapter.kind "{adapter.kind}" adapts model.hf, which is not set; name a model '
                "there, or leave [adapter] out"
            )
        if data.has_samples:
            raise ValueError(
                f'data.format "{data.format}" needs the tokenizer of model.hf, which is not set; '
                'name a model there, or take data.format = "text"'
            )
    elif data.tokenizer != "bytes":
        raise ValueError("model.hf has a tokenizer of its own: leave data.tokenizer out")


def check_optimizer(
    train: TrainConfig,
    pipeline: PipelineConfig,
    tensor_parallel: TensorParallelConfig,
    data_parallel: DataParallelConfig,
) -> None:
    """An optimizer steps what a rank holds, and must find there whatever it looks at together."""
    kind = OPTIMIZERS[train.optimizer]
    replicas = data_parallel.active_kind
    instead = None
    if kind.couples == "stages" and pipeline.stages > 1:
        instead = f"pipeline.stages {pipeline.stages}: it couples parameters of different stages"
    elif kind.couples != "nothing" and tensor_parallel.size > 1:
        instead = f"tensor_parallel.size {tensor_parallel.size}: a rank has part of a matrix"
    elif kind.couples != "nothing" and replicas.shards_optimizer:
        instead = f'data_parallel.kind "{replicas.name}": a replica steps part of a matrix'
    elif replicas.has_server and not kind.on_server:
        instead = f'data_parallel.kind "{replicas.name}", whose server has a step of its own'
    if instead is not None:
        free = names_of_optimizers(lambda each: each.couples == "nothing" and each.on_server)
        raise ValueError(
            f'train.optimizer "{kind.name}" does not go with {instead}; take {free}, or leave the '
            "other out"
        )


def check_compile(train: TrainConfig, pipeline: PipelineConfig) -> None:
    if train.compile and may_split_backward(pipeline.schedule):
        raise ValueError(
            f'with train.compile pipeline.schedule must not be "{pipeline.schedule}": a compiled '
            f"layer makes both its gradients together; take {names_that_keep_backward_whole()}"
        )


def check_slices(
    model: ModelConfig,
    replay: ReplayConfig,
    pipeline: PipelineConfig,
    tensor_parallel: TensorParallelConfig,
    train: TrainConfig,
) -> None:
    """What may be cut into slices of a sequence: each must give what it would give in the whole."""
    number = pipeline.sequence_slices
    if number == 1:
        return
    needed = None
    if not model.family.slices_sequences:
        needed = f'model.layers "gpt", not "{model.layers}", whose tokens might miss others'
    elif model.family.computes and model.context % number:
        needed = f"model.context to be a multiple of it, not {model.context}"
    elif not model.family.computes and replay.message_bytes % (4 * number):
        needed = f"replay.message_bytes to be a multiple of {4 * number}"
    elif model.dropout:
        needed = "model.dropout 0: what is dropped would differ from that of whole sequences"
    elif tensor_parallel.size > 1:
        needed = "tensor_parallel.size 1"
    elif train.compile:
        needed = "train.compile = false: what a slice reads changes from one to the next"
    if needed is not None:
        raise ValueError(f"pipeline.sequence_slices {number} needs {needed}; or leave it out")


def check_versions(
    pipeline: PipelineConfig,
    train: TrainConfig,
    data_parallel: DataParallelConfig,
    tensor_parallel: TensorParallelConfig,
) -> None:
    """What steps that overlap go with: each rank then has gradients of two steps."""
    if pipeline.num_versions == 1:
        return
    replicas = data_parallel.active_kind
    needed = None
    if replicas.has_server or replicas.has_inner_steps or replicas.shards_optimizer:
        needed = f'data_parallel.kind "all-reduce", not "{replicas.name}"'
    elif data_parallel.delay:
        needed = "data_parallel.delay = 0: its steps are a step late already"
    elif tensor_parallel.size > 1:
        needed = "tensor_parallel.size 1"
    elif train.precision == "fp16":
        needed = 'train.precision "bf16" or "fp32": the loss scale changes between steps'
    if needed is not None:
        raise ValueError(
            f'pipeline.schedule "{pipeline.schedule}" needs {needed}; or take another schedule'
        )


def check_epochs(model: ModelConfig, data: DataConfig, train: TrainConfig) -> None:
    if train.epochs is None:
        return
    if not model.family.computes or model.family.reads_pairs:
        raise ValueError(
            f'train.epochs are of rows or texts, and model.layers is "{model.layers}"; set '
            "train.steps instead"
        )
    if data.streaming:
        raise ValueError(
            "train.epochs need the number of rows, which a stream (data.streaming) does not know; "
            "set train.steps instead: after its last row it begins again"
        )


def check_sample(model: ModelConfig, run: RunConfig) -> None:
    family = model.family
    if family.computes and not family.continues_text and run.sample is not None:
        raise ValueError(
            "run.sample is for models that continue a text, and model.layers is "
            f'"{model.layers}"; leave it out'
        )


def check_splits(pipeline: PipelineConfig, data_parallel: DataParallelConfig) -> None:
    """Replicas that are cut differently exchange gradients among whoever holds a layer."""
    if not pipeline.splits:
        return
    if len(pipeline.splits) != data_parallel.replicas:
        raise ValueError(
            f"pipeline.splits is for {len(pipeline.splits)} replicas, but data_parallel.replicas "
            f"is {data_parallel.replicas}"
        )
    kind = data_parallel.active_kind
    if data_parallel.replicas > 1 and not kind.synchronous:
        choices = names_where(lambda each: each.synchronous)
        raise ValueError(
            f'pipeline.splits does not go with data_parallel.kind "{data_parallel.kind}": take '
            f"{choices}, or cut all replicas alike with pipeline.split"
        )
    if data_parallel.group != "dpipe":
        raise ValueError(
            f'pipeline.splits does not go with data_parallel.group "{data_parallel.group}", whose '
            "members are the ranks of one stage: leave it out"
        )


def with_micro_batches(train: TrainConfig, data_parallel: DataParallelConfig) -> TrainConfig:
    """Left out, they are the default or the next smaller number that divides a replica's batch."""
    stated = train.model_fields_set
    number = train.num_microbatches
    while "num_microbatches" not in stated and train.batch_size // data_parallel.replicas % number:
        number -= 1
    return TrainConfig.model_construct(stated, **{**dict(train), "num_microbatches": number})


def check_batch(train: TrainConfig, data_parallel: DataParallelConfig) -> None:
    replicas = data_parallel.replicas
    if train.batch_size % (replicas * train.num_microbatches):
        each = f" for each of data_parallel.replicas {replicas}" if replicas > 1 else ""
        raise ValueError(
            f"train.batch_size {train.batch_size} is not divisible by train.num_microbatches "
            f"{train.num_microbatches}{each}; change one of them"
        )


def check_size(
    pipeline: PipelineConfig, train: TrainConfig, data_parallel: DataParallelConfig
) -> None:
    replicas = data_parallel.replicas
    num_pieces = train.num_microbatches * pipeline.sequence_slices
    reason = too_large(pipeline.stages, num_pieces, replicas)
    if reason is not None:
        raise ValueError(
            f"{reason}; lower pipeline.stages, train.num_microbatches or data_parallel.replicas"
        )
    if data_parallel.active_kind.pattern is None:
        return
    has_server = data_parallel.active_kind.has_server
    reason = too_many_messages(pipeline.stages, replicas, 1, has_server=has_server)
    if reason is not None:
        raise ValueError(f"{reason}; lower data_parallel.replicas or pipeline.stages")


def check_servers(
    data_parallel: DataParallelConfig, pipeline: PipelineConfig, train: TrainConfig
) -> None:
    servers = 1 if data_parallel.servers == "one" else pipeline.stages
    if data_parallel.address and len(data_parallel.address) != servers:
        raise ValueError(
            f"data_parallel.address lists {len(data_parallel.address)} servers, "
            f'data_parallel.servers "{data_parallel.servers}" needs {servers}'
        )
    if data_parallel.staleness and train.waits_for_verdict:
        raise ValueError(
            "data_parallel.staleness does not go with clipping or fp16: both wait for all replicas "
            'before each step; set train.clip_norm = 0 and train.precision = "fp32" or "bf16"'
        )


def check_reject(train: TrainConfig, data_parallel: DataParallelConfig) -> None:
    """Ranks must hear of each other before the step, and an overflow of fp16 is everybody's."""
    if data_parallel.reject is None:
        return
    if train.precision == "fp16":
        raise ValueError(
            'data_parallel.reject does not go with train.precision = "fp16", where an overflow '
            'lowers the loss scale of all replicas; set train.precision = "bf16" or "fp32"'
        )
    if train.clip_norm == 0:
        raise ValueError(
            "data_parallel.reject waits before each step until all ranks have said that they are "
            "well, which they do for clipping: set train.clip_norm above 0"
        )


def check_tied_embedding(model: ModelConfig, data_parallel: DataParallelConfig) -> None:
    if model.tie_embeddings:
        check_wire_of_tied(data_parallel)


def check_wire_of_tied(data_parallel: DataParallelConfig) -> None:
    """First and last stage each hold a copy of a tied embedding, which must stay equal."""
    replicas = data_parallel.replicas
    if replicas == 1:
        return
    form = FORMATS[data_parallel.wire]
    if not form.elementwise:
        raise ValueError(
            f'data_parallel.wire "{form.name}" rounds the two copies of a tied embedding '
            f"differently; set data_parallel.wire to {elementwise_formats()}, or "
            "model.tie_embeddings = false"
        )
    # of two replicas there is only one order to add in
    if replicas > 2 and data_parallel.group == "torch" and form.lossy:
        raise ValueError(
            f'data_parallel.group "torch" rounds the sum of {replicas} replicas to '
            f"{form.name} each time that it adds, in another order for either copy of a "
            'tied embedding; set data_parallel.wire = "none", leave data_parallel.group out, or '
            "set model.tie_embeddings = false"
        )


def check_shape(transport: TransportConfig, data_parallel: DataParallelConfig) -> None:
    """Connections that are not links would be as fast as the machine, and predicted as shaped."""
    if transport.shape is None or data_parallel.replicas == 1:
        return
    if data_parallel.active_kind.has_server:
        unshaped = f'data_parallel.kind "{data_parallel.kind}"'
        direct = names_where(lambda kind: kind.pattern is not None and not kind.has_server)
        instead = f"data_parallel.kind {direct}"
    elif data_parallel.group == "torch":
        unshaped = 'data_parallel.group "torch"'
        instead = 'data_parallel.group "dpipe"'
    else:
        return
    raise ValueError(
        f"transport.shape slows the links of the ranks, and {unshaped} has connections of its "
        f"own: take {instead}, or leave transport.shape out and shape the hosts instead (netem, or "
        "a lab)"
    )


def check_tensor_parallel(
    model: ModelConfig, tensor_parallel: TensorParallelConfig, data_parallel: DataParallelConfig
) -> None:
    size = tensor_parallel.size
    if size == 1:
        return
    replays = not model.family.computes
    if replays and tensor_parallel.sequence_parallel:
        raise ValueError(
            "tensor_parallel.sequence_parallel splits a real model, not a replay: leave it out"
        )
    if not model.family.tensor_parallel:
        raise ValueError(
            f"tensor_parallel.size {size} splits the layers of dpipe's own models, and "
            f"model.layers is {model.layers!r}; leave tensor_parallel.size out, and take more "
            "pipeline.stages"
        )
    if data_parallel.staleness:
        raise ValueError(
            "data_parallel.staleness does not go with tensor_parallel.size above 1: the ranks of a "
            "tensor-parallel group would compute with parameters of different steps; set "
            "data_parallel.staleness = 0"
        )
    if not replays:
        _check_shards(model, tensor_parallel, data_parallel)


def _check_shards(
    model: ModelConfig, tensor_parallel: TensorParallelConfig, data_parallel: DataParallelConfig
) -> None:
    """What must be cut into equal shards, and what every rank of a group holds whole."""
    size = tensor_parallel.size
    form = FORMATS[data_parallel.wire]
    if data_parallel.replicas > 1 and not form.elementwise:
        raise ValueError(
            f'data_parallel.wire "{form.name}" rounds parameters that are not sharded differently '
            f"on each of tensor_parallel.size {size} ranks; set data_parallel.wire to "
            f"{elementwise_formats()}"
        )
    sharded = {"model.num_heads": model.num_heads}
    if model.vocab_size is not None:
        sharded["model.vocab_size"] = model.vocab_size
    if tensor_parallel.sequence_parallel:
        sharded["model.context"] = model.context
    for key, value in sharded.items():
        if value % size:
            raise ValueError(
                f"{key} {value} is not divisible by tensor_parallel.size {size}; the next that is: "
                f"{value + size - value % size}"
            )


def check_transport(
    transport: TransportConfig,
    model: ModelConfig,
    node: NodeConfig,
    data_parallel: DataParallelConfig,
) -> None:
    """What a transport cannot carry; some move tensors between GPUs alone."""
    kind = TRANSPORTS[transport.kind]
    replicas = data_parallel.replicas
    needed = None
    if kind.between_gpus and not node.device.startswith("cuda"):
        needed = 'node.device must be "cuda"'
    elif transport.shape is not None and not kind.can_be_shaped:
        needed = "transport.shape must not be set"
    elif kind.between_gpus and not model.family.computes:
        needed = f'model.layers must not be "{model.layers}"'
    elif transport.congestion_control != "auto" and not kind.sets_congestion_control:
        needed = "transport.congestion_control must not be set"
    elif replicas > 1 and data_parallel.group != "torch" and not kind.between_replicas:
        needed = 'data_parallel.group must be "torch"'
    if needed is not None:
        raise ValueError(
            f'with transport.kind "{kind.name}" {needed}; or take transport.kind "tcp"'
        )
