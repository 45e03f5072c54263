"""Tables by layout: seconds per iteration of tensor x pipeline x data parallel ranks, and the
errors of the predictions.

Every error is printed; errors of fitted rows are never part of a mean. The published values
scatter: neighbouring rows contradict each other, and the source itself questions two values.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tables.form import Parameter
from tables.iteration import Job, Machine, iteration_s
from tables.measured import Layout


@dataclass(frozen=True)
class Row:
    """Seconds per iteration. `published_s` is None if the source is blank or its run failed, as in
    `source_says`.
    """

    gpus: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    micro_batch: int
    precision: str
    recompute: str
    published_s: float | None
    predicted_s: float
    error_percent: float | None
    fitted: bool
    source_says: str


@dataclass(frozen=True)
class Case:
    """A row of the source, and the job and machine that stand for it. `published` is the row as it
    is in the source, with its seconds and its note.
    """

    job: Job
    machine: Machine
    published: dict[str, str]
    precision: str
    recompute: str
    fitted: bool = False

    @property
    def published_s(self) -> float | None:
        seconds = self.published["seconds_per_iteration"]
        return float(seconds) if seconds else None

    @property
    def layout(self) -> Layout:
        return self.job.layout(self.precision, self.recompute)


def row_of(case: Case) -> Row:
    job = case.job
    published = case.published_s
    predicted = iteration_s(job, case.machine)
    return Row(
        job.tensor_parallel * job.pipeline_parallel * job.data_parallel,
        job.data_parallel,
        job.tensor_parallel,
        job.pipeline_parallel,
        job.shape.micro_batch,
        case.precision,
        case.recompute,
        published,
        round(predicted, 3),
        percent(predicted, published),
        case.fitted,
        case.published["note"],
    )


def percent(predicted: float, published: float | None) -> float | None:
    """The error of the prediction."""
    if published is None:
        return None
    return round((predicted / published - 1) * 100, 1) + 0.0  # no minus zero


def note(rows: Sequence[Row]) -> str:
    fitted = sum(row.fitted for row in rows)
    errors = errors_of(row for row in rows if not row.fitted)
    if errors is None:
        return "The source has no figure here: what stands above is a prediction alone."
    return f"{fitted or 'None'} fitted in this table; {errors}."


def errors_of(rows: Iterable[Any]) -> str | None:
    """Mean, median, largest and count, in words; None if nothing was published."""
    errors = sorted(abs(row.error_percent) for row in rows if row.error_percent is not None)
    if not errors:
        return None
    mean = sum(errors) / len(errors)
    median = (errors[len(errors) // 2] + errors[(len(errors) - 1) // 2]) / 2
    return (
        f"{len(errors)} predicted: mean error {mean:.1f} %, median {median:.1f} %, "
        f"largest {errors[-1]:.1f} %"
    )


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Published over predicted seconds; they agree on the diagonal."""
    axes = figure.subplots()
    for precision, recompute in dict.fromkeys((row.precision, row.recompute) for row in rows):
        matching = [
            r
            for r in rows
            if (r.precision, r.recompute) == (precision, recompute) and r.published_s is not None
        ]
        axes.plot(
            [row.predicted_s for row in matching],
            [row.published_s for row in matching],
            "o",
            label=f"{precision}, recompute {recompute}",
        )
    most = max(max(row.predicted_s, row.published_s or 0) for row in rows)
    axes.plot([0, most], [0, most], "--", color="grey")
    axes.set_xlabel("predicted, seconds an iteration")
    axes.set_ylabel("published")
    axes.legend(fontsize="small")


def lines_of(source: Path) -> list[dict[str, str]]:
    with source.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def by_layout(
    cases: Callable[[Path], Iterator[Case]],
    parameters: Sequence[Parameter],
    *modes: str,
    simulated: Callable[[list[Case]], Sequence[Row]] = lambda cases: list(map(row_of, cases)),
    note: Callable[[Sequence[Any]], str] = note,
) -> SimpleNamespace:
    """A table (see `tables/__init__.py`) whose layouts can also be run on GPUs."""
    return SimpleNamespace(
        MODES=("sim", "real", *modes),
        PARAMETERS=parameters,
        simulated=lambda source: simulated(list(cases(source))),
        published=lambda source: {case.layout: case.published_s for case in cases(source)},
        note=note,
        draw=draw,
    )
