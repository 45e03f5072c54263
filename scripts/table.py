#!/usr/bin/env python3
"""A published table, what the simulator predicts for it, and what was measured.

\b
    scripts/table.py gpt3xl_gpipe_network --mode sim
        predicted from network profiles; takes minutes
    scripts/table.py gpt3xl_gpipe_network --mode replay
        measured by scripts/sweep.py on replay stages
    scripts/table.py gpt3xl_gpipe_network --mode real --json
        measured on a real model
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
from pathlib import Path
from typing import Any

import click
from tables import SIMULATED, micro_batches, replayed, tcp
from tables import measured as on_gpus
from tables.form import Parameter, as_text, with_parameters

from dpipe.errors import ConfigError, DpipeError
from dpipe.network.link import Link, Network
from dpipe.network.profile import load_network, parse_network
from dpipe.schedule.exchange import exchange
from dpipe.schedule.generate import generate, schedule_names
from dpipe.search.auto import search
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.simulate import simulate
from dpipe.wire.format import wire_bytes

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("gpt3xl_gpipe_network", *SIMULATED)

# GPT-3 XL in 12 stages, batch 64, micro-batch 1.
NUM_STAGES, NUM_MICROBATCHES = 12, 64
FORWARD_US = micro_batches.FORWARD_MS.value * 1e3
BACKWARD_US = micro_batches.BACKWARD_MS.value * 1e3
MESSAGE_VALUES = 2048 * 2048  # sequence x width: 16 MiB in float32

LOCAL_SGD_ENGINE = "dpipe local-sgd"
WAYS = [("dpipe", "1f1b"), ("dpipe", "zero-bubble"), ("dpipe", "auto")]
REPLICATED_WAYS = [("dpipe", "auto"), (LOCAL_SGD_ENGINE, "auto")]
WIRES = {
    "fp32": "none",
    "bf16": "bf16",
    "int8": "int8",
}  # as the table says it: as the configuration says it

# Four replicas: the published system reduces to one of them and broadcasts back, and overlaps
# nothing.
PARAMETER_BYTES = (626_000_000, *(400_000_000,) * (NUM_STAGES - 1))
CENTRAL, ALL_REDUCE, LOCAL_SGD = "central", "all-reduce", "local-sgd"
INNER_STEPS = 100  # of local SGD, between two steps at which replicas agree
PIECE_BYTES = Parameter("piece that a reduce passes on", 2**22, "bytes", "nominal: NCCL's buffer")
PARAMETERS = (*micro_batches.PARAMETERS, PIECE_BYTES)
NUM_PARTS = 16  # of a stage, in dpipe's own exchanges


@dataclass(frozen=True)
class Row:
    """One way to train on one network, in seconds a step. `published_s` is what the source says of
    that system.
    """

    delay_ms: float | None  # None where the links of a network differ
    bandwidth_gbps: float | None
    data_parallel: int
    engine: str
    schedule: str
    wire: str
    published_s: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None

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
        """The difference of the measured (else published) step from the predicted one, in
        percent.
        """
        happened = self.published_s if self.measured_s is None else self.measured_s
        return (
            None
            if happened is None or self.predicted_s is None
            else (happened / self.predicted_s - 1) * 100
        )


FIELDS = tuple(field.name for field in fields(Row))


def published(name: str) -> list[Row]:
    """The source's rows: a pipeline alone, and with a parameter server beside it."""
    with (ROOT / f"scripts/published/{name}.csv").open(encoding="utf-8") as lines:
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

    The published system's messages find its sockets quiet, and these have no window of their own:
    the window of the profile says as much, deduced from the last row of the table.
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


def with_prediction(row: Row, network: Network | None = None) -> Row:
    """The simulated step, by default on the published network. The stage times are the only other
    input.
    """
    network = network or published_network(row)
    network.check(NUM_STAGES * row.data_parallel)
    cost, replicas = cost_of(row.wire), replicas_of(row)
    local = row.engine == LOCAL_SGD_ENGINE
    if row.schedule == "auto":
        schedule = search(
            NUM_STAGES, NUM_MICROBATCHES, cost, network, replicas=None if local else replicas
        )
    else:
        schedule = generate(row.schedule, NUM_STAGES, NUM_MICROBATCHES)
    seconds = simulate(schedule, cost, network, replicas=replicas).step_us / 1e6
    if local:
        apart = simulate(schedule, cost, network).step_us / 1e6
        seconds = (seconds + (INNER_STEPS - 1) * apart) / INNER_STEPS
    return replace(row, predicted_s=round(seconds, 3))


