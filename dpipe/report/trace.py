"""The trace of a run: the last steps' spans of every rank, on one clock, beside what the simulator
predicts.

FOLDER/trace/rank-N.json    as each rank uploaded them to rank 0
FOLDER/trace/plan.json      schedule, message sizes and network: what a prediction needs besides measured costs
FOLDER/trace.json           one Chrome / Perfetto file (`dpipe trace FOLDER`)
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

from dpipe.errors import ConfigError, ScheduleError
from dpipe.network.link import Host
from dpipe.plan.assumed_network import assumed_network
from dpipe.schedule.action import Op, parse_action
from dpipe.schedule.exchange import exchange
from dpipe.schedule.schedule import Schedule
from dpipe.store.run_folder import needing_room
from dpipe.timeline.chrome import chrome_trace
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.simulate import simulate
from dpipe.timeline.span import Lane, Span, Timeline

T = TypeVar("T")


@dataclass(frozen=True)
class StepSpans:
    """One rank's spans of one step, in microseconds on the coordinator's clock."""

    step: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class TraceInputs:
    """What a prediction needs besides measured times: of `cost` only the bytes. `replicas` are
    those of a usual step; `hosts` the machines that have fewer cores than ranks.
    """

    schedule: Schedule
    cost: Cost
    network: str | None
    connections: int = 1
    hosts: tuple[Host, ...] = ()
    replicas: Replicas | None = None
    headers: bool = False  # whether the network's rates count those of packets
    tensor_size: int = 1  # ranks that hold a stage together: one of the schedule's

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.count


def dump_steps(steps: Iterable[StepSpans]) -> bytes:
    rows = [
        {
            "step": s.step,
            "spans": [
                [x.lane, str(x.action), x.start_us, x.end_us, x.num_bytes, x.cpu_us, x.peer]
                for x in s.spans
            ],
        }
        for s in steps
    ]
    return json.dumps(rows).encode()


def load_steps(data: bytes, rank: int) -> list[StepSpans]:
    return [
        StepSpans(
            row["step"],
            tuple(
                Span(rank, Lane(lane), parse_action(action), *numbers)
                for lane, action, *numbers in row["spans"]
            ),
        )
        for row in json.loads(data)
    ]


def save_inputs(folder: Path, inputs: TraceInputs) -> None:
    schedule = inputs.schedule
    table = {
        "num_microbatches": schedule.num_microbatches,
        "rank_of_stage": schedule.rank_of_stage,
        "programs": [[str(action) for action in program] for program in schedule.programs],
        "name": schedule.name,
        "tied": schedule.tied,
        "cost": asdict(inputs.cost),
        "network": inputs.network,
        "connections": inputs.connections,
        "headers": inputs.headers,
        "tensor_size": inputs.tensor_size,
        "hosts": [[host.ranks, host.cores] for host in inputs.hosts],
        "replicas": None if inputs.replicas is None else _as_table(inputs.replicas),
    }
    path = folder / "plan.json"
    with needing_room(path):
        path.write_text(json.dumps(table), encoding="utf-8")


def load_inputs(folder: Path) -> TraceInputs:
    """Raises `ConfigError` where it is missing or damaged."""
    return _read(folder / "plan.json", _parse_inputs)


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    again = "copy the run again from where it is whole, or train some more of it"
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {again}") from None
    except (ValueError, LookupError, TypeError, ScheduleError) as error:
        raise ConfigError(f"{path} is damaged: {type(error).__name__}: {error}; {again}") from None


def _parse_inputs(data: bytes) -> TraceInputs:
    table = json.loads(data)
    schedule = Schedule(
        table["num_microbatches"],
        tuple(table["rank_of_stage"]),
        tuple(tuple(parse_action(text) for text in program) for program in table["programs"]),
        table["name"],
        lowered=True,
        tied=table["tied"],
    )
    sizes: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in table["cost"].items()
    }
    hosts = tuple(Host(tuple(ranks), cores) for ranks, cores in table["hosts"])
    replicas = None if table["replicas"] is None else _from_table(table["replicas"])
    return TraceInputs(
        schedule,
        Cost(**sizes),
        table["network"],
        table["connections"],
        hosts,
        replicas,
        table["headers"],
        table.get("tensor_size", 1),
    )


def _as_table(replicas: Replicas) -> dict[str, Any]:
    made = {
        key: getattr(replicas.exchange, key)
        for key in ("name", "num_replicas", "num_parts", "barrier", "stale")
    }
    return {"exchange": made, "servers": replicas.servers, "delayed": replicas.delayed}


def _from_table(table: dict[str, Any]) -> Replicas:
    return Replicas(exchange(**table["exchange"]), tuple(table["servers"]), table["delayed"])


@dataclass(frozen=True)
class Trace:
    """The measured steps of a run, each with all ranks' spans since the step began, and the
    prediction.
    """

    inputs: TraceInputs
    steps: tuple[tuple[int, float, Timeline], ...]  # (step, when it began in us, spans)
    predicted: Timeline

    @property
    def measured_us(self) -> float:
        return median(timeline.duration_us for _, _, timeline in self.steps)


def load_trace(run: Path) -> Trace:
    """Read `FOLDER/trace`; raises `ConfigError` where the run has none, or a part of it is missing
    or damaged.
    """
    folder = run / "trace"
    if not (folder / "plan.json").exists():
        raise ConfigError(
            f"{run} has no trace: run.trace_steps must be above 0, and the run must have ended by "
            "itself"
        )
    inputs = load_inputs(folder)
    ranks = range(inputs.schedule.num_ranks * inputs.num_replicas * inputs.tensor_size)
    by_rank = [
        _read(folder / f"rank-{rank}.json", partial(load_steps, rank=rank)) for rank in ranks
    ]
    traced = [[step.step for step in steps] for steps in by_rank]
    if not traced[0] or traced.count(traced[0]) < len(traced):
        raise ConfigError(
            f"{folder} holds other steps of each rank, by rank {traced}: its files are not of one "
            "run"
        )
    steps = tuple(_join(same_step, inputs) for same_step in zip(*by_rank, strict=True))
    cost = measured_cost(inputs, [timeline for _, _, timeline in steps])
    network = assumed_network(inputs.network, inputs.connections, headers=inputs.headers)
    predicted = simulate(inputs.schedule, cost, network, inputs.hosts, inputs.replicas)
    return Trace(inputs, steps, _first_of_each(predicted, inputs.tensor_size))


def _first_of_each(timeline: Timeline, size: int) -> Timeline:
    """As the spans of the first of the ranks that hold a stage together, whom the simulator takes
    for one.
    """
    spans = tuple(span._replace(rank=span.rank * size) for span in timeline.spans)
    return Timeline(timeline.num_ranks * size, spans, timeline.num_replicas, size)


def _join(same_step: Sequence[StepSpans], inputs: TraceInputs) -> tuple[int, float, Timeline]:
    spans = [span for rank in same_step for span in rank.spans]
    origin = min(span.start_us for span in spans)
    moved = (s._replace(start_us=s.start_us - origin, end_us=s.end_us - origin) for s in spans)
    return (
        same_step[0].step,
        origin,
        Timeline(len(same_step), tuple(moved), inputs.num_replicas, inputs.tensor_size),
    )


def measured_cost(inputs: TraceInputs, timelines: Sequence[Timeline]) -> Cost:
    """The mean cost of each stage's actions as measured; what a schedule does not use is left at
    zero.

    Of ranks that share a host's cores it is processor time: the simulator shares the cores out
    itself.
    """
    sharing = {rank for host in inputs.hosts for rank in host.ranks}
    durations: dict[tuple[int, str], list[float]] = {}
    for span in (span for timeline in timelines for span in timeline.spans):
        if span.lane in (Lane.COMPUTE, Lane.UPDATE):
            took_us = span.cpu_us if span.rank in sharing else span.duration_us
            durations.setdefault((span.action.stage, span.action.op), []).append(took_us)

    def of(op: Op) -> tuple[float, ...]:
        return tuple(
            mean(durations.get((stage, op), [0.0])) for stage in range(inputs.schedule.num_stages)
        )

    return replace(
        inputs.cost,
        forward_us=of(Op.F),
        backward_us=of(Op.B),
        input_us=of(Op.I),
        weight_us=of(Op.W),
        update_us=of(Op.STEP),
    )


def write_chrome(run: Path) -> Path:
    """Write `FOLDER/trace.json` and return its path; raises `ConfigError` where it cannot be."""
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
