"""Rows of tables by cut: seconds an iteration of tensor x pipeline x data parallel ranks, and how
far the predictions are from what was published.

Every error is printed as it is, and those of fitted rows are never counted. The sources scatter by
as much as their own neighbouring rows differ, and two values of theirs they doubt themselves.
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
    """Seconds an iteration. `published_s` is empty where the source is blank or the run failed, as
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
    """A row of the source, and what it is taken to be. `told` has the source's seconds and note
    under those names.
    """

    job: Job
    machine: Machine
    told: dict[str, str]
    precision: str
    recompute: str
    fitted: bool = False

    @property
    def published_s(self) -> float | None:
        told = self.told["seconds_per_iteration"]
        return float(told) if told else None

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
        case.told["note"],
    )


def percent(predicted: float, published: float | None) -> float | None:
    """How far the prediction is from what was published."""
    if published is None:
        return None
    return round((predicted / published - 1) * 100, 1) + 0.0  # no minus zero


def note(rows: Sequence[Row]) -> str:
    fitted = sum(row.fitted for row in rows)
    said = errors_of(row for row in rows if not row.fitted)
    if said is None:
        return "The source has no figure here: what stands above is a prediction alone."
    return f"{fitted or 'None'} fitted in this table; {said}."


def errors_of(rows: Iterable[Any]) -> str | None:
    """Mean, median, largest and count, in words; None where nothing was published."""
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
    """Published over predicted seconds; on the line they agree."""
    axes = figure.subplots()
    for precision, recompute in dict.fromkeys((row.precision, row.recompute) for row in rows):
        ours = [
            r
            for r in rows
            if (r.precision, r.recompute) == (precision, recompute) and r.published_s is not None
        ]
        axes.plot(
            [row.predicted_s for row in ours],
            [row.published_s for row in ours],
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
    """A table as `tables/__init__.py` describes it, whose layouts can be run on GPUs."""
    return SimpleNamespace(
        MODES=("sim", "real", *modes),
        PARAMETERS=parameters,
        simulated=lambda source: simulated(list(cases(source))),
        published=lambda source: {case.layout: case.published_s for case in cases(source)},
        note=note,
        draw=draw,
    )
