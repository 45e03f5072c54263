"""Configuration: frozen models, TOML in, `-o section.key=value` overrides, a digest out. No torch
here.

    load(path, overrides) -> Config         raises ConfigError naming the key and what is allowed
    config.digest()                         equal on every rank of a run, or the coordinator refuses the join

Everything under `[node]` belongs to one process (addresses, certificates, device) and is left out
of the digest.
"""

import difflib
import hashlib
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from dpipe.config.parallel import (
    Count,
    DataParallel,
    Fraction,
    NotNegative,
    Pipeline,
    Positive,
    Seconds,
    Section,
    TensorParallel,
    elementwise_formats,
)
from dpipe.config.presets import TRANSFORMERS, filled
from dpipe.dataparallel.kinds import names_where
from dpipe.errors import ConfigError
from dpipe.ranks import ParallelRanks
from dpipe.schedule.generate import may_split_backward, names_that_keep_backward_whole
from dpipe.wire.format import FORMATS

_MAX_NAME_BYTES = 255  # of one file or folder, on every usual file system


class Model(Section):
    """`layers` is "gpt", "bert", "replay", or "package.module:function" with `options` as its
    keyword arguments.
    """

    layers: str = "gpt"
    options: dict[str, Any] = Field(default_factory=dict)
    num_layers: Count = 4
    width: Count = 128
    num_heads: Count = 4
    context: Count = 128
    vocab_size: Count | None = None  # default: the tokenizer's
    dropout: Fraction = 0.0
    tie_embeddings: bool = False  # BERT's are tied unless this says that they are not
    preset: str | None = None  # sizes by name, of which each can still be set

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        return filled(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width {self.width} must be a multiple of model.num_heads {self.num_heads}"
            )
        module, _, function = self.layers.partition(":")
        users_own = module and function and not module.startswith(".")
        if self.layers not in (*TRANSFORMERS, "replay") and not users_own:
            known = ", ".join(f'"{name}"' for name in (*TRANSFORMERS, "replay"))
            raise ValueError(
                f'model.layers {self.layers!r} must be {known} or "package.module:function"'
            )
        return self

    @property
    def is_transformer(self) -> bool:
        """One of dpipe's own, whose costs are known by formula."""
        return self.layers in TRANSFORMERS


class Replay(Section):
    """Stage times and message sizes of the replay model: real bytes, no arithmetic. Lists give one
    value a stage.
    """

    forward_ms: NotNegative | list[NotNegative] = 10.0
    backward_ms: NotNegative | list[NotNegative] = 20.0
    input_share: Fraction = 0.5  # of the backward pass that makes the input gradient
    message_bytes: Count = 1_000_000
    parameter_bytes: Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] = (
        0  # what replicas agree on
    )
    exchanges: Annotated[int, Field(ge=0)] = (
        0  # all-reduces of a stage's ranks in each forward, and in each backward
    )
    exchange_bytes: Count = 1_000_000  # of one of them


class Data(Section):
    """Text files: globs, relative to the working folder, or "package:NAME/GLOB" inside an installed
    package.
    """

    files: tuple[str, ...] = ()
    tokenizer: str = "bytes"  # or the path of a Hugging Face tokenizer.json
    held_out: Fraction = 0.05
    cache: str = ".dpipe-cache"


class Train(Section):
    steps: Count = 100
    batch_size: Count = 16  # sequences a step, over all replicas
    num_microbatches: Count = 4  # that each replica cuts its share into
    learning_rate: Positive = 3e-4
    min_learning_rate: NotNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay: Literal["cosine", "linear", "none"] = "cosine"
    weight_decay: NotNegative = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    clip_norm: NotNegative = 1.0  # by the norm over all stages; 0 does not clip
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    parameters: Literal["fp32", "bf16", "fp16"] = "fp32"  # half: with fp32 masters, and no autocast
    compile: bool = False  # the layers, by torch.compile
    seed: int = 0
    eval_every: Count | None = None
    eval_batches: Count = 4

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.parameters not in ("fp32", self.precision):
            raise ValueError(
                f"train.parameters {self.parameters!r} computes in {self.parameters}, but "
                "train.precision is "
                f"{self.precision!r}: set both to the same, or leave train.parameters out"
            )
        return self


