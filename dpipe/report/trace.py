"""The trace of a run: the last steps' spans of every rank, on one clock, beside what the simulator
predicts.

FOLDER/trace/rank-N.json    spans, as each rank uploaded them to rank 0
FOLDER/trace/plan.json      what a prediction needs besides measured costs: `TraceInputs`
FOLDER/trace.json           one Chrome / Perfetto file (`dpipe trace FOLDER`)
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from dpipe.coordinator.limits import UPLOADS
from dpipe.errors import CheckpointError, ConfigError, ScheduleError
from dpipe.machines.seats import Seats
from dpipe.network.link import Host, Network
from dpipe.plan.assumed_network import assumed_network
from dpipe.report.chrome import chrome_trace
from dpipe.report.processor_time import (
    StepCpu,
    between_us,
    ends_of,
    in_vote,
    message_cpu,
    python_us,
)
from dpipe.report.trace_file import PLAN, STEPS, PlanTable, ReplicasTable
from dpipe.schedule.action import Op, parse_action
from dpipe.schedule.exchange import exchange
from dpipe.schedule.schedule import Schedule
from dpipe.store.run_folder import needing_room, refuse_links
from dpipe.store.storage import regular_bytes
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Part, Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import Steady
from dpipe.timeline.span import Lane, Span, Timeline

T = TypeVar("T")

_MAX_FILE_BYTES = UPLOADS["trace"]  # of plan.json too: rank 0 writes it for the same spans
_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class StepSpans:
    """One rank's spans of one step, in microseconds on the coordinator's clock."""

    step: int
    spans: tuple[Span, ...]
    cpu: StepCpu | None = None  # None in traces of before it was measured


@dataclass(frozen=True)
class TraceInputs:
    """What a prediction needs besides measured times."""

    schedule: Schedule  # lowered
    cost: Cost  # only its bytes: `measured_cost` fills in the times
    network: str | None  # the profile; None is loopback
    connections: int = 1  # TCP connections a link
    hosts: tuple[Host, ...] = ()  # the cores that ranks share, by pipeline rank
    replicas: Replicas | None = None  # those of a usual step
    headers: bool = False  # whether the network's rates include packet headers
    tensor_size: int = 1  # ranks of a tensor-parallel group: one rank of the schedule
    waits_for_verdict: bool = False  # whether no rank steps before all have voted
    seats: Seats = ()  # where `network` is a file of machines; empty: in its order
    outruns_loss: bool = False  # whether losses leave the connections' windows large

    @property
    def ballots(self) -> Network | None:
        """The network that a vote crosses; None where no step waits for it.

        Where the transport imitates a network, which the ranks' messages cross without packet
        headers, the coordinator's stay on loopback.
        """
        if not self.waits_for_verdict:
            return None
        return self.assumed_network if self.headers else Network()

    @property
    def assumed_network(self) -> Network:
        return assumed_network(
            self.network,
            self.connections,
            headers=self.headers,
            devices_per_seat=self.tensor_size,
            seats=self.seats,
            outruns_loss=self.outruns_loss,
        )

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.count

    @property
    def world_size(self) -> int:
        return self.schedule.num_ranks * self.num_replicas * self.tensor_size


def dump_steps(steps: Iterable[StepSpans]) -> bytes:
    rows = []
    for step in steps:
        spans = [_span_as_list(span) for span in step.spans]
        cpu = None if step.cpu is None else [step.cpu.own_us, step.cpu.others_us]
        rows.append({"step": step.step, "spans": spans, "cpu": cpu})
    return json.dumps(rows).encode()


def load_steps(data: bytes, rank: int) -> list[StepSpans]:
    """The inverse of `dump_steps`; spans do not say which rank's they are. Raises `ValueError` or
    `ScheduleError` for anything else.
    """
    steps = []
    for table in STEPS.read(data):
        spans = [
            Span(
                rank,
                row.lane,
                parse_action(row.action),
                row.start_us,
                row.end_us,
                row.num_bytes,
                row.cpu_us,
                row.peer,
            )
            for row in table.spans
        ]
        cpu = None if table.cpu is None else StepCpu(*table.cpu)
        steps.append(StepSpans(table.step, tuple(spans), cpu))
    return steps


def _span_as_list(span: Span) -> list[Any]:
    # Without names: spans are nearly all of an upload, whose size is bounded.
    return [
        span.lane,
        str(span.action),
        span.start_us,
        span.end_us,
        span.num_bytes,
        span.cpu_us,
        span.peer,
    ]


def save_inputs(folder: Path, inputs: TraceInputs) -> None:
    """Write `plan.json` in `folder`. Raises `RunError` if the disk has no room for it."""
    schedule = inputs.schedule
    table = {
        "num_microbatches": schedule.num_microbatches,
        "num_slices": schedule.num_slices,
        "num_versions": schedule.num_versions,
        "rank_of_stage": schedule.rank_of_stage,
        "programs": [[str(action) for action in program] for program in schedule.programs],
        "name": schedule.name,
        "tied": schedule.tied,
        "frozen": schedule.frozen,
        "cost": asdict(inputs.cost),
        "network": inputs.network,
        "connections": inputs.connections,
        "headers": inputs.headers,
        "tensor_size": inputs.tensor_size,
        "waits_for_verdict": inputs.waits_for_verdict,
        "seats": list(inputs.seats),
        "outruns_loss": inputs.outruns_loss,
        "hosts": [[host.ranks, host.cores, host.threads] for host in inputs.hosts],
        "replicas": None if inputs.replicas is None else _as_table(inputs.replicas),
    }
    path = folder / "plan.json"
    with needing_room(path):
        path.write_text(json.dumps(table), encoding="utf-8")


def load_inputs(folder: Path) -> TraceInputs:
    """Raises `ConfigError` if `plan.json` is missing or damaged."""
    path = folder / "plan.json"
    return _inputs(_read(path, _parse_plan), path)


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    with _naming(path):
        return parse(regular_bytes(path, path.parent, _MAX_FILE_BYTES))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises `ConfigError` naming `path` for what is wrong with it inside."""
    remedy = "copy the run again from where it is whole, or train some more of it"
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    except CheckpointError as error:
        raise ConfigError(f"{error}; {remedy}") from None
    except (ConfigError, ScheduleError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:_REASON_CHARACTERS]  # the rest is a grid
        raise ConfigError(f"{path} is damaged: {reason}; {remedy}") from None


