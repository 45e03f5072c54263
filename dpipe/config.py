"""Configuration: frozen models, TOML in, `-o section.key=value` overrides, a digest out. No torch here.

    load(path, overrides) -> Config         raises ConfigError naming the key and what is allowed
    config.digest()                         equal on every rank of a run, or the coordinator refuses the join

Everything under `[node]` belongs to one process (addresses, certificates, device) and is left out of the digest.
"""

import difflib
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dpipe.errors import ConfigError
from dpipe.presets import PRESETS

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Model(Section):
    """`layers` is "gpt", "replay", or "package.module:function" with `options` as its keyword arguments."""

    layers: str = "gpt"
    options: dict[str, Any] = {}
    num_layers: Count = 4
    width: Count = 128
    num_heads: Count = 4
    context: Count = 128
    vocab_size: Count | None = None  # default: the tokenizer's
    dropout: Fraction = 0.0
    tie_embeddings: bool = False
    preset: str | None = None  # sizes by name, of which each can still be set

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """The sizes of the preset where none are given."""
        name = given.get("preset") if isinstance(given, dict) else None
        if name is None:
            return given
        if name not in PRESETS:
            raise ValueError(f"model.preset {name!r} is not known; choose one of {', '.join(PRESETS)}")
        return PRESETS[name] | given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"model.width {self.width} must be a multiple of model.num_heads {self.num_heads}")
        if self.layers not in ("gpt", "replay") and ":" not in self.layers:
            raise ValueError(f'model.layers {self.layers!r} must be "gpt", "replay" or "package.module:function"')
        return self


class Replay(Section):
    """Stage times and message sizes of the replay model: real bytes, no arithmetic. Lists give one value a stage."""

    forward_ms: NotNegative | list[NotNegative] = 10.0
    backward_ms: NotNegative | list[NotNegative] = 20.0
    input_share: Fraction = 0.5  # of the backward pass that makes the input gradient
    message_bytes: Count = 1_000_000
    parameter_bytes: Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] = 0  # what replicas agree on


class Data(Section):
    """Text files: globs, relative to the working folder, or "package:NAME/GLOB" inside an installed package."""

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
                f"train.parameters {self.parameters!r} computes in {self.parameters}, but train.precision is "
                f"{self.precision!r}: set both to the same, or leave train.parameters out"
            )
        return self


class Pipeline(Section):
    stages: Count = 1
    stages_per_rank: Count = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "auto"] = "1f1b"
    in_flight: Count | None = None  # micro-batches in flight on the first rank; default: the number of stages
    memory_limit: Count | None = None  # micro-batches that a rank may hold at once
    memory_gb: Positive | None = (
        None  # 10^9 bytes that a rank may hold; a run that is predicted to hold more is refused
    )
    recompute: Literal["none", "selective", "full"] = "none"  # selective: the attention cores alone
    split: tuple[Count, ...] | Literal["estimated", "measured"] = "estimated"  # layers a stage, or how to find it
    wire: Literal["none", "bf16", "fp16", "int8"] = "none"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stages % self.stages_per_rank:
            raise ValueError(
                f"pipeline.stages {self.stages} is not a multiple of pipeline.stages_per_rank {self.stages_per_rank}"
            )
        if isinstance(self.split, tuple) and len(self.split) != self.stages:
            raise ValueError(f"pipeline.split lists {len(self.split)} stages, but pipeline.stages is {self.stages}")
        if (self.stages_per_rank > 1) != (self.schedule == "interleaved") and self.schedule not in ("auto", "gpipe"):
            raise ValueError(
                'pipeline.stages_per_rank above 1 goes with pipeline.schedule "interleaved", and only there'
            )
        return self

    @property
    def ranks(self) -> int:
        return self.stages // self.stages_per_rank


