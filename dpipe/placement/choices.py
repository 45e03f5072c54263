"""What a job leaves open, and what a plan may choose there.

What the job's file or `-o` states is fixed. Formats that round are chosen only where the user
allows them: they change the losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpipe.config.load import Config
from dpipe.config.parallel import PipelineConfig
from dpipe.config.section import Section
from dpipe.config.wires import AUTO_WIRE, WireTable
from dpipe.dataparallel.kinds import KINDS
from dpipe.errors import ConfigError
from dpipe.plan.tensor_parallel import check_vocabulary
from dpipe.schedule.generate import AUTO
from dpipe.search.wire_choice import largest_first
from dpipe.wire.format import FORMATS, HopFormats

RECOMPUTES = ("none", "selective", "full")  # from the fastest to the leanest
KINDS_THAT_AGREE = ("all-reduce", "sharded")  # to the same losses; of another the job has to say
_MOST_MICRO_BATCHES = 256


@dataclass(frozen=True)
class OpenChoices:
    """What each decision may be; of those that are as good the first is taken."""

    stages: int | None  # None: any number
    replicas: int | None
    tensor_parallel: int | None
    num_microbatches: int | None  # None: any that divides the batch
    recompute: tuple[str, ...]
    wires: tuple[str, ...]  # between stages; none where the job states them
    stated_wire: str | WireTable | None
    kinds: tuple[str, ...]  # of data parallelism
    exchange_wires: tuple[str, ...]
    schedule: str
    in_flight: int | None
    split: tuple[int, ...] | None  # layers a stage; None: any
    batch_size: int
    splits: tuple[int, ...]  # sizes of a tensor-parallel group that divide the model

    def micro_batches(self, replicas: int) -> Iterator[int]:
        """How many each of `replicas` may cut its share of the batch into."""
        share, rest = divmod(self.batch_size, replicas)
        if rest:
            return
        if self.num_microbatches is not None:
            if share % self.num_microbatches == 0:
                yield self.num_microbatches
            return
        for number in range(1, min(share, _MOST_MICRO_BATCHES) + 1):
            if share % number == 0:
                yield number

    def smallest_wires(self, num_hops: int) -> HopFormats:
        """What the job states, or the smallest everywhere."""
        if isinstance(self.stated_wire, WireTable):
            return self.stated_wire.on_hops(num_hops)
        name = self.stated_wire or largest_first(self.wires)[-1]
        return HopFormats.alike(name, num_hops)

    def may_replicate(self, replicas: int) -> bool:
        if self.replicas is not None:
            return replicas == self.replicas
        return replicas == 1 or bool(self.kinds)

    def formats_between_replicas(self, group_size: int) -> tuple[str, ...]:
        """A format that rounds several values together would round what all ranks of a
        tensor-parallel group hold differently on each.
        """
        if group_size == 1:
            return self.exchange_wires
        return tuple(name for name in self.exchange_wires if FORMATS[name].elementwise)

    def group_sizes(self, most: int) -> Iterator[int]:
        """Ranks of a tensor-parallel group, on machines of `most` devices at most."""
        if self.tensor_parallel is not None:
            yield self.tensor_parallel
            return
        for size in self.splits:
            if size <= most:
                yield size


def choices_of(config: Config, formats: Sequence[str]) -> OpenChoices:
    """`formats` are allowed where the job states none. Raises `ConfigError` for one that is not
    known, and for a job that has no layers to place, or several stages on a rank.
    """
    for name in formats:
        FORMATS.named(name)
    _refuse_what_has_no_plan(config)
    pipeline = config.pipeline
    settings = config.data_parallel
    split = pipeline.split if isinstance(pipeline.split, tuple) else None
    stages: int | None = _stated(pipeline, "stages")
    if split is not None:
        stages = len(split)
    kinds: tuple[str, ...] = KINDS_THAT_AGREE
    if "kind" in settings.model_fields_set:
        # Of the kind itself: with one replica, as there is while they are open, none is active.
        kinds = () if KINDS[settings.kind].pattern is None else (settings.kind,)
    # A format may be for stages alone; then replicas exchange gradients as they are.
    between_replicas = [name for name in formats if FORMATS[name].between_replicas]
    return OpenChoices(
        stages=stages,
        replicas=_stated(settings, "replicas"),
        tensor_parallel=_sizes_of_groups(config),
        num_microbatches=_stated(config.train, "num_microbatches"),
        recompute=_open(pipeline, "recompute", RECOMPUTES),
        wires=_wires(pipeline, formats),
        stated_wire=_stated_wire(pipeline),
        kinds=kinds,
        exchange_wires=_open(settings, "wire", between_replicas or ["none"]),
        schedule=pipeline.schedule if "schedule" in pipeline.model_fields_set else AUTO,
        in_flight=pipeline.in_flight,
        split=split,
        batch_size=config.train.batch_size,
        splits=tuple(_splits(config)),
    )


def _refuse_what_has_no_plan(config: Config) -> None:
    if not config.model.family.computes:
        raise ConfigError(
            f'model.layers "{config.model.layers}" has no layers to place: plan the model that it '
            "stands for"
        )
    if config.pipeline.sequence_slices > 1:
        raise ConfigError("a plan weighs whole sequences: leave pipeline.sequence_slices out")
    if config.pipeline.stages_per_rank > 1:
        raise ConfigError(
            "a plan places one stage on each rank: leave pipeline.stages_per_rank out"
        )
    if config.pipeline.splits:
        raise ConfigError(
            "a plan decides how each replica is cut: leave pipeline.splits out, or state one cut "
            "for all with pipeline.split"
        )
    if config.data_parallel.averages_when_cheap:
        raise ConfigError(
            'a plan weighs replicas that average after a known number of steps, not "auto": state '
            "data_parallel.inner_steps"
        )
    if config.data_parallel.address:
        raise ConfigError(
            "a plan places ranks, not servers of their own: leave data_parallel.address out"
        )


def _sizes_of_groups(config: Config) -> int | None:
    if not config.model.family.tensor_parallel:
        return 1
    size: int | None = _stated(config.tensor_parallel, "size")
    return size


def _stated_wire(pipeline: PipelineConfig) -> str | WireTable | None:
    if "wire" not in pipeline.model_fields_set or pipeline.wire == AUTO_WIRE:
        return None
    return pipeline.wire


def _wires(pipeline: PipelineConfig, formats: Sequence[str]) -> tuple[str, ...]:
    """What may be chosen between stages: some formats are for replicas alone."""
    if _stated_wire(pipeline) is not None:
        return ()
    if pipeline.wire == AUTO_WIRE:
        return pipeline.wire_allowed
    allowed = []
    for name in formats:
        if FORMATS[name].between_stages:
            allowed.append(name)
    return tuple(allowed or ["none"])


def _splits(config: Config) -> Iterator[int]:
    """Powers of two: others leave devices of a machine over."""
    size = 1
    while config.model.num_heads % size == 0:
        try:
            check_vocabulary(config.with_(tensor_parallel__size=size))
            yield size
        except ConfigError:
            # Its vocabulary, for one, may be odd: that is no reason not to plan without.
            pass
        size *= 2


def _stated(section: Section, key: str) -> int | None:
    if key not in section.model_fields_set:
        return None
    value: int = getattr(section, key)
    return value


def _open(section: Section, key: str, choices: Sequence[str]) -> tuple[str, ...]:
    if key in section.model_fields_set:
        return (getattr(section, key),)
    return tuple(choices)
