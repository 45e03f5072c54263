#!/usr/bin/env python3
"""A published table, what the simulator predicts for it, and what was measured.

\b
    scripts/table.py gpt3xl_gpipe_network --mode sim
        predicted from network profiles; takes minutes
    scripts/table.py gpt3xl_gpipe_network --mode replay
        measured by scripts/sweep.py on replay stages
    scripts/table.py gpt3xl_gpipe_network --mode real --json
        measured on a real model
    scripts/table.py gpt3xl_networks --mode replay
        the same networks and others, measured with the settings of a real training
    scripts/table.py gpt3xl_narrow --mode replay
        narrow links by wire format, beside the bound; so with the names of TCP as it comes;
        with --compare a line a network
    scripts/table.py gpt3xl_gpipe_micro_batches --mode sim
        thirty rows of the same system that nothing is fitted to
    scripts/table.py megatron_memory_time --mode sim
        memory and time of Megatron's strategies
    scripts/table.py gpt3xl_megatron --mode sim
        layouts of GPT-3 XL on Megatron; so with the other names
    scripts/table.py gpt3xl_megatron --mode real
        measured by scripts/sweep.py on this machine's GPUs
    scripts/table.py gpt3xl_megatron --mode replay
        tensor parallelism over slow links, on replay stages

Markdown unless --json or --csv is given; --png FILE (needs the extra `plot`) draws the same.
"""

import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
from tables import SIMULATED, by_wire, micro_batches, replayed, tcp
from tables import measured as on_gpus
from tables.form import Parameter, as_text, new_figure, put_between_marks, with_parameters

from dpipe.errors import ConfigError, DpipeError
from dpipe.network.link import Link, Network
from dpipe.network.profile import load_network, parse_network
from dpipe.schedule.action import COMPUTE, Action, Op
from dpipe.schedule.exchange import exchange
from dpipe.schedule.generate import generate, schedule_names
from dpipe.schedule.schedule import Schedule
from dpipe.search.auto import search
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.simulate import simulate
from dpipe.wire.format import wire_bytes

ROOT = Path(__file__).resolve().parent.parent
NETWORKS = "gpt3xl_networks"
BY_WIRE = by_wire.NAMES
MEASURED = (NETWORKS, *BY_WIRE)  # on replay stages alone
TABLES = ("gpt3xl_gpipe_network", *MEASURED, *SIMULATED)

# GPT-3 XL in 12 stages, batch 64, micro-batch 1.
NUM_STAGES, NUM_MICROBATCHES = 12, 64
FORWARD_US = micro_batches.FORWARD_MS.value * 1e3
BACKWARD_US = micro_batches.BACKWARD_MS.value * 1e3
MESSAGE_VALUES = 2048 * 2048  # sequence x width: 16 MiB in float32

LOCAL_SGD_ENGINE = "dpipe local-sgd"
WAYS = [("dpipe", "1f1b"), ("dpipe", "zero-bubble"), ("dpipe", "auto")]
REPLICATED_WAYS = [("dpipe", "auto"), (LOCAL_SGD_ENGINE, "auto")]
PAGE_WIRES = ("fp32", "bf16")  # of the table in README
# The wire formats of a configuration, by their names in the tables.
WIRES = {"fp32": "none", "bf16": "bf16", "int8": "int8", "int4": "int4"}
PREDICTED_WIRES = ("fp32", "bf16", "int8")  # beside the published rows

# Four replicas: the published system reduces to one of them and broadcasts back, without overlap.
PARAMETER_BYTES = (626_000_000, *(400_000_000,) * (NUM_STAGES - 1))
CENTRAL, ALL_REDUCE, LOCAL_SGD = "central", "all-reduce", "local-sgd"
INNER_STEPS = 100  # of local SGD, between two exchanges
PIECE_BYTES = Parameter("piece that a reduce passes on", 2**22, "bytes", "nominal: NCCL's buffer")
PARAMETERS = (*micro_batches.STAGE, *tcp.JUMBO.parameters, *tcp.PARAMETERS, PIECE_BYTES)
NUM_PARTS = 16  # of a stage, for dpipe's own exchanges