def _parse_plan(data: bytes) -> PlanTable:
    table = PLAN.read(data)
    table.check_counts()
    return table


def _inputs(table: PlanTable, path: Path) -> TraceInputs:
    with _naming(path):
        return TraceInputs(
            schedule=table.schedule(),
            cost=Cost(**table.cost),  # type: ignore[arg-type]  # it checks its lengths
            network=table.network,
            connections=table.connections,
            hosts=tuple(Host(*row) for row in table.hosts),
            replicas=None if table.replicas is None else _replicas(table.replicas),
            headers=table.headers,
            tensor_size=table.tensor_size,
            waits_for_verdict=table.waits_for_verdict,
            seats=table.seats,
            outruns_loss=table.outruns_loss,
        )


def _as_table(replicas: Replicas) -> dict[str, Any]:
    keys = ("name", "num_replicas", "num_parts", "barrier", "stale")
    settings = {key: getattr(replicas.exchange, key) for key in keys}
    parts = [(part.stages, part.reduce_bytes, part.gather_bytes) for part in replicas.parts]
    return {
        "exchange": settings,
        "servers": replicas.servers,
        "delayed": replicas.delayed,
        "parts": parts,
    }


def _replicas(table: ReplicasTable) -> Replicas:
    rounds = exchange(**table.exchange.model_dump())
    parts = tuple(Part(*row) for row in table.parts)
    return Replicas(rounds, table.servers, table.delayed, parts)


@dataclass(frozen=True)
class Trace:
    """The measured steps of a run, each with all ranks' spans since the step began, and the
    prediction.
    """

    inputs: TraceInputs
    steps: tuple[tuple[int, float, Timeline], ...]  # (step, when it began in us, spans)
    scenario: Scenario  # what the prediction is of: costs as they were measured
    predicted: Timeline


