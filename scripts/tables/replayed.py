"""A table of what scripts/sweep.py measured on replay stages over networks, made from its result
lines.

It shows the cost of tensor parallelism over a slow link: the same ranks in tensor-parallel groups,
as pipeline stages, and as both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Seconds per step of `tensor_parallel` x `pipeline_parallel` ranks, measured and predicted."""

    delay_ms: float
    bandwidth_gbps: float
    tensor_parallel: int
    pipeline_parallel: int
    engine: str
    schedule: str
    predicted_s: float
    measured_s: float
    error_percent: float
    over_pipeline: float | None

    @property
    def label(self) -> str:
        return f"{self.engine} {self.schedule} {self.tensor_parallel} x {self.pipeline_parallel}"

    @property
    def network(self) -> str:
        return f"{self.delay_ms:g} ms\n{self.bandwidth_gbps:g} Gbit/s"


def replayed_rows(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The lines of replay runs that have a layout. `over_pipeline` is the ratio to the fastest
    without tensor parallelism.
    """
    replayed = [line for line in lines if line["mode"] == "replay" and "tensor_parallel" in line]
    alone: dict[Any, float] = {}
    for line in replayed:
        if line["tensor_parallel"] == 1:
            alone[_network(line)] = min(
                line["measured_s"], alone.get(_network(line), line["measured_s"])
            )
    return [_row(line, alone.get(_network(line))) for line in replayed]


def _network(line: Mapping[str, Any]) -> tuple[float, float]:
    return line["delay_ms"], line["bandwidth_gbps"]


def _row(line: Mapping[str, Any], pipeline_s: float | None) -> Row:
    measured, predicted = line["measured_s"], line["predicted_s"]
    return Row(
        delay_ms=line["delay_ms"],
        bandwidth_gbps=line["bandwidth_gbps"],
        tensor_parallel=line["tensor_parallel"],
        pipeline_parallel=line["pipeline_parallel"],
        engine=line["engine"],
        schedule=line["schedule"].partition(",")[0],
        predicted_s=predicted,
        measured_s=measured,
        error_percent=round((measured / predicted - 1) * 100, 1),
        over_pipeline=None if pipeline_s is None else round(measured / pipeline_s, 2),
    )


def note(rows: Sequence[Row]) -> str:
    errors = [abs(row.error_percent) for row in rows]
    mean = sum(errors) / len(rows)
    return (
        f"{len(rows)} rows measured on replayed stages; measured from predicted: mean {mean:.1f} %."
    )


def draw(rows: Sequence[Row], figure: Any) -> None:
    """One line per layout over the networks."""
    axes = figure.subplots()
    for label in dict.fromkeys(row.label for row in rows):
        ours = [row for row in rows if row.label == label]
        axes.plot(
            [row.network for row in ours], [row.measured_s for row in ours], marker="o", label=label
        )
    axes.set_ylabel("seconds a step")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