@dataclass(frozen=True)
class Row:
    """One system on one network; seconds per step. `published_s` is from the source, `predicted_s`
    from today's simulator, `predicted_that_day_s` from the simulator before the measurement.
    """

    delay_ms: float | None  # None if the links of the network differ
    bandwidth_gbps: float | None
    data_parallel: int
    engine: str
    schedule: str
    wire: str
    published_s: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_that_day_s: float | None = None

    @property
    def label(self) -> str:
        return f"{self.engine} {self.schedule} {self.wire}" + (
            f" x {self.data_parallel}" if self.replicated else ""
        )

    @property
    def replicated(self) -> bool:
        return self.data_parallel > 1

    @property
    def network(self) -> str:
        return f"{self.delay_ms:g} ms\n{self.bandwidth_gbps:g} Gbit/s"

    @property
    def seconds(self) -> float:
        """Measured, else published, else predicted."""
        return self.measured_s or self.published_s or self.predicted_s or 0.0

    @property
    def error(self) -> float | None:
        """The difference of the measurement from today's prediction, in percent."""
        return self._error_of(self.predicted_s)

    @property
    def error_that_day(self) -> float | None:
        return self._error_of(self.predicted_that_day_s)

    def _error_of(self, predicted_s: float | None) -> float | None:
        happened = self.published_s if self.measured_s is None else self.measured_s
        if happened is None or predicted_s is None:
            return None
        return (happened / predicted_s - 1) * 100


FIELDS = tuple(field.name for field in fields(Row))


def published(name: str) -> list[Row]:
    """The source's rows: a pipeline alone, and with a parameter server."""
    source = TABLES[0] if name == NETWORKS else name
    with (ROOT / f"scripts/published/{source}.csv").open(encoding="utf-8") as lines:
        return [
            Row(
                float(line["delay_ms"]),
                float(line["bandwidth_gbps"]),
                int(line["data_parallel"]),
                engine="published",
                schedule="gpipe",
                wire="fp32",
                published_s=float(line["seconds_per_iteration"]),
            )
            for line in csv.DictReader(lines)
        ]


def profile_of(row: Row) -> Path:
    return ROOT / f"netem/profiles/{row.delay_ms:g}ms-{row.bandwidth_gbps:g}gbps.toml"


def published_network(row: Row) -> Network:
    """The network of the published table that a row stands for. Systems are compared on the same
    frames; what was measured in a lab had its own (`measured_network`).

    The published system's messages find its sockets idle, and these have no window limit: the
    window of the profile was deduced from the last row of the table for the same effect.
    """
    network = load_network(profile_of(row))
    if row.engine == "published":
        return network.with_links(lambda link: tcp.after_quiet(link, 4 * MESSAGE_VALUES))
    return network.with_links(tcp.for_payload).over_enough()


def measured_network(line: dict[str, Any]) -> Network:
    """The network of a measured line, at full size: `scale` divided messages and bandwidths, not
    delays.

    The rates of a lab include headers, and its TCP windows are the kernel's, which `scale` does not
    divide.
    """
    network = parse_network(line["network"], default_name="measured").over(line["connections"])
    if line["venue"] == "shaped":
        return network
    return network.for_payload().with_links(lambda link: _wider(link, line["scale"]))


def _wider(link: Link, scale: int) -> Link:
    return (
        link if link.window_bytes is None else replace(link, window_bytes=link.window_bytes * scale)
    )


def with_prediction(
    row: Row,
    network: Network | None = None,
    ballots: Network | None = None,
    num_stages: int = NUM_STAGES,
    order: Sequence[str] = (),
) -> Row:
    """The simulated step time, by default on the published network. It depends only on the network,
    the stage times and whether ranks wait for a vote (`ballots`). `order` is the schedule that
    "auto" had found when the row was measured; without it, auto searches again.
    """
    network = network or published_network(row)
    network.check(num_stages * row.data_parallel)
    cost, replicas = cost_of(row.wire, num_stages), replicas_of(row)
    local = row.engine == LOCAL_SGD_ENGINE
    name = row.schedule.partition(",")[0]
    if order:
        schedule = schedule_in(order)
    elif name == "auto":
        searched = None if local else replicas
        schedule = search(
            num_stages, NUM_MICROBATCHES, cost, network, replicas=searched, ballots=ballots
        )
    else:
        schedule = generate(name, num_stages, NUM_MICROBATCHES)
    a_step = partial(simulate, schedule, cost, network, ballots=ballots)
    seconds = a_step(replicas=replicas).step_us / 1e6
    if local:
        apart = a_step().step_us / 1e6
        seconds = (seconds + (INNER_STEPS - 1) * apart) / INNER_STEPS
    return replace(row, predicted_s=round(seconds, 3))


