"""How a run goes: [train], [run], [transport], [timeouts], [predict], [node]."""

import math
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dpipe.config.section import (
    Count,
    CountOrZero,
    Fraction,
    Name,
    NotNegative,
    Positive,
    Seconds,
    Section,
)
from dpipe.config.wires import FormatName
from dpipe.optimizers.kinds import OPTIMIZERS
from dpipe.trackers.kinds import TRACKERS
from dpipe.transport.kinds import TRANSPORTS

_MAX_NAME_BYTES = 255  # of one file or folder, on every usual file system


class TrainConfig(Section):
    """Steps, batches, the optimizer, precision and evaluation."""

    steps: Count = 100
    """Optimizer steps of the whole run. A resumed run ends at the same step."""

    batch_size: Count = 16
    """Sequences a step, over all replicas. A multiple of num_microbatches times
    data_parallel.replicas."""

    num_microbatches: Count = 4
    """Micro-batches of a replica's share of a batch. Left out: 4, or the next lower that fits."""

    learning_rate: Positive = 3e-4
    """The highest learning rate, reached after warmup_steps."""

    min_learning_rate: NotNegative = 0.0
    """The learning rate at the end of the decay."""

    epochs: Positive | None = None
    """Passes over the training data, in place of steps, which follow from it. Left out: steps."""

    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises linearly from 0 to learning_rate."""

    warmup_ratio: Fraction = 0.0
    """The same as a share of all steps, in place of warmup_steps."""

    decay: Literal["cosine", "linear", "none"] = "cosine"
    """How the learning rate falls from learning_rate to min_learning_rate until the last step."""

    optimizer: Annotated[str, Name(OPTIMIZERS)] = "adamw"
    """How parameters step. "muon" steps matrices between embedding and head, and by AdamW the rest;
    "adamw_8bit" needs torchao."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, of matrices alone; with "sgd" it is a penalty in the gradient."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the two moments; the first is the momentum of "sgd" and "muon"."""

    clip_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm, taken over all stages; 0 does not clip."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What layers compute in. bf16 and fp16 are torch.autocast; fp16 scales the loss."""

    parameters: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What parameters are kept in. bf16 and fp16 (the same as precision) drop autocast and keep
    fp32 master weights for the optimizer."""

    compile: bool = False
    """Whether each layer is compiled by torch.compile. The first step then takes minutes: set
    timeouts.transfer longer than that."""

    seed: int = 0
    """Seed of initial weights, dropout and the order of the data."""

    eval_every: Count | None = None
    """Steps between evaluations of the held-out loss; there is also one before the first step and
    one after the last. Left out: no evaluation."""

    eval_batches: Count = 4
    """Batches of an evaluation."""

    eval_wire: FormatName | None = None
    """What crosses the stages in an evaluation: with "none" its loss is that of the model which is
    exported. Left out: what pipeline.wire has forward."""

    patience: Count | None = None
    """Evaluations in a row without a lower held-out loss after which the run ends. Left out: it
    goes on to the last step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.parameters not in ("fp32", self.precision):
            raise ValueError(
                f"train.parameters {self.parameters!r} computes in {self.parameters}, but "
                f"train.precision is {self.precision!r}: set both alike, or only the latter"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("train.warmup_steps and warmup_ratio say the same: leave one out")
        if self.patience is not None and self.eval_every is None:
            raise ValueError("train.patience counts evaluations: set train.eval_every too")
        return self

    @property
    def rising_steps(self) -> int:
        """Of the learning rate."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * self.steps)

    @property
    def waits_for_verdict(self) -> bool:
        """Whether a step needs to know of all ranks: their norms, to clip, or who overflowed."""
        return self.clip_norm > 0 or self.precision == "fp16"


class RunConfig(Section):
    """What a run keeps, and where."""

    folder: str = "runs/run"
    """Folder of the run: metrics, logs, trace and checkpoints. It must not hold another run."""

    log_every: Count = 1
    """Steps between rows of metrics.jsonl, lines of the log and of the terminal."""

    trace_steps: CountOrZero = 3
    """How many of the last steps are kept for `dpipe trace`; 0 keeps none."""

    checkpoint_every: Count | None = None
    """Steps between checkpoints. Left out: one at the end, and one when the run is stopped."""

    checkpoint_url: str | None = None
    """Where checkpoints go: a folder, or any URL that fsspec writes to. Left out:
    FOLDER/checkpoints on each machine."""

    keep: Count = 2
    """How many of the newest checkpoints are kept."""

    keep_best: bool = False
    """Whether the checkpoint of the lowest held-out loss is kept, for --best of `dpipe export`."""

    tensorboard: bool = True
    """Whether FOLDER/tensorboard is written."""

    trackers: tuple[Annotated[str, Name(TRACKERS)], ...] = ()
    """Where rows go besides, each by an extra of dpipe: "wandb", "mlflow"; "otel" is a span for
    each step. One that fails is a warning."""

    log_format: Literal["text", "json"] = "text"
    """How lines of the logs are written: "json" is an object a line with time, level, rank and
    message, for what collects logs."""

    sample: str | None = None
    """A prompt that the finished model continues in the summary. Left out: none."""

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        if not folder:
            raise ValueError(
                "run.folder is empty, perhaps of a shell variable that is not set; name a folder"
            )
        too_long = any(len(os.fsencode(name)) > _MAX_NAME_BYTES for name in Path(folder).parts)
        if too_long:
            raise ValueError(
                f"run.folder {folder!r:.80} cannot be a folder: it has a name of more than "
                f"{_MAX_NAME_BYTES} bytes"
            )
        return folder


class TransportConfig(Section):
    """How tensors travel between ranks."""

    kind: Annotated[str, Name(TRANSPORTS)] = "grpc"
    """"grpc" passes proxies and inspection that speak HTTP/2; "tcp" is faster; "nccl" is for GPUs
    with a fast network."""

    connections: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """TCP connections a link. "auto": as many as it takes to fill a link of predict.network."""

    congestion_control: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,15}$")] = "auto"
    """TCP's congestion control, such as "reno", on "tcp" links on Linux. "host": the host's.
    "auto": "reno" for "bbr", and for "cubic" until something is lost; "bbr" where losses are
    random, by predict.network or as seen, if the host allows it."""

    chunk_bytes: Annotated[int, Field(ge=4096, le=4_000_000)] = 1 << 20
    """Bytes of a message that are written at once; "tcp" writes at most 524288."""

    shape: str | None = None
    """A network profile (TOML) whose delays and bandwidths are imitated in software. Left out: the
    network as it is."""

    buffer_bytes: Count = 256 << 20
    """Bytes that a link holds for a receiver that is late; then its sender waits."""


class TimeoutsConfig(Section):
    """How long ranks wait for each other. No wait is without one of these limits."""

    join: Seconds = 120.0
    """Seconds until all ranks have found the coordinator."""

    connect: Seconds = 20.0
    """Seconds to open a link between two ranks."""

    transfer: Seconds = 300.0
    """Seconds to wait for a tensor, or for the other ranks during the run."""

    heartbeat: Seconds = 40.0
    """Seconds without a sign of life after which a rank counts as lost, and in which a broken
    connection can be dialled again. The default outlasts the live migration of a virtual machine.
    A process that has ended is noticed within a second."""


class GuardConfig(Section):
    """Copies of each rank's layers on other machines, for a run whose machines come and go."""

    every: Count | None = None
    """Steps between two copies. A run that loses a machine goes on from the last one. Left out: as
    few as cost less than 1 % of the run and can be sent while links are idle: by the step that is
    predicted, and after eight steps by the measured one."""

    copies: CountOrZero = 1
    """Machines that hold a copy of each layer besides the one that trains it."""


class PredictConfig(Section):
    """What the simulator assumes before anything was measured."""

    network: str | None = None
    """A network profile (TOML), or a file of machines. Narrow uplinks are paced to it. Left out:
    the links of predict.machines, else the profile of transport.shape, else loopback."""

    machines: str | None = None
    """A file of machines (TOML), as `dpipe measure` writes it: what layers take on each, and the
    links between them. Ranks sit in its order. Left out: all ranks are alike."""

    seats: tuple[str, ...] = ()
    """By rank, the name of its machine in predict.machines; once for a tensor-parallel group.
    `--plan` sets it. Left out: ranks sit in the order of the file."""

    gflops: Positive = 20.0
    """10^9 floating-point operations a second of one rank."""

    machine_gbps: Positive = 16.0
    """Gbit/s between the tensor-parallel ranks of a machine. The default is gloo on loopback."""

    machine_delay_ms: NotNegative = 0.1
    """Milliseconds that each of their collectives takes at least."""


class NodeConfig(Section):
    """What belongs to one process alone; ranks may differ in it."""

    bind: str | None = None
    """Address to listen on. Left out: this host's own on the way to the coordinator."""

    advertise: str | None = None
    """Host that the other ranks dial. "none": nobody can, this rank dials them (NAT). Left out:
    `bind`, or this host's own address where `bind` is a wildcard."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port that links listen on; 0 takes any free one."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on which rank 0 serves its metrics to Prometheus, at `bind` or else on loopback, without
    a token; 0 takes any free one. Left out: none."""

    device: str = "cpu"
    """"cpu", "cuda" (each process of a machine takes the next GPU), or one, such as "cuda:1"."""

    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    """Threads of torch within an operator. On CPU a run repeats bit for bit with the same
    number."""

    token: str = ""
    """Secret that every rank must show to join. Left out: that of DPIPE_TOKEN."""

    token_file: str | None = None
    """File of tokens, one a line: the first is shown, each is accepted. It is read again at each
    connection, so that a token can be changed while a run goes on. Left out: `token`."""

    tls_cert: str | None = None
    """Path of this process's certificate (PEM), for the name "dpipe". Left out: no TLS."""

    tls_key: str | None = None
    """Path of its private key (PEM)."""

    tls_ca: str | None = None
    """Path of the authority's certificate (PEM), which signed those of all ranks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        files = [self.tls_cert, self.tls_key, self.tls_ca]
        if any(files) and not all(files):
            raise ValueError(
                "node.tls_cert, node.tls_key and node.tls_ca go together: set all or none"
            )
        if self.token and self.token_file:
            raise ValueError("node.token and node.token_file exclude each other: leave one out")
        return self