class Transport(Section):
    # tcp is faster; grpc passes proxies and inspection that speak HTTP/2; nccl is for GPUs with a
    # fast network
    kind: Literal["grpc", "tcp", "nccl"] = "grpc"
    connections: Count | Literal["auto"] = (
        "auto"  # TCP connections a link; auto: as many as fill the assumed network's
    )
    chunk_bytes: Annotated[int, Field(ge=4096, le=4_000_000)] = (
        1 << 20
    )  # of a message; tcp writes at most 512 KiB
    shape: str | None = None  # a network profile whose delay and rate are imitated in software
    buffer_bytes: Count = 256 << 20  # that a link may hold unclaimed before its sender is held back


class Timeouts(Section):
    """One hierarchy, in seconds: transfer < step; a rank that is silent for `heartbeat` is lost."""

    join: Seconds = 120.0
    connect: Seconds = 20.0
    transfer: Seconds = 300.0
    heartbeat: Seconds = 8.0


class Predict(Section):
    """What the simulator assumes before anything was measured."""

    network: str | None = None  # a network profile; default: transport.shape, or loopback
    gflops: Positive = 20.0  # arithmetic that one rank gets done a second, in 10^9
    machine_gbps: Positive = (
        16.0  # between the ranks of a stage, where there are several: gloo's loopback by default
    )
    machine_delay_ms: NotNegative = 0.1  # of each of their exchanges


class Run(Section):
    folder: str = "runs/run"
    log_every: Count = 1
    trace_steps: Annotated[int, Field(ge=0)] = 3  # the last steps are kept as a trace
    checkpoint_every: Count | None = None
    checkpoint_url: str | None = None  # any fsspec URL; default: FOLDER/checkpoints
    keep: Count = 2
    tensorboard: bool = True
    sample: str | None = None  # a prompt that the finished model continues in the summary

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        if not folder:
            raise ValueError(
                "run.folder is empty, perhaps of a shell variable that is not set; name a folder"
            )
        if "\0" in folder or any(
            len(os.fsencode(name)) > _MAX_NAME_BYTES for name in Path(folder).parts
        ):
            raise ValueError(
                f"run.folder {folder!r:.80} is no name of a folder: it holds a NUL, or a name of "
                "more than "
                f"{_MAX_NAME_BYTES} bytes"
            )
        return folder


class Node(Section):
    """What belongs to this process alone; not part of the digest."""

    bind: str | None = None  # default: the one address that this host uses toward the coordinator
    advertise: str | None = (
        None  # default: what `bind` says, or that same address if `bind` is a wildcard
    )
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    device: str = "cpu"
    threads: Count = 1  # intra-op threads; on CPU a run repeats bit for bit at the same number
    token: str = ""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [self.tls_cert, self.tls_key, self.tls_ca]
        if any(given) and not all(given):
            raise ValueError(
                "node.tls_cert, node.tls_key and node.tls_ca go together: both sides show a "
                "certificate"
            )
        return self