def cost_of(wire: str, num_stages: int = NUM_STAGES) -> Cost:
    """The calibrated stages, or the first few, with `wire` between them and between their
    replicas.
    """
    message = wire_bytes(WIRES[wire], MESSAGE_VALUES)
    gradients = tuple(wire_bytes(WIRES[wire], size // 4) for size in PARAMETER_BYTES[:num_stages])
    return replace(
        Cost.uniform(num_stages, FORWARD_US, BACKWARD_US, message), reduce_bytes=gradients
    )


def replicas_of(row: Row) -> Replicas | None:
    if not row.replicated:
        return None
    if row.engine == "published":
        parts = PARAMETER_BYTES[1] // int(PIECE_BYTES.value)
        return Replicas(exchange(CENTRAL, row.data_parallel, parts))
    kind = LOCAL_SGD if row.engine == LOCAL_SGD_ENGINE else ALL_REDUCE
    return Replicas(exchange(kind, row.data_parallel, NUM_PARTS))


def simulated(name: str) -> list[Row]:
    """The published rows, then dpipe's, network by network."""
    source = published(name)
    ours = [
        Row(row.delay_ms, row.bandwidth_gbps, row.data_parallel, engine, schedule, wire)
        for row in source
        for engine, schedule in (REPLICATED_WAYS if row.replicated else WAYS)
        for wire in PREDICTED_WIRES
    ]
    with ProcessPoolExecutor() as pool:
        return [*pool.map(with_prediction, source), *pool.map(in_training, ours)]


def in_training(row: Row) -> Row:
    """With the prediction for the default settings, in which every step waits for a vote."""
    network = published_network(row)
    return with_prediction(row, network, network)


def measured(name: str, mode: str, results: Path) -> list[Row]:
    """The lines of `mode` that scripts/sweep.py has written, after the published rows.

    Networks whose links differ are not in this table. Raises `ConfigError` if there is no line.
    """
    lines = [
        line for line in lines_of(results) if line["mode"] == mode and line["delay_ms"] is not None
    ]
    if not lines:
        raise nothing_measured(name, mode, results)
    with ProcessPoolExecutor() as pool:
        ours = [*pool.map(row_of, lines)]
    beside = {row.data_parallel for row in ours}
    return [
        *(with_prediction(row) for row in published(name) if row.data_parallel in beside),
        *ours,
    ]


def measured_rows(name: str, mode: str, results: Sequence[Path]) -> Sequence[Any]:
    """Of either kind of table."""
    if name not in BY_WIRE:
        return measured(name, mode, only_one(name, results))
    rows = by_wire.rows_of([line for path in results for line in lines_of(path)])
    if not rows:
        raise nothing_measured(name, mode, results[0])
    return rows


def only_one(name: str, results: Sequence[Path]) -> Path:
    if len(results) > 1:
        raise ConfigError(f"{name} is of one file: give --results once, not {len(results)} times")
    return results[0]


def lines_of(results: Path) -> list[dict[str, Any]]:
    """The result lines of scripts/sweep.py, if any. Raises `ConfigError` naming a damaged line."""
    lines = results.read_text("utf-8").splitlines() if results.exists() else []
    return [_parsed(line, f"{results}, line {number}") for number, line in enumerate(lines, 1)]


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not a row of JSON ({error}); delete the line, then measure it again by "
            "the script that wrote it"
        ) from None


def nothing_measured(name: str, mode: str, results: Path, sweep: str | None = None) -> ConfigError:
    file = f"scripts/sweeps/{sweep or name}.toml"
    return ConfigError(f"{results} holds no row of mode {mode!r}; run scripts/sweep.py {file}")


def row_of(line: dict[str, Any]) -> Row:
    """With the prediction of its day and today's; they are the same if it is not a pipeline of this
    table.
    """
    row = Row(**{key: line.get(key) for key in FIELDS})
    row = replace(row, predicted_that_day_s=row.predicted_s)
    name = row.schedule.partition(",")[0]
    stages = line.get("pipeline_parallel", NUM_STAGES)  # older lines have their number in the name
    known = "," not in row.schedule or "pipeline_parallel" in line
    if line["mode"] != "replay" or name not in schedule_names() or not known:
        return row
    network = measured_network(line)
    ballots = measured_ballots(line, network)
    return with_prediction(row, network, ballots, stages, line.get("order") or ())


def schedule_in(order: Sequence[str]) -> Schedule:
    """By rank the letters of its computations, such as FFBFBB, in the order of micro-batches, with
    one stage per rank.
    """
    programs = []
    for stage, letters in enumerate(order):
        counts = {op: count() for op in COMPUTE}
        programs.append(tuple(Action(stage, Op(op), next(counts[Op(op)])) for op in letters))
    return Schedule(order[0].count(Op.F), tuple(range(len(order))), tuple(programs), "auto")


def order_of(schedule: Schedule) -> list[str] | None:
    """The inverse of `schedule_in`; None for a schedule that letters cannot express."""
    programs = [[a for a in program if a.op in COMPUTE] for program in schedule.programs]
    order = ["".join(action.op for action in program) for program in programs]
    said = schedule_in(order).programs
    return order if said == tuple(map(tuple, programs)) else None


def measured_ballots(line: dict[str, Any], network: Network) -> Network | None:
    """The network that the votes of a measured line crossed. The oldest lines have no clip_norm:
    nothing was clipped, so no rank waited for a vote.
    """
    if not line.get("clip_norm", 0):
        return None
    return Network() if line["venue"] == "shaped" else network


def as_markdown(rows: Sequence[Row]) -> str:
    head = [*FIELDS, "error", "error that day"]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        lines.append(
            _line([*map(_cell, astuple(row)), _percent(row.error), _percent(row.error_that_day)])
        )
    return "\n".join(lines)


def as_predicted_and_measured(rows: Sequence[Row]) -> str:
    """One line per network and pipeline: the prediction of that day, today's if it differs, and the
    measurement; seconds per step.
    """
    beside = {row.network: row.published_s for row in rows if row.published_s is not None}
    measured = {(*_pipeline(row), row.wire): row for row in rows if row.measured_s is not None}
    head = ["one-way delay, bandwidth", "published, fp32"]
    for wire in PAGE_WIRES:
        head += [f"dpipe, {wire}: predicted", "measured"]
    lines = [_line(head), _line(["---"] * len(head))]
    pipelines = dict.fromkeys(_pipeline(row) for row in rows if row.measured_s is not None)
    for network, pipeline in pipelines:
        published_s = None if pipeline else beside.get(network)
        cells = [", ".join(filter(None, (network.replace("\n", ", "), pipeline)))]
        cells.append("" if published_s is None else f"{published_s:.2f}")
        for wire in PAGE_WIRES:
            cells += _predicted_and_measured(measured.get((network, pipeline, wire)))
        lines.append(_line(cells))
    return "\n".join(lines)


def _pipeline(row: Row) -> tuple[str, str]:
    """Its network, and how it differs from twelve stages with the schedule "auto"."""
    return row.network, row.schedule.removeprefix("auto").removeprefix(", ")


def _predicted_and_measured(row: Row | None) -> list[str]:
    if row is None:
        return ["", ""]
    that_day, today = (f"{s or 0.0:.2f}" for s in (row.predicted_that_day_s, row.predicted_s))
    predicted = that_day if today == that_day else f"{that_day} (today {today})"
    return [predicted, f"{row.measured_s:.2f}"]


def note(rows: Sequence[Row]) -> str:
    """A summary of the errors of the published system's rows, without the fitted one."""
    _, *others = [row for row in rows if row.engine == "published"]
    errors = [abs(row.error) for row in others if row.error is not None]
    mean = sum(errors) / len(errors)
    return (
        f"Of the published system's rows the first is fitted; {len(errors)} predicted: mean error "
        f"{mean:.1f} %, largest {max(errors):.1f} %."
    )


def as_comparison(rows: Sequence[Row]) -> str:
    """One line per network, one column per system: seconds per step, measured, else published, else
    predicted.
    """
    systems = list(dict.fromkeys(row.label for row in rows))
    networks = list(dict.fromkeys(row.network for row in rows))
    cells = {(row.network, row.label): _compared(row) for row in rows}
    lines = [_line(["network", *systems]), _line(["---"] * (len(systems) + 1))]
    lines += [
        _line([n.replace("\n", ", "), *(cells.get((n, s), "") for s in systems)]) for n in networks
    ]
    return "\n".join(lines)


def _compared(row: Row) -> str:
    """The measurement, and its difference from the prediction of the day, and from today's if that
    differs.
    """
    said = _percent(row.error)
    that_day = _percent(row.error_that_day)
    if that_day and that_day != said:
        said = f"{that_day}, today {said}"
    return f"{row.seconds:.2f}" + (f" ({said})" if said else "")


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1f} %"


