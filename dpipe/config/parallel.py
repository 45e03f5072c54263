"""How a run is spread over ranks: the sections [pipeline], [tensor_parallel] and [data_parallel].
No torch.

The order of ranks, innermost first: those of a stage, the stages, the replicas. With T = 2, two
stages, two replicas:

    replica 0    stage 0: ranks 0 1    stage 1: ranks 2 3
    replica 1    stage 0: ranks 4 5    stage 1: ranks 6 7
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dpipe.config.one_of import OneOf
from dpipe.dataparallel.kinds import KINDS, Kind, names_where
from dpipe.errors import ConfigError
from dpipe.schedule.generate import GENERATORS, ONE_F_ONE_B, check_name, who_take
from dpipe.wire.format import FORMATS

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[
    float, Field(gt=0, le=30 * 86_400)
]  # a wait: far longer ones do not fit what clocks count in


def _schedule_name(name: str) -> str:
    try:
        return check_name(name)
    except ConfigError as error:
        raise ValueError(str(error)) from None


ScheduleName = Annotated[str, AfterValidator(_schedule_name)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for the number 1."""
        assert info.field_name is not None
        given = value if isinstance(value, list | tuple) else [value]
        if cls.model_fields[info.field_name].annotation is not bool and any(
            isinstance(each, bool) for each in given
        ):
            raise PydanticCustomError("truth", "Input should not be true or false")
        return value


def elementwise_formats() -> str:
    """The formats between replicas that round each value by itself, for messages."""
    names = [f.name for f in FORMATS.values() if f.between_replicas and f.elementwise]
    return " or ".join(f'"{name}"' for name in names)


class Pipeline(Section):
    stages: Count = 1
    stages_per_rank: Count = 1
    schedule: ScheduleName = ONE_F_ONE_B.name
    in_flight: Count | None = (
        None  # micro-batches in flight on the first rank; default: the number of stages
    )
    memory_limit: Count | None = None  # micro-batches that a rank may hold at once
    memory_gb: Positive | None = (
        None  # 10^9 bytes that a rank may hold; what is predicted to hold more is refused
    )
    recompute: Literal["none", "selective", "full"] = "none"  # selective: the attention cores alone
    split: tuple[Count, ...] | Literal["estimated", "measured"] = (
        "estimated"  # layers a stage, or how to find it
    )
    wire: Annotated[str, OneOf(FORMATS, lambda form: form.between_stages)] = "none"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stages % self.stages_per_rank:
            raise ValueError(
                f"pipeline.stages {self.stages} is not a multiple of pipeline.stages_per_rank "
                f"{self.stages_per_rank}"
            )
        if isinstance(self.split, tuple) and len(self.split) != self.stages:
            raise ValueError(
                f"pipeline.split lists {len(self.split)} stages, but pipeline.stages is "
                f"{self.stages}"
            )
        generator = GENERATORS.get(self.schedule)  # None: a search, among what fits
        if (
            generator is not None
            and self.stages_per_rank > 1
            and not generator.takes_several_stages
        ):
            raise ValueError(
                f'pipeline.schedule "{self.schedule}" has one stage a rank: pipeline.stages_per_rank '
                f"above 1 goes with pipeline.schedule {who_take('stages_per_rank')}"
            )
        if generator is not None and self.stages_per_rank == 1 and generator.needs_several_stages:
            raise ValueError(
                f'pipeline.schedule "{self.schedule}" needs pipeline.stages_per_rank above 1'
            )
        return self

    @property
    def ranks(self) -> int:
        return self.stages // self.stages_per_rank


class TensorParallel(Section):
    """Each stage spans `size` ranks of one machine, each with a part of every matrix (Shoeybi et
    al. 2019).

    Those of a replayed stage are hosts, which exchange what `[replay]` says.
    """

    size: Count = 1
    sequence_parallel: bool = (
        False  # between the matrices each rank has a part of the sequence (Korthikanti et al.)
    )
    scatter_gather: bool = True  # between stages each rank sends its part of the activation alone

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.size == 1:
            raise ValueError(
                "tensor_parallel.sequence_parallel needs tensor_parallel.size 2 at least"
            )
        return self