class Config(Section):
    model: Model = Model()
    replay: Replay = Replay()
    data: Data = Data()
    train: Train = Train()
    pipeline: Pipeline = Pipeline()
    tensor_parallel: TensorParallel = TensorParallel()
    data_parallel: DataParallel = DataParallel()
    transport: Transport = Transport()
    timeouts: Timeouts = Timeouts()
    predict: Predict = Predict()
    run: Run = Run()
    node: Node = Node()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transport.kind == "nccl":
            self._check_nccl()
        if self.tensor_parallel.size > 1:
            self._check_tensor_parallel()
        elif self.replay.exchanges:
            raise ValueError(
                "replay.exchanges are among the ranks of a stage: set tensor_parallel.size, or "
                "drop them"
            )
        if self.model.layers == "replay" and self.pipeline.split != "estimated":
            raise ValueError(
                "pipeline.split is of layers, and a replayed stage has none: leave it out"
            )
        if self.train.compile and may_split_backward(self.pipeline.schedule):
            raise ValueError(
                f'with train.compile pipeline.schedule must not be "{self.pipeline.schedule}": a '
                "compiled layer makes its input and weight gradients together; take "
                f"{names_that_keep_backward_whole()}"
            )
        if self.model.layers == "replay" and self.node.device != "cpu":
            raise ValueError(
                'model.layers "replay" computes nothing and moves host memory: set node.device = '
                '"cpu"'
            )
        if self.model.layers == "bert" and self.run.sample is not None:
            raise ValueError(
                'run.sample is for models that continue a text, and model.layers is "bert"; leave '
                "it out"
            )
        replicas = self.data_parallel.replicas
        microbatches = self.train.num_microbatches
        if self.train.batch_size % (replicas * microbatches):
            raise ValueError(
                f"train.batch_size {self.train.batch_size} is not divisible by "
                f"train.num_microbatches {microbatches}"
                + (f" for each of data_parallel.replicas {replicas}" if replicas > 1 else "")
            )
        self._check_servers()
        if self.transport.shape is not None and replicas > 1:
            self._check_shaped_replicas()
        return self

    def _check_servers(self) -> None:
        chosen = self.data_parallel
        servers = 1 if chosen.servers == "one" else self.pipeline.stages
        if chosen.address and len(chosen.address) != servers:
            raise ValueError(
                f"data_parallel.address lists {len(chosen.address)} servers, data_parallel.servers "
                f'"{chosen.servers}" '
                f"needs {servers}"
            )
        if chosen.staleness and (self.train.clip_norm or self.train.precision == "fp16"):
            raise ValueError(
                "data_parallel.staleness does not go with clipping or fp16: both wait for all "
                "replicas before each "
                'step; set train.clip_norm = 0 and train.precision = "fp32" or "bf16"'
            )
        form = FORMATS[chosen.wire]
        if chosen.replicas > 1 and not form.elementwise and self.model.tie_embeddings:
            raise ValueError(
                f'data_parallel.wire "{form.name}" rounds the two copies of a tied embedding '
                f"differently; set data_parallel.wire to {elementwise_formats()}, or "
                "model.tie_embeddings = false"
            )
        adds_rounded = chosen.group == "torch" and form.lossy
        if chosen.replicas > 2 and adds_rounded and self.model.tie_embeddings:
            raise ValueError(
                f'data_parallel.group "torch" rounds the sum of {chosen.replicas} replicas to '
                f"{chosen.wire} each time "
                "that it adds, in another order for either copy of a tied embedding; set "
                "data_parallel.wire = "
                '"none", leave data_parallel.group out, or set model.tie_embeddings = false'
            )

    def _check_shaped_replicas(self) -> None:
        """What is not sent over the links would be as fast as it is, and predicted to be as slow as
        they are.
        """
        chosen = self.data_parallel
        for key, value, goes, instead in (
            (
                "kind",
                chosen.kind,
                not chosen.active_kind.has_server,
                names_where(lambda kind: kind.pattern is not None and not kind.has_server),
            ),
            ("group", chosen.group, chosen.group == "dpipe", '"dpipe"'),
        ):
            if not goes:
                raise ValueError(
                    f"transport.shape slows the links of the ranks, and data_parallel.{key} "
                    f'"{value}" has connections of its own: take data_parallel.{key} {instead}, '
                    "or leave transport.shape out and shape the hosts instead (netem, or a lab)"
                )

    def _check_tensor_parallel(self) -> None:
        """What must be cut into equal parts, and what cannot be cut."""
        size = self.tensor_parallel.size
        model = self.model
        replays = self.model.layers == "replay"
        if replays and self.tensor_parallel.sequence_parallel:
            raise ValueError(
                "tensor_parallel.sequence_parallel splits a real model; a replay moves "
                "replay.exchange_bytes either way"
            )
        if not (model.is_transformer or replays):
            raise ValueError(
                f"tensor_parallel.size {size} splits the layers of dpipe's own models, and "
                "model.layers is "
                f"{model.layers!r}; leave tensor_parallel.size out, and take more pipeline.stages"
            )
        if self.data_parallel.staleness:
            raise ValueError(
                "data_parallel.staleness does not go with tensor_parallel.size above 1: the ranks "
                "of a stage would "
                "compute with parameters of different steps; set data_parallel.staleness = 0"
            )
        form = FORMATS[self.data_parallel.wire]
        if not replays and self.data_parallel.replicas > 1 and not form.elementwise:
            raise ValueError(
                f'data_parallel.wire "{form.name}" rounds parameters that every rank of a '
                "tensor-parallel group holds whole differently on each of "
                f"tensor_parallel.size {size}; set data_parallel.wire to {elementwise_formats()}"
            )
        divided = {"model.num_heads": model.num_heads, "model.vocab_size": model.vocab_size or size}
        divided = {} if replays else divided
        if self.tensor_parallel.sequence_parallel:
            divided["model.context"] = model.context
        for key, value in divided.items():
            if value % size:
                raise ValueError(
                    f"{key} {value} is not divisible by tensor_parallel.size {size}; the next that "
                    "is: "
                    f"{value + size - value % size}"
                )

    def _check_nccl(self) -> None:
        """NCCL moves what is on GPUs, and nothing else."""
        for key, wrong in {
            'node.device must be "cuda"': not self.node.device.startswith("cuda"),
            "transport.shape must not be set": self.transport.shape is not None,
            'model.layers must not be "replay"': self.model.layers == "replay",
            'data_parallel.group must be "torch"': self.data_parallel.replicas > 1
            and self.data_parallel.group != "torch",
        }.items():
            if wrong:
                raise ValueError(f'with transport.kind "nccl" {key}; or take transport.kind "tcp"')

    @property
    def world_size(self) -> int:
        return self.pipeline.ranks * self.tensor_parallel.size * self.data_parallel.replicas

    def ranks_of(self, rank: int) -> ParallelRanks:
        """Where `rank` stands among the pipeline stages, the replicas and the tensor-parallel
        groups.
        """
        replicas = self.data_parallel.replicas
        return ParallelRanks(rank, self.pipeline.ranks, replicas, self.tensor_parallel.size)

    @property
    def num_machines(self) -> int:
        """The ranks of a network profile: those that hold a stage together are one, and send as
        one.
        """
        return self.world_size // self.ranks_per_machine

    @property
    def ranks_per_machine(self) -> int:
        """Replayed tensor parallelism is there to be tried over a network: each of its ranks is a
        host.
        """
        return 1 if self.model.layers == "replay" else self.tensor_parallel.size

    @property
    def microbatch_size(self) -> int:
        return self.train.batch_size // self.data_parallel.replicas // self.train.num_microbatches

    @property
    def network_profile(self) -> str | None:
        """The network that a prediction assumes; None is loopback."""
        return self.predict.network or self.transport.shape

    @property
    def counts_headers(self) -> bool:
        """Whether that network's rates are interfaces', packet headers included; the shaped
        transport's are not.
        """
        return self.transport.shape is None

    def shared(self) -> dict[str, Any]:
        """What every rank must agree on, as `section.key` -> JSON value."""
        sections = self.model_dump(mode="json", exclude={"node"})
        return {
            f"{name}.{key}": value
            for name, section in sections.items()
            for key, value in section.items()
        }

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()[:16]

    def with_(self, **overrides: Any) -> "Config":
        """A copy with `section__key=value` replaced and validated again."""
        table = self.model_dump()
        for name, value in overrides.items():
            section, _, key = name.partition("__")
            table[section][key] = value
        return build(table)