def cost_of(wire: str) -> Cost:
    """The calibrated stages with `wire` between them and between their replicas."""
    message = wire_bytes(WIRES[wire], MESSAGE_VALUES)
    gradients = tuple(wire_bytes(WIRES[wire], size // 4) for size in PARAMETER_BYTES)
    return replace(
        Cost.uniform(NUM_STAGES, FORWARD_US, BACKWARD_US, message), reduce_bytes=gradients
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
        for wire in WIRES
    ]
    with ProcessPoolExecutor() as pool:
        return [*pool.map(with_prediction, source), *pool.map(with_prediction, ours)]


def measured(name: str, mode: str, results: Path) -> list[Row]:
    """The lines of `mode` that scripts/sweep.py has written, after the published rows to compare
    with.

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


def lines_of(results: Path) -> list[dict[str, Any]]:
    """The lines that scripts/sweep.py has written, if any. Raises `ConfigError` naming a damaged
    line.
    """
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
    """A measured line with today's prediction; with that of its day if it is not one of this
    table's pipelines.
    """
    row = Row(**{key: line[key] for key in FIELDS})
    replays_the_table = line["mode"] == "replay" and row.schedule in schedule_names()
    return with_prediction(row, measured_network(line)) if replays_the_table else row


def as_markdown(rows: Sequence[Row]) -> str:
    lines = [_line([*FIELDS, "error"]), _line(["---"] * (len(FIELDS) + 1))]
    lines += [
        _line([*map(_cell, astuple(row)), "" if row.error is None else f"{row.error:+.1f} %"])
        for row in rows
    ]
    return "\n".join(lines)


def note(rows: Sequence[Row]) -> str:
    """What the errors of the published system's rows come to, but for the fitted one."""
    _, *others = [row for row in rows if row.engine == "published"]
    errors = [abs(row.error) for row in others if row.error is not None]
    mean = sum(errors) / len(errors)
    return (
        f"Of the published system's rows the first is fitted; {len(errors)} predicted: mean error "
        f"{mean:.1f} %, largest {max(errors):.1f} %."
    )


def as_comparison(rows: Sequence[Row]) -> str:
    """One line a network, one column a system: seconds a step, measured, else published, else
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
    return f"{row.seconds:.2f}" + ("" if row.error is None else f" ({row.error:+.1f} %)")


def put_between_marks(path: Path, name: str, mode: str, text: str) -> None:
    """Replace what is between the two marks in `path`. Raises `ConfigError` if one is missing."""
    begin, end = f"<!-- {name} {mode} -->", "<!-- end -->"
    before, begin_mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, end_mark, after = rest.partition(end)
    if not (begin_mark and end_mark):
        raise ConfigError(
            f"{path} has no lines {begin} and {end} for the comparison to stand between"
        )
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def as_csv(rows: Iterable[Row]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(
        [FIELDS, *(map(_cell, astuple(row)) for row in rows)]
    )
    return lines.getvalue().rstrip()


def as_json(rows: Iterable[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A line a system over the networks: measured, else published, else predicted."""
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


def new_figure() -> Any:
    """Raises `ConfigError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "--png needs matplotlib; install dpipe with the extra: pip install 'dpipe[plot]'"
        ) from None
    return Figure(figsize=(9, 5), layout="constrained")


def layouts_text(
    name: str, mode: str, results: Path, form: str | None, png: Path | None, page: Path | None
) -> str:
    """A table of `tables`: simulated, or measured where its layouts can be run."""
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
    if page is not None:
        put_between_marks(page, name, mode, with_parameters(shown.note(rows), parameters))
    return as_text(rows, form, shown.note(rows), parameters)


def _cell(value: float | str | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _drawable(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Checked here, so that a mistake does not show only after minutes of simulation."""
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
    "--results", type=_FILE, help="What scripts/sweep.py wrote; default scripts/results/NAME.jsonl."
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
    help="Also put what it comes to, or of a measured table the lines of --compare, between the "
    "marks of this page: docs/results.md.",
)
def main(
    name: str,
    mode: str,
    results: Path | None,
    form: str | None,
    png: Path | None,
    page: Path | None,
) -> None:
    results = results or ROOT / f"scripts/results/{name}.jsonl"
    try:
        if name in SIMULATED:
            click.echo(layouts_text(name, mode, results, form, png, page))
            return
        rows = simulated(name) if mode == "sim" else measured(name, mode, results)
        if png is not None:
            draw(rows, png)
        below = with_parameters(note(rows), PARAMETERS) if mode == "sim" else ""
        if page is not None:
            put_between_marks(page, name, mode, below or as_comparison(rows))
    except DpipeError as error:
        click.echo(f"table: {error}", err=True)
        sys.exit(error.exit_code)
    forms = {"json": as_json, "csv": as_csv, "compare": as_comparison}
    click.echo(forms.get(form or "", as_markdown)(rows))
    if below and form is None:
        click.echo(f"\n{below}")


if __name__ == "__main__":
    main()