class DataParallel(Section):
    """Replicas of the whole pipeline. Ranks: replica r's come after those of replica r - 1."""

    kind: Annotated[str, OneOf(KINDS)] = "none"
    replicas: Count = 1
    # of gradients; int8 with error feedback
    wire: Annotated[str, OneOf(FORMATS, lambda form: form.between_replicas)] = "none"
    chunk_bytes: Annotated[int, Field(ge=4096)] = (
        8 << 20
    )  # of a gradient that are exchanged at once
    group: Literal["dpipe", "torch"] = (
        "dpipe"  # torch: a torch.distributed group, gloo on CPU and NCCL on GPUs
    )
    # each step uses the mean gradient of the step before, whose exchange hides behind this one
    delay: bool = False
    servers: Literal["one", "per-stage"] = "one"  # parameter servers
    address: tuple[
        str, ...
    ] = ()  # HOST:PORT of `dpipe serve`, or one a stage; default: embedded in replica 0's ranks
    staleness: Annotated[int, Field(ge=0)] = 0  # steps that a replica may be ahead of the slowest
    inner_steps: Count = 100  # local-sgd: steps that each replica takes by itself before they agree
    outer_learning_rate: Positive = 0.7
    outer_momentum: Fraction = 0.9
    fragments: Count = 1  # local-sgd: parts of each stage that take turns to agree
    overlap: bool = False  # local-sgd: what replicas exchange has the next step to arrive

    @property
    def active_kind(self) -> Kind:
        """The properties of `kind`; those of "none" where there is one replica."""
        return KINDS[self.kind if self.replicas > 1 else "none"]

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = KINDS[self.kind]
        if kind.pattern is None and self.replicas > 1:
            exchanging = names_where(lambda kind: kind.pattern is not None)
            raise ValueError(
                f"data_parallel.replicas is {self.replicas}, but data_parallel.kind does not say "
                f"how they agree; set it to {exchanging}"
            )
        if self.delay and kind.late_by != "delay":
            instead = f", which has data_parallel.{kind.late_by} instead" if kind.late_by else ""
            raise ValueError(
                f'data_parallel.delay does not go with data_parallel.kind "{self.kind}"{instead}'
            )
        self._check_inner_steps(kind)
        addable = FORMATS[self.wire].elementwise
        if self.group == "torch" and not (kind.torch_group and addable):
            raise ValueError(
                'data_parallel.group "torch" goes with data_parallel.kind '
                f"{names_where(lambda kind: kind.torch_group)} and "
                f"data_parallel.wire {elementwise_formats()}, "
                f"not {self.kind!r} and {self.wire!r}: leave data_parallel.group out"
            )
        if not kind.has_server and (self.address or self.staleness or self.servers != "one"):
            raise ValueError(
                "data_parallel.address, data_parallel.servers and data_parallel.staleness go with "
                f"data_parallel.kind {names_where(lambda kind: kind.has_server)}, "
                f'not with "{self.kind}"'
            )
        return self

    def _check_inner_steps(self, kind: Kind) -> None:
        is_late = self.overlap and kind.late_by != "overlap"
        if is_late or (self.fragments > 1 and not kind.has_inner_steps):
            raise ValueError(
                "data_parallel.fragments and data_parallel.overlap go with data_parallel.kind "
                f"{names_where(lambda kind: kind.has_inner_steps)}, not {self.kind!r}: "
                "leave them out"
            )
        if self.fragments > self.inner_steps:
            raise ValueError(
                f"data_parallel.fragments is {self.fragments}, but at most one agrees at each of "
                f"the data_parallel.inner_steps {self.inner_steps}"
            )

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
                raise ValueError(
                    f"data_parallel.address {text!r} must be HOST:PORT, such as 10.0.0.1:7100"
                )
        return address