class DataParallel(Section):
    """Replicas of the whole pipeline. Ranks: replica r's come after those of replica r - 1."""

    kind: Literal["none", "all-reduce", "sharded", "parameter-server", "local-sgd"] = "none"
    replicas: Count = 1
    wire: Literal["none", "bf16", "int8"] = "none"  # of gradients; int8 with error feedback
    chunk_bytes: Annotated[int, Field(ge=4096)] = 8 << 20  # of a gradient that are exchanged at once
    group: Literal["dpipe", "torch"] = "dpipe"  # torch: a torch.distributed group, gloo on CPU and NCCL on GPUs
    delay: bool = False  # each step uses the mean gradient of the step before, whose exchange hides behind this one
    servers: Literal["one", "per-stage"] = "one"  # parameter servers
    address: tuple[str, ...] = ()  # HOST:PORT of `dpipe serve`, or one a stage; default: embedded in replica 0's ranks
    staleness: Annotated[int, Field(ge=0)] = 0  # steps that a replica may be ahead of the slowest
    inner_steps: Count = 100  # local-sgd: steps that each replica takes by itself before they agree
    outer_learning_rate: Positive = 0.7
    outer_momentum: Fraction = 0.9
    fragments: Count = 1  # local-sgd: parts of each stage that take turns to agree
    overlap: bool = False  # local-sgd: what replicas exchange has the next step to arrive

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "none" and self.replicas > 1:
            raise ValueError(
                f"data_parallel.replicas is {self.replicas}, but data_parallel.kind does not say how they agree; "
                'set it, for example to "all-reduce"'
            )
        if self.kind == "local-sgd" and self.delay:
            raise ValueError('data_parallel.delay is for gradients; data_parallel.kind "local-sgd" has overlap instead')
        if self.fragments > self.inner_steps:
            raise ValueError(
                f"data_parallel.fragments is {self.fragments}, but at most one agrees at each of the "
                f"data_parallel.inner_steps {self.inner_steps}"
            )
        if self.group == "torch" and (self.kind != "all-reduce" or self.wire == "int8"):
            raise ValueError(
                'data_parallel.group "torch" goes with data_parallel.kind "all-reduce" and data_parallel.wire "none" '
                f'or "bf16", not {self.kind!r} and {self.wire!r}: leave data_parallel.group out'
            )
        served = self.kind == "parameter-server"
        if not served and (self.address or self.staleness or self.servers != "one"):
            raise ValueError(
                "data_parallel.address, data_parallel.servers and data_parallel.staleness go with data_parallel.kind "
                f'"parameter-server", not with "{self.kind}"'
            )
        if served and self.delay:
            raise ValueError("data_parallel.delay is not for a parameter server; set data_parallel.staleness = 1")
        return self

    @field_validator("address", mode="before")
    @classmethod
    def _list(cls, address: Any) -> Any:
        return (address,) if isinstance(address, str) else address

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: tuple[str, ...]) -> tuple[str, ...]:
        for text in address:
            host, _, port = text.rpartition(":")
            if not (host and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(f"data_parallel.address {text!r} must be HOST:PORT, such as 10.0.0.1:7100")
        return address


class Transport(Section):
    # tcp is faster; grpc passes proxies and inspection that speak HTTP/2; nccl is for GPUs with a fast network
    kind: Literal["grpc", "tcp", "nccl"] = "grpc"
    connections: Count | Literal["auto"] = "auto"  # TCP connections a link; auto: as many as fill the assumed network's
    chunk_bytes: Annotated[int, Field(ge=4096, le=4_000_000)] = 1 << 20
    shape: str | None = None  # a network profile whose delay and rate are imitated in software
    buffer_bytes: Count = 256 << 20  # that a link may hold unclaimed before its sender is held back


class Timeouts(Section):
    """One hierarchy, in seconds: transfer < step; a rank that is silent for `heartbeat` is lost."""

    join: Positive = 120.0
    connect: Positive = 20.0
    transfer: Positive = 300.0
    heartbeat: Positive = 8.0


class Predict(Section):
    """What the simulator assumes before anything was measured."""

    network: str | None = None  # a network profile; default: transport.shape, or loopback
    gflops: Positive = 20.0  # arithmetic that one rank gets done a second, in 10^9


class Run(Section):
    folder: str = "runs/run"
    log_every: Count = 1
    trace_steps: Annotated[int, Field(ge=0)] = 3  # the last steps are kept as a trace
    checkpoint_every: Count | None = None
    checkpoint_url: str | None = None  # any fsspec URL; default: FOLDER/checkpoints
    keep: Count = 2
    tensorboard: bool = True
    sample: str | None = None  # a prompt that the finished model continues in the summary


class Node(Section):
    """What belongs to this process alone; not part of the digest."""

    bind: str | None = None  # default: the one address that this host uses toward the coordinator
    advertise: str | None = None  # default: what `bind` says, or that same address if `bind` is a wildcard
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
            raise ValueError("node.tls_cert, node.tls_key and node.tls_ca go together: both sides show a certificate")
        return self


class Config(Section):
    model: Model = Model()
    replay: Replay = Replay()
    data: Data = Data()
    train: Train = Train()
    pipeline: Pipeline = Pipeline()
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
        if self.train.compile and self.pipeline.schedule in ("zero-bubble", "auto"):
            raise ValueError(
                f'with train.compile pipeline.schedule must not be "{self.pipeline.schedule}": a compiled layer '
                'makes its input and weight gradients together; take "gpipe", "1f1b" or "interleaved"'
            )
        replicas, microbatches = self.data_parallel.replicas, self.train.num_microbatches
        if self.train.batch_size % (replicas * microbatches):
            raise ValueError(
                f"train.batch_size {self.train.batch_size} is not divisible by train.num_microbatches {microbatches}"
                + (f" for each of data_parallel.replicas {replicas}" if replicas > 1 else "")
            )
        self._check_servers()
        return self

    def _check_servers(self) -> None:
        chosen = self.data_parallel
        servers = 1 if chosen.servers == "one" else self.pipeline.stages
        if chosen.address and len(chosen.address) != servers:
            raise ValueError(
                f'data_parallel.address lists {len(chosen.address)} servers, data_parallel.servers "{chosen.servers}" '
                f"needs {servers}"
            )
        if chosen.staleness and (self.train.clip_norm or self.train.precision == "fp16"):
            raise ValueError(
                "data_parallel.staleness does not go with clipping or fp16: both wait for all replicas before each "
                'step; set train.clip_norm = 0 and train.precision = "fp32" or "bf16"'
            )
        if chosen.replicas > 1 and chosen.wire == "int8" and self.model.tie_embeddings:
            raise ValueError(
                'data_parallel.wire "int8" rounds the two copies of a tied embedding differently; set '
                'data_parallel.wire to "bf16" or "none", or model.tie_embeddings = false'
            )

    def _check_nccl(self) -> None:
        """NCCL moves what is on GPUs, and nothing else."""
        for key, wrong in {
            'node.device must be "cuda"': not self.node.device.startswith("cuda"),
            "transport.shape must not be set": self.transport.shape is not None,
            'model.layers must not be "replay"': self.model.layers == "replay",
            'data_parallel.group must be "torch"': self.world_size > self.pipeline.ranks
            and self.data_parallel.group != "torch",
        }.items():
            if wrong:
                raise ValueError(f'with transport.kind "nccl" {key}; or take transport.kind "tcp"')

    @property
    def world_size(self) -> int:
        return self.pipeline.ranks * self.data_parallel.replicas

    @property
    def microbatch_size(self) -> int:
        return self.train.batch_size // self.data_parallel.replicas // self.train.num_microbatches

    @property
    def network_profile(self) -> str | None:
        """The network that a prediction assumes; None is loopback."""
        return self.predict.network or self.transport.shape

    @property
    def counts_headers(self) -> bool:
        """Whether that network's rates are interfaces', packet headers included; the shaped transport's are not."""
        return self.transport.shape is None

    def shared(self) -> dict[str, Any]:
        """What every rank must agree on, as `section.key` -> JSON value."""
        sections = self.model_dump(mode="json", exclude={"node"})
        return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}

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
    """Read a TOML file and apply `section.key=value` overrides (TOML values; a bare word is a string)."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
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
        raise ConfigError(f"override {text!r} must look like section.key=value, such as train.steps=100")
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
    name = ".".join(where[:2])
    if error["type"] == "extra_forbidden":
        return f"unknown key {name!r}{_did_you_mean(where)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message if error["type"] == "value_error" else f"{name}: {message}, got {error['input']!r}"


def _did_you_mean(where: list[str]) -> str:
    fields = Config.model_fields
    if len(where) > 1:
        section = fields[where[0]].annotation
        assert section is not None
        fields = section.model_fields
    close = difflib.get_close_matches(where[-1], fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(fields)}"
