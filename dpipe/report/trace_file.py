"""The shapes of a trace's files, which may come from somebody else. Counts are checked before
anything is made of them.
"""

from collections import Counter
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from dpipe.schedule.action import PER_RANK, Action, parse_action
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.size import too_large, too_many_messages
from dpipe.timeline.span import Lane
from dpipe.wire.schema import Count, Schema, Text

MAX_RANKS = 1 << 16
# The end of a step asks for all stages of its rank, once a stage: a square of them.
_MAX_STAGES_OF_RANK = 256
# Of one computation: its message there and its gradient's, their receives, and the end of a step.
_MAX_ACTIONS_OF_COMPUTATION = 16

Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
AtLeast1 = Annotated[int, Field(ge=1, le=MAX_RANKS)]
# Microseconds and bytes that a float can count.
Number = Annotated[int | float, Field(ge=0, le=2**53, allow_inf_nan=False)]
Microseconds = Annotated[float, Field(ge=-(2**53), le=2**53, allow_inf_nan=False)]


class ExchangeTable(BaseModel):
    name: Text
    num_replicas: AtLeast1
    num_parts: Annotated[int, Field(ge=1, le=4096)]
    barrier: bool
    stale: bool


class PartRow(NamedTuple):
    stages: tuple[Rank, ...]
    reduce_bytes: Annotated[int, Field(ge=0, le=2**53)]
    gather_bytes: Annotated[int, Field(ge=0, le=2**53)]


class ReplicasTable(BaseModel):
    exchange: ExchangeTable
    servers: tuple[Rank, ...]
    delayed: bool
    parts: tuple[PartRow, ...] = ()


class HostRow(NamedTuple):
    ranks: tuple[Rank, ...]
    cores: AtLeast1
    threads: AtLeast1 = 1


class PlanTable(BaseModel):
    """`plan.json`. What has a default is not in older ones."""

    num_microbatches: Annotated[int, Field(ge=1, le=2**31)]
    rank_of_stage: Annotated[tuple[Rank, ...], Field(min_length=1)]
    programs: Annotated[tuple[tuple[Text, ...], ...], Field(min_length=1, max_length=MAX_RANKS)]
    name: Text
    tied: bool
    cost: dict[str, Number | tuple[Number, ...]]
    network: Text | None
    connections: Annotated[int, Field(ge=1, le=1 << 16)]
    hosts: tuple[HostRow, ...]
    replicas: ReplicasTable | None
    headers: bool
    tensor_size: AtLeast1 = 1
    waits_for_verdict: bool = False
    outruns_loss: bool = False
    seats: Annotated[tuple[Text, ...], Field(max_length=MAX_RANKS)] = ()
    frozen: Annotated[int, Field(ge=0, le=2**31)] = 0
    num_slices: Annotated[int, Field(ge=1, le=1 << 24)] = 1
    num_versions: Annotated[int, Field(ge=1, le=2)] = 1

    @property
    def num_pieces(self) -> int:
        return self.num_microbatches * self.num_slices

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.exchange.num_replicas

    @property
    def world_size(self) -> int:
        return len(self.programs) * self.num_replicas * self.tensor_size

    def check_counts(self) -> None:
        """Raises `ValueError` if there is more of anything than a run has."""
        num_stages = len(self.rank_of_stage)
        reason = too_large(num_stages, self.num_pieces, self.num_replicas)
        if reason is None and self.replicas is not None:
            reason = too_many_messages(
                num_stages,
                self.num_replicas,
                self.replicas.exchange.num_parts,
                has_server=bool(self.replicas.servers),
            )
        if reason is None and self.world_size > MAX_RANKS:
            reason = f"{self.world_size} ranks are too many: the most is {MAX_RANKS}"
        if reason is not None:
            raise ValueError(reason)
        # Before the schedule is walked, which goes by micro-batch and stage, not by action.
        num_computations = num_stages * self.num_pieces
        num_actions = sum(map(len, self.programs))
        if not num_computations <= num_actions <= num_computations * _MAX_ACTIONS_OF_COMPUTATION:
            raise ValueError(
                f"{num_actions} actions are none of {num_stages} stages and "
                f"{self.num_microbatches} micro-batches of {self.num_slices} slices"
            )
        if self.replicas is not None and len(self.replicas.servers) not in (0, num_stages):
            raise ValueError(f"{len(self.replicas.servers)} servers for {num_stages} stages")
        self._check_parts(num_stages)

    def _check_parts(self, num_stages: int) -> None:
        parts = () if self.replicas is None else self.replicas.parts
        if len(parts) > num_stages * self.num_replicas:
            raise ValueError(f"{len(parts)} parts of {num_stages} stages")
        for part in parts:
            if max(part.stages, default=0) >= num_stages:
                raise ValueError(f"a part on stage {max(part.stages)} of {num_stages}")
        for replica in range(self.num_replicas if parts else 0):
            held = {part.stages[replica] for part in parts if replica < len(part.stages)}
            if len(held) < num_stages:
                raise ValueError(f"replica {replica} has a stage without parts")

    def schedule(self) -> Schedule:
        """Raises `ScheduleError` or `ValueError` if it is none of these stages and ranks."""
        schedule = Schedule(
            self.num_microbatches,
            self.rank_of_stage,
            tuple(tuple(map(parse_action, program)) for program in self.programs),
            self.name,
            lowered=True,
            tied=self.tied,
            frozen=self.frozen,
            num_slices=self.num_slices,
            num_versions=self.num_versions,
        )
        _check_places(schedule)
        return schedule


def _check_places(schedule: Schedule) -> None:
    for rank, count in Counter(schedule.rank_of_stage).items():
        if rank >= schedule.num_ranks or count > _MAX_STAGES_OF_RANK:
            raise ValueError(f"{count} stages on rank {rank} of {schedule.num_ranks}")
    if len(schedule.index) != sum(map(len, schedule.programs)):
        raise ValueError("an action is there twice")
    for action, (rank, _) in schedule.index.items():
        if not _belongs(schedule, action, rank):
            raise ValueError(f"{action} on rank {rank} does not belong there")


def _belongs(schedule: Schedule, action: Action, rank: int) -> bool:
    in_range = action.stage < schedule.num_stages
    if not in_range or schedule.rank_of_stage[action.stage] != rank:
        return False
    if action.op in PER_RANK:
        return action == schedule.of_rank(rank, action.op)
    own, _ = schedule.in_its_step(action)
    is_later = own != action and not schedule.runs_ahead
    return own.microbatch is None or (own.microbatch < schedule.num_pieces and not is_later)


class SpanRow(NamedTuple):
    lane: Lane
    action: Text
    start_us: Microseconds
    end_us: Microseconds
    num_bytes: Count = 0
    cpu_us: Microseconds = 0.0
    peer: Rank | Text | None = None


class StepTable(BaseModel):
    """A step of `rank-N.json`."""

    step: Count
    spans: list[SpanRow]
    cpu: tuple[Microseconds, Microseconds] | None = None  # the training thread's, and all others'


PLAN = Schema[PlanTable](PlanTable)
STEPS = Schema[list[StepTable]](list[StepTable])
