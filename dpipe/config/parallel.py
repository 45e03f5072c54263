"""How a run is spread over ranks: [pipeline], [tensor_parallel], [data_parallel].

The order of ranks, innermost first: tensor-parallel group, stages, replicas. With
tensor_parallel.size 2, two stages and two replicas:

    replica 0    stage 0: ranks 0 1    stage 1: ranks 2 3
    replica 1    stage 0: ranks 4 5    stage 1: ranks 6 7
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dpipe.config.section import Count, CountOrZero, Fraction, Name, Positive, Section
from dpipe.config.wires import AUTO_WIRE, FormatName, WireSetting, WireTable
from dpipe.dataparallel.kinds import KINDS, Kind, names_where
from dpipe.schedule.generate import AUTO, GENERATORS, ONE_F_ONE_B, who_take
from dpipe.wire.format import FORMATS, HopFormats


def elementwise_formats() -> str:
    """The formats between replicas that round each value by itself, for messages."""
    names = [form.name for form in FORMATS.values() if form.between_replicas and form.elementwise]
    return " or ".join(f'"{name}"' for name in names)


class PipelineConfig(Section):
    """How the model is cut into stages, and in which order ranks compute micro-batches."""

    plan: Literal["none", "auto"] = "none"
    """"auto": as the ranks join, they measure their machines and links, and what this job leaves
    open is planned for them; ranks that would only slow the run down leave it."""

    stages: Count = 1
    """Stages that the layers are cut into."""

    stages_per_rank: Count = 1
    """Stages on each rank: above 1 for "interleaved", also "gpipe" and "auto"; 2 for "zb-v"."""

    schedule: Annotated[str, Name(GENERATORS, pattern=AUTO, matches=AUTO.__eq__)] = ONE_F_ONE_B.name
    """The order of forward and backward passes. "auto" takes what the simulator finds fastest on
    predict.network. With "2bw" steps overlap, and gradients are one step late."""

    programs: tuple[str, ...] = ()
    """With "auto": the order itself, as `dpipe plan` found it: for each rank a text of actions such
    as "0F0,0F1,0B0,0B1". Left out: it is searched for as a run starts."""

    in_flight: Count | None = None
    """Micro-batches in flight on the first rank: forward done, backward not. For "interleaved" each
    of its stages counts; "gpipe" and "auto" take none. Left out: enough to fill the pipeline."""

    sequence_slices: Count = 1
    """Slices of each sequence, which follow each other through the stages (Seq1F1B), for "gpipe",
    "1f1b" and "auto". in_flight and memory_limit then count slices. Losses change by rounding."""

    memory_limit: Count | None = None
    """Micro-batches whose activations a rank may hold, for "zero-bubble" and "auto". Left out: no
    limit but what the schedule needs."""

    memory_gb: Positive | None = None
    """10^9 bytes that a rank may hold. A run that is predicted to hold more is refused. Left out:
    what this machine has."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, the attention cores, or
    each layer from its input."""

    split: tuple[Count, ...] | Literal["estimated", "measured"] = "estimated"
    """Layers of each stage: a list, or how to find one. "estimated" counts operations, and with
    predict.machines goes by what layers take on each machine; "measured" times each layer on rank
    0."""

    splits: tuple[tuple[Count, ...], ...] = ()
    """Layers of each stage by replica, where replicas are cut differently, as machines of unequal
    speed want it: [[5, 3], [2, 6]]. split is then left out."""

    wire: Annotated[str | WireTable, WireSetting()] = "none"
    """Format of what stages send each other. A table has formats for forward and backward, and
    links = {"2-3" = ...} for the link between stages 2 and 3. "auto" takes of wire_allowed the
    largest that costs no time on predict.network."""

    wire_allowed: tuple[FormatName, ...] = ()
    """The formats that wire = "auto" may choose: those whose effect on the loss you accept."""

    delta_cache_gb: Positive = 20.0
    """10^9 bytes on disk that a rank may keep of what links with "+delta" have sent."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_wire()
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
        self._check_splits()
        if self.schedule == AUTO and self.in_flight is not None:
            raise ValueError(
                f'pipeline.schedule "{AUTO}" chooses how many micro-batches are in flight '
                "itself: leave pipeline.in_flight out, or bound what a rank holds with "
                "pipeline.memory_limit or pipeline.memory_gb"
            )
        if self.programs and self.schedule != AUTO:
            raise ValueError(
                f'pipeline.programs are an order for pipeline.schedule "{AUTO}", not for '
                f'"{self.schedule}": leave them out'
            )
        if self.programs and len(self.programs) != self.ranks:
            raise ValueError(
                f"pipeline.programs are of {len(self.programs)} ranks, but pipeline.stages "
                f"{self.stages} make {self.ranks}"
            )
        self._check_stages_per_rank()
        self._check_slices()
        return self

    def _check_splits(self) -> None:
        if not self.splits:
            return
        if self.split != "estimated":
            raise ValueError(
                "pipeline.splits has the layers of each stage for each replica: leave "
                "pipeline.split out"
            )
        if self.stages_per_rank > 1:
            raise ValueError(
                "pipeline.splits is for one stage on each rank: leave pipeline.stages_per_rank out"
            )
        for replica, cut in enumerate(self.splits):
            if len(cut) != self.stages:
                raise ValueError(
                    f"pipeline.splits lists {len(cut)} stages for replica {replica}, but "
                    f"pipeline.stages is {self.stages}"
                )
            if sum(cut) != sum(self.splits[0]):
                raise ValueError(
                    f"pipeline.splits places {sum(cut)} layers in replica {replica}, and "
                    f"{sum(self.splits[0])} in replica 0; each replica holds the whole model"
                )

    def _check_wire(self) -> None:
        if isinstance(self.wire, WireTable):
            self.wire.on_hops(self.stages - 1)
        if self.wire == AUTO_WIRE and not self.wire_allowed:
            raise ValueError(
                f'pipeline.wire "{AUTO_WIRE}" chooses among pipeline.wire_allowed: list there the '
                'formats whose effect on the loss you accept, such as ["none", "bf16", "int8"]'
            )

    def _check_stages_per_rank(self) -> None:
        # The search itself leaves out what does not go with it.
        if self.schedule == AUTO:
            return
        generator = GENERATORS[self.schedule]
        if self.stages_per_rank > 1 and not generator.takes_several_stages:
            raise ValueError(
                f'pipeline.schedule "{self.schedule}" has one stage a rank: '
                "pipeline.stages_per_rank above 1 goes with pipeline.schedule "
                f"{who_take('stages_per_rank')}"
            )
        only = generator.only_stages_per_rank
        if only is not None and self.stages_per_rank != only:
            raise ValueError(
                f'pipeline.schedule "{self.schedule}" needs pipeline.stages_per_rank {only}'
            )
        if self.stages_per_rank == 1 and generator.needs_several_stages:
            raise ValueError(
                f'pipeline.schedule "{self.schedule}" needs pipeline.stages_per_rank above 1'
            )

    def _check_slices(self) -> None:
        if self.sequence_slices == 1:
            return
        if self.memory_limit is not None and self.memory_limit < self.sequence_slices:
            raise ValueError(
                f"pipeline.memory_limit {self.memory_limit} counts slices, and those of a sequence "
                f"are held together: set it to {self.sequence_slices} at least"
            )
        # The search with slices is among those with one stage a rank.
        if self.schedule == AUTO:
            if self.stages_per_rank > 1:
                raise ValueError(
                    f'pipeline.schedule "{AUTO}" with pipeline.sequence_slices has one stage on '
                    "each rank: leave pipeline.stages_per_rank out"
                )
            return
        if "num_slices" not in GENERATORS[self.schedule].takes:
            raise ValueError(
                f'pipeline.schedule "{self.schedule}" does not cut sequences: leave '
                "pipeline.sequence_slices out, or set pipeline.schedule to "
                f'{who_take("num_slices")} or "{AUTO}"'
            )

    @property
    def ranks(self) -> int:
        return self.stages // self.stages_per_rank

    @property
    def num_versions(self) -> int:
        """Of the weights."""
        return 1 if self.schedule == AUTO else GENERATORS[self.schedule].num_versions

    @property
    def wire_formats(self) -> HopFormats | None:
        """Of each hop between stages; None for "auto", which a forecast decides."""
        num_hops = self.stages - 1
        if isinstance(self.wire, WireTable):
            return self.wire.on_hops(num_hops)
        return None if self.wire == AUTO_WIRE else HopFormats.alike(self.wire, num_hops)

    @property
    def may_round(self) -> bool:
        """Whether what a stage receives may differ from what was sent."""
        if isinstance(self.wire, WireTable):
            return self.wire.on_hops(self.stages - 1).lossy
        return self.wire == AUTO_WIRE or FORMATS[self.wire].lossy

    @property
    def may_remember(self) -> bool:
        """Whether what a link sends may depend on what it sent before."""
        if self.wire_formats is None:
            return any(FORMATS[name].remembers for name in self.wire_allowed)
        return self.wire_formats.remembers