def load_trace(run: Path) -> Trace:
    """Read `FOLDER/trace`. Raises `ConfigError` if it, or a part of it, is missing or damaged."""
    folder = run / "trace"
    path = folder / "plan.json"
    if not path.exists():
        raise ConfigError(
            f"{run} has no trace: run.trace_steps must be above 0, and the run must have ended by "
            "itself"
        )
    table = _read(path, _parse_plan)
    # Before anything is made of the plan: each rank that it counts must have a file.
    by_rank = [rank_steps(run, rank) for rank in range(table.world_size)]
    inputs = _inputs(table, path)
    traced = [[step.step for step in steps] for steps in by_rank]
    # Not all steps: a rank whose trace did not fit its upload has sent fewer of the last ones.
    common = set(traced[0]).intersection(*traced)
    if not common:
        raise ConfigError(
            f"{folder} holds different steps for each rank, by rank {traced}: its files are not of "
            "one run"
        )
    shown = [[step for step in steps if step.step in common] for steps in by_rank]
    steps = tuple(_join(same_step, inputs) for same_step in zip(*shown, strict=True))
    with _naming(path):
        scenario = Scenario(
            inputs.schedule,
            measured_cost(inputs, shown),
            inputs.assumed_network,
            measured_hosts(inputs, shown),
            inputs.replicas,
            inputs.ballots,
        )
        predicted = Steady(scenario.lowered()).steady_step()
    return Trace(inputs, steps, scenario, _on_first_ranks(predicted, inputs.tensor_size))


def rank_steps(run: Path, rank: int) -> list[StepSpans]:
    """What one rank uploaded. Raises `ConfigError` if it is missing or damaged."""
    return _read(run / "trace" / f"rank-{rank}.json", partial(load_steps, rank=rank))


def _on_first_ranks(timeline: Timeline, size: int) -> Timeline:
    """The simulator takes a tensor-parallel group for one rank: show it as the group's first."""
    # Its other ranks do the same at the same time.
    spans = tuple(span._replace(rank=span.rank * size) for span in timeline.spans)
    return Timeline(timeline.num_ranks * size, spans, timeline.num_replicas, size)


def _join(same_step: Sequence[StepSpans], inputs: TraceInputs) -> tuple[int, float, Timeline]:
    """All ranks' spans of one step, counted from the first of them."""
    spans = [span for of_rank in same_step for span in of_rank.spans]
    began_us = min((span.start_us for span in spans), default=0.0)
    moved = tuple(
        span._replace(start_us=span.start_us - began_us, end_us=span.end_us - began_us)
        for span in spans
    )
    timeline = Timeline(len(same_step), moved, inputs.num_replicas, inputs.tensor_size)
    return same_step[0].step, began_us, timeline


def measured_cost(inputs: TraceInputs, by_rank: Sequence[Sequence[StepSpans]]) -> Cost:
    """The mean measured cost of each stage's actions; zero for those that the schedule lacks.

    Where ranks share cores it is processor time: the simulator itself shares the cores out.
    """
    hosted = {rank for host in inputs.hosts for rank in host.ranks}
    means_us = _mean_times_us(by_rank, hosted, inputs.tensor_size)

    def by_stage(op: Op) -> tuple[float, ...]:
        stages = range(inputs.schedule.num_stages)
        return tuple(means_us.get((stage, op), 0.0) for stage in stages)

    measured = replace(
        inputs.cost,
        forward_us=by_stage(Op.F),
        backward_us=by_stage(Op.B),
        input_us=by_stage(Op.I),
        weight_us=by_stage(Op.W),
        update_us=by_stage(Op.STEP),
        vote_us=by_stage(Op.VOTE),
        exchange_forward_us=(),
        exchange_backward_us=(),
        exchanges=(),
    )
    if not hosted:
        return measured
    return _with_python(_with_exchanges(measured, inputs, by_rank), inputs, by_rank)


def _mean_times_us(
    by_rank: Sequence[Sequence[StepSpans]], hosted: Collection[int], tensor_size: int
) -> dict[tuple[int, Op], float]:
    """What an action takes of its rank, by stage and op; of ranks that are `hosted`, of a core."""
    sums_us: dict[tuple[int, Op], float] = defaultdict(float)
    counts: dict[tuple[int, Op], int] = defaultdict(int)
    for rank, steps in enumerate(by_rank):
        on_cores = rank // tensor_size in hosted
        for span in (span for step in steps for span in step.spans):
            place = (span.action.stage, span.action.op)
            if span.lane in (Lane.COMPUTE, Lane.UPDATE):
                counts[place] += 1
                sums_us[place] += span.cpu_us if on_cores else span.duration_us
            elif on_cores and in_vote(span):
                sums_us[place] += span.cpu_us
    return {place: sums_us[place] / count for place, count in counts.items()}