def as_csv(rows: Iterable[Row]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(
        [FIELDS, *(map(_cell, astuple(row)) for row in rows)]
    )
    return lines.getvalue().rstrip()


def as_json(rows: Iterable[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


FORMS = {"json": as_json, "csv": as_csv, "compare": as_comparison, None: as_markdown}
SHOWN = {NETWORKS: as_predicted_and_measured, **dict.fromkeys(BY_WIRE, by_wire.as_markdown)}


def draw(rows: Sequence[Any], path: Path) -> None:
    """One line per system over the networks: measured, else published, else predicted."""
    axes = (figure := new_figure()).subplots()
    for label in dict.fromkeys(row.label for row in rows):
        ours = [row for row in rows if row.label == label]
        axes.plot(
            [row.network for row in ours], [row.seconds for row in ours], marker="o", label=label
        )
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def layouts_text(
    name: str,
    mode: str,
    results: Path,
    form: str | None,
    png: Path | None,
    pages: Sequence[Path],
) -> str:
    """A table of `tables`: simulated, or measured if its layouts can be run."""
    table, source = SIMULATED[name], ROOT / f"scripts/published/{name}.csv"
    if mode not in table.MODES:
        raise ConfigError(f"{name} has no mode {mode!r}; use --mode {' or '.join(table.MODES)}")
    if form == "compare":
        raise ConfigError(
            f"{name} has layouts, no systems by network: --compare is of {TABLES[0]} alone"
        )
    shown: Any = {"sim": table, "real": on_gpus, "replay": replayed}[mode]
    parameters = table.PARAMETERS if mode == "sim" else ()
    match mode:
        case "sim":
            rows = table.simulated(source)
        case "real":
            rows = on_gpus.measured_rows(lines_of(results), table.published(source))
        case _:
            rows = replayed.replayed_rows(lines_of(results))
    if not rows:
        raise nothing_measured(
            name, mode, results, sweep=f"{name}_replay" if mode == "replay" else name
        )
    if png is not None:
        shown.draw(rows, figure := new_figure())
        figure.savefig(png, dpi=120)
    for page in pages:
        put_between_marks(page, name, mode, with_parameters(shown.note(rows), parameters))
    return as_text(rows, form, shown.note(rows), parameters)


def _cell(value: float | str | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _drawable(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Checks the path before the minutes of simulation."""
    if path is not None and not (path.suffix == ".png" and path.parent.is_dir()):
        raise click.BadParameter(f"{path} must end in .png and be in a folder that exists")
    return path


_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(TABLES))
@click.option(
    "--mode",
    type=click.Choice(["sim", "replay", "real"]),
    required=True,
    help="Where the seconds are from.",
)
@click.option(
    "--results",
    type=_FILE,
    multiple=True,
    help="What scripts/sweep.py wrote; default scripts/results/NAME.jsonl. Of a table by wire "
    "format it may be given several times.",
)
@click.option("--json", "form", flag_value="json", help="Print a list of rows.")
@click.option("--csv", "form", flag_value="csv", help="Print comma-separated values.")
@click.option(
    "--compare", "form", flag_value="compare", help="Print one line a network, one column a system."
)
@click.option("--png", type=_FILE, callback=_drawable, help="Also draw the rows into this file.")
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Also put what it comes to, or of a measured table the lines of --compare, between the "
    "marks of this page: docs/results.md, README.md.",
)
def main(
    name: str,
    mode: str,
    results: tuple[Path, ...],
    form: str | None,
    png: Path | None,
    page: tuple[Path, ...],
) -> None:
    results = results or (ROOT / f"scripts/results/{name}.jsonl",)
    try:
        if name in SIMULATED:
            click.echo(layouts_text(name, mode, only_one(name, results), form, png, page))
            return
        if name in MEASURED and mode != "replay":
            raise ConfigError(f"{name} has no mode {mode!r}; use --mode replay")
        rows = simulated(name) if mode == "sim" else measured_rows(name, mode, results)
        if png is not None:
            draw(rows, png)
        below = with_parameters(note(rows), PARAMETERS) if mode == "sim" else ""
        forms = by_wire.FORMS if name in BY_WIRE else FORMS
        shown = forms[form] if form == "compare" else SHOWN.get(name, as_comparison)
        for path in page:
            put_between_marks(path, name, mode, below or shown(rows))
    except DpipeError as error:
        click.echo(f"table: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(forms[form](rows))
    if below and form is None:
        click.echo(f"\n{below}")


if __name__ == "__main__":
    main()