def load(path: str | Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a TOML file and apply `section.key=value` overrides (TOML values; a bare word is a
    string).
    """
    try:
        table = tomllib.loads(
            Path(path).read_text(encoding="utf-8-sig")
        )  # some editors begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"configuration {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"configuration {path} is not TOML: {error}") from None
    for text in overrides:
        _override(table, text)
    return build(table)


def build(table: dict[str, Any]) -> Config:
    """Validate a table; raises `ConfigError` with one line a mistake."""
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def _override(table: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(
            f"override {text!r} must look like section.key=value, such as train.steps=100"
        )
    if not isinstance(table.setdefault(section, {}), dict):
        raise ConfigError(f"override {text!r}: {section!r} is not a section")
    table[section][key] = _value(value.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: Any) -> str:
    where = [str(part) for part in error["loc"]]
    name = ".".join(where[:2]) or "the configuration"
    if error["type"] == "extra_forbidden":
        return f"unknown key {name!r}{_did_you_mean(where)}"
    message = str(error["msg"]).removeprefix("Value error, ").replace("a valid tuple", "a list")
    return (
        message if error["type"] == "value_error" else f"{name}: {message}, got {error['input']!r}"
    )


def _did_you_mean(where: list[str]) -> str:
    fields = Config.model_fields
    if len(where) > 1:
        section = fields[where[0]].annotation
        assert section is not None
        fields = section.model_fields
    close = difflib.get_close_matches(where[-1], fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(fields)}"