def _with_exchanges(
    cost: Cost, inputs: TraceInputs, by_rank: Sequence[Sequence[StepSpans]]
) -> Cost:
    """`cost` with what a tensor-parallel group's exchanges take of a core in a computation: the
    sum over the group, because they are done one after the other.
    """
    cpu_us = _exchanged(by_rank, lambda span: inputs.tensor_size * span.cpu_us)
    number = _exchanged(by_rank, lambda span: 1)

    def by_stage(means: Mapping[tuple[int, Op], float], *ops: Op) -> tuple[float, ...]:
        """Of the computation, among `ops`, that has most."""
        stages = range(inputs.schedule.num_stages)
        return tuple(max(means.get((stage, op), 0.0) for op in ops) for stage in stages)

    return replace(
        cost,
        exchange_forward_us=by_stage(cpu_us, Op.F),
        exchange_backward_us=by_stage(cpu_us, Op.B, Op.I),
        exchanges=tuple(map(math.ceil, by_stage(number, Op.F, Op.B, Op.I))),
    )


def _exchanged(
    by_rank: Sequence[Sequence[StepSpans]], value: Callable[[Span], float]
) -> dict[tuple[int, Op], float]:
    """The sum of `value` over the exchanges of a computation, a mean by stage and op."""
    sums: dict[tuple[int, Op], float] = defaultdict(float)
    computations: dict[tuple[int, Op], int] = defaultdict(int)
    for span in (span for steps in by_rank for step in steps for span in step.spans):
        place = (span.action.stage, span.action.op)
        if span.lane is Lane.COMPUTE:
            computations[place] += 1
        elif span.lane is Lane.TENSOR:
            sums[place] += value(span)
    return {place: sums[place] / count for place, count in computations.items()}


def _with_python(cost: Cost, inputs: TraceInputs, by_rank: Sequence[Sequence[StepSpans]]) -> Cost:
    """`cost` with what ranks do beside computing: the mean over all that hold a stage."""
    pythons_us: dict[int, list[float]] = defaultdict(list)
    betweens_us: dict[int, list[float]] = defaultdict(list)
    for rank, steps in enumerate(by_rank):
        pp_rank = rank // inputs.tensor_size % inputs.schedule.num_ranks
        for step in steps:
            if step.cpu is not None:
                pythons_us[pp_rank].append(python_us(step.spans, step.cpu))
                betweens_us[pp_rank].append(between_us(step.spans))
    rank_of_stage = inputs.schedule.rank_of_stage
    of_stages = [pythons_us[rank] or [0.0] for rank in rank_of_stage]
    of_ranks = [betweens_us[rank] or [0.0] for rank in rank_of_stage]
    return replace(
        cost,
        python_us=tuple(map(mean, of_stages)),
        between_us=tuple(map(mean, of_ranks)),
    )


def measured_hosts(inputs: TraceInputs, by_rank: Sequence[Sequence[StepSpans]]) -> tuple[Host, ...]:
    """The run's hosts, and what a message took of their cores."""
    ends = []
    for rank, steps in enumerate(by_rank):
        for step in steps:
            if step.cpu is not None:
                ends.append(ends_of(rank, len(by_rank), step.spans, step.cpu))
    # A thread of torch's own cannot be told from one that moves bytes.
    if not ends or any(host.threads > inputs.tensor_size for host in inputs.hosts):
        return inputs.hosts
    cpu = message_cpu(ends)
    # Each rank of a tensor-parallel group sends a part; together they are one rank here.
    message_us = inputs.tensor_size * cpu.message_us
    hosts = []
    for host in inputs.hosts:
        hosts.append(replace(host, message_us=message_us, us_per_mb=cpu.us_per_mb))
    return tuple(hosts)


def write_chrome(run: Path) -> Path:
    """Write `FOLDER/trace.json` and return its path. Raises `ConfigError` if it cannot."""
    refuse_links(run)
    trace = load_trace(run)
    path = run / "trace.json"
    steps = [(began_us, timeline) for _, began_us, timeline in trace.steps]
    try:
        path.write_text(json.dumps(chrome_trace(steps, trace.predicted)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; copy the run to where it can be"
        ) from None
    return path
