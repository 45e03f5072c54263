"""The result of a case: a row of a table, and a plot of many."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpipe.report.efficiency import mfu, peak_of
from sc21.case import Case

A100 = peak_of("A100")
A100_BYTES = 80e9


@dataclass(frozen=True)
class Row:
    """A case, measured or predicted.

    `tflops` per GPU include recomputation, as in the paper (Narayanan et al. 2021, equation 3);
    `model_tflops` and `mfu` do not. `memory_gb` is the peak of the fullest GPU, and `fits` says
    whether a GPU has that much; both are None if not known.
    """

    series: str
    x: str
    gpus: int
    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    batch: int
    seconds: float
    sequences_per_s: float
    tflops: float
    model_tflops: float
    mfu: float
    memory_gb: float | None
    fits: bool | None
    published_tflops: float | None
    error_percent: float | None
    fitted: bool


def row_of(case: Case, seconds: float, memory_gb: float | None) -> Row:
    assert A100 is not None
    done, model = (
        flops / seconds / case.gpus / 1e12 for flops in (case.done_flops, case.model_flops)
    )
    return Row(
        case.series,
        case.x,
        case.gpus,
        case.tensor,
        case.pipeline,
        case.data,
        case.micro_batch,
        case.batch,
        seconds,
        case.batch / seconds,
        done,
        model,
        mfu(model * 1e12, 1.0, A100, "bf16"),
        memory_gb,
        None if memory_gb is None else memory_gb * 1e9 <= A100_BYTES,
        case.published,
        None if case.published is None else round((done / case.published - 1) * 100, 1) + 0.0,
        case.fitted,
    )


def draw(rows: Sequence[Row], figure: Any, *, x_label: str, y: str, title: str) -> None:
    """One line per series. Crosses are published; open points do not fit into a GPU."""
    axes = figure.subplots()
    for series in dict.fromkeys(row.series for row in rows):
        points = [row for row in rows if row.series == series]
        (line,) = axes.plot(
            [row.x for row in points],
            [getattr(row, y) for row in points],
            "-",
            label=series or "dpipe",
        )
        for row in points:
            face = "none" if row.fits is False else line.get_color()
            axes.plot([row.x], [getattr(row, y)], "o", color=line.get_color(), markerfacecolor=face)
            if row.published_tflops is not None and y == "tflops":
                axes.plot([row.x], [row.published_tflops], "x", color=line.get_color())
    axes.set_xlabel(x_label)
    axes.set_ylabel({"tflops": "TFLOP/s per GPU", "sequences_per_s": "sequences per second"}[y])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize="medium")
    axes.legend(fontsize="small")