class TensorParallelConfig(Section):
    """Several ranks of one machine that share each stage, each with a shard of every matrix.

    Shoeybi et al. 2019. With model.layers = "replay" these ranks are hosts, which exchange what
    [replay] says.
    """

    size: Count = 1
    """Ranks of a tensor-parallel group. Divides model.num_heads and model.vocab_size."""

    sequence_parallel: bool = False
    """Whether each of them has a part of the sequence between the matrices (Korthikanti et al.
    2022). Then size divides model.context."""

    scatter_gather: bool = True
    """Whether each of them sends a part of an activation to the next stage, which gathers it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.size == 1:
            raise ValueError(
                "tensor_parallel.sequence_parallel needs tensor_parallel.size 2 or more"
            )
        return self


class DataParallelConfig(Section):
    """Replicas of the whole pipeline, and how they keep their parameters equal."""

    kind: Annotated[str, Name(KINDS)] = "none"
    """How replicas agree: gradients averaged directly; the same with the optimizer's state sharded;
    through a server; or parameters averaged every inner_steps steps (DiLoCo)."""

    replicas: Count = 1
    """Pipelines that train side by side."""

    wire: Annotated[str, Name(FORMATS, lambda form: form.between_replicas)] = "none"
    """Format of what replicas send each other. From "int8" on rounding errors are carried into the
    next step (error feedback); "top64" is for "local-sgd"."""

    chunk_bytes: Annotated[int, Field(ge=4096)] = 8 << 20
    """Bytes of a gradient that are exchanged at once."""

    group: Literal["dpipe", "torch"] = "dpipe"
    """What moves the gradients of "all-reduce": dpipe's transport, or a torch.distributed group
    (gloo on CPU, NCCL on GPUs)."""

    delay: bool = False
    """Whether each step uses the mean gradient of the step before: its exchange is then hidden."""

    reject: Literal["nonfinite"] | None = None
    """Which replicas a step leaves out of its mean: "nonfinite", those whose gradient or loss is
    not finite; the others exchange again without them. Left out: such a step ends the run."""

    servers: Literal["one", "per-stage"] = "one"
    """Parameter servers: one for all stages, or one for each."""

    address: tuple[str, ...] = ()
    """HOST:PORT of each `dpipe serve`. Left out: the servers live in the ranks of replica 0."""

    staleness: CountOrZero = 0
    """Steps that a replica may be ahead of the slowest, with a parameter server."""

    inner_steps: Count | Literal["auto"] = 100
    """Steps that each replica takes by itself before "local-sgd" averages; "auto": the fewest with
    which averaging makes steps on predict.network at most 2 % longer, and 10 at least."""

    outer_learning_rate: Positive = 0.7
    """Learning rate of the step on the averaged difference ("local-sgd")."""

    outer_momentum: Fraction = 0.9
    """Nesterov momentum of that step; it grows from 0 with the first of them."""

    fragments: Count = 1
    """Parts of each stage that "local-sgd" averages in turns, so that less is sent at once."""

    overlap: bool = False
    """Whether the outer exchange of "local-sgd" overlaps the next inner step, a step late."""

    @property
    def averages_when_cheap(self) -> bool:
        """Whether the simulator chooses `inner_steps`."""
        return self.active_kind.has_inner_steps and self.inner_steps == "auto"

    @property
    def known_inner_steps(self) -> int:
        """`inner_steps`; 1 where they are of no use, or have not been chosen yet."""
        return 1 if self.inner_steps == "auto" else self.inner_steps

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
        addable = FORMATS[self.wire].elementwise
        if self.group == "torch" and not (kind.torch_group and addable):
            raise ValueError(
                'data_parallel.group "torch" goes with data_parallel.kind '
                f"{names_where(lambda kind: kind.torch_group)} and "
                f"data_parallel.wire {elementwise_formats()}, not {self.kind!r} and "
                f"{self.wire!r}: leave data_parallel.group out"
            )
        self._check_delay(kind)
        self._check_reject(kind)
        self._check_inner_steps(kind)
        if not kind.has_server and (self.address or self.staleness or self.servers != "one"):
            raise ValueError(
                "data_parallel.address, data_parallel.servers and data_parallel.staleness go with "
                f"data_parallel.kind {names_where(lambda kind: kind.has_server)}, "
                f'not with "{self.kind}"'
            )
        return self

    def _check_delay(self, kind: Kind) -> None:
        if not self.delay or kind.late_by == "delay":
            return
        instead = f", which has data_parallel.{kind.late_by} instead" if kind.late_by else ""
        raise ValueError(
            f'data_parallel.delay does not go with data_parallel.kind "{self.kind}"{instead}'
        )

    def _check_reject(self, kind: Kind) -> None:
        if self.reject is None:
            return
        needed = None
        if not kind.leaves_out:
            needed = f"kind {names_where(lambda kind: kind.leaves_out)}, not {self.kind!r}"
        elif self.delay:
            needed = "delay = false: a delayed step is computed ahead by what would be left out"
        elif FORMATS[self.wire].error_feedback:
            needed = (
                f'wire other than "{self.wire}", whose rounding errors of the first exchange would '
                "be lost"
            )
        if needed is not None:
            raise ValueError(f'data_parallel.reject = "{self.reject}" needs data_parallel.{needed}')

    def _check_inner_steps(self, kind: Kind) -> None:
        is_late = self.overlap and kind.late_by != "overlap"
        if is_late or (self.fragments > 1 and not kind.has_inner_steps):
            raise ValueError(
                "data_parallel.fragments and data_parallel.overlap go with data_parallel.kind "
                f"{names_where(lambda kind: kind.has_inner_steps)}, not {self.kind!r}: "
                "leave them out"
            )
        if self.inner_steps == "auto":
            # So many at least, as the choice is made for many fragments too.
            return
        if self.fragments > self.inner_steps:
            raise ValueError(
                f"data_parallel.fragments is {self.fragments}, but at most one is averaged at each "
                f"of the data_parallel.inner_steps {self.inner_steps}"
            )

    @field_validator("address", mode="before")
    @classmethod
    # One server is what most runs have.
    def _accept_one(cls, address: Any) -> Any:
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
