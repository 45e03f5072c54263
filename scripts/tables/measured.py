"""A table of what scripts/sweep.py measured on the GPUs of a machine, made from its result lines.

Each measured row stands beside the published value of the same layout, batch and precision, if
there is one. The source measured on its own GPUs, not on these.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The settings of a run, apart from its engine and device."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch: int
    batch_size: int
    precision: str
    recompute: str

    @property
    def label(self) -> str:
        ranks = f"{self.tensor_parallel} x {self.pipeline_parallel} x {self.data_parallel}"
        return f"{ranks}\nmicro-batch {self.micro_batch}\n{self.precision}"


_AS_MEASURED = (
    "engine",
    "schedule",
    "device",
    "gpus",
    "measured_s",
    "loss_difference",
    *Layout.__dataclass_fields__,
)


@dataclass(frozen=True)
class Row:
    """Seconds per iteration on `gpus` devices. `over_ours` is the ratio to dpipe's best on the same
    kind of device.
    """

    engine: str
    schedule: str
    device: str
    gpus: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch: int
    batch_size: int
    precision: str
    recompute: str
    published_s: float | None
    measured_s: float
    ms_per_sample: float
    over_ours: float | None
    memory_gb: float | None
    gpu_use_percent: int | None
    mfu: float | None
    loss_difference: float | None

    @property
    def layout(self) -> Layout:
        return Layout(**{name: getattr(self, name) for name in Layout.__dataclass_fields__})


def measured_rows(
    lines: Iterable[Mapping[str, Any]], published: Mapping[Layout, float | None]
) -> list[Row]:
    """The lines of real runs that have a layout, grouped by layout, in the order of measurement."""
    real = [line for line in lines if line["mode"] == "real" and "tensor_parallel" in line]
    ours: dict[tuple[str, Layout], float] = {}
    for line in real:
        if line["engine"] == "dpipe":
            key = line["device"], _layout(line)
            ours[key] = min(line["measured_s"], ours.get(key, math.inf))
    order = {layout: number for number, layout in enumerate(dict.fromkeys(map(_layout, real)))}
    real.sort(key=lambda line: order[_layout(line)])
    return [
        _row(line, published.get(_layout(line)), ours.get((line["device"], _layout(line))))
        for line in real
    ]


def _layout(line: Mapping[str, Any]) -> Layout:
    return Layout(**{name: line[name] for name in Layout.__dataclass_fields__})


def _row(line: Mapping[str, Any], published_s: float | None, ours_s: float | None) -> Row:
    return Row(
        **{name: line[name] for name in _AS_MEASURED},
        published_s=published_s,
        ms_per_sample=round(line["measured_s"] / line["batch_size"] * 1e3, 3),
        over_ours=None if ours_s is None else round(line["measured_s"] / ours_s, 3),
        memory_gb=line.get("memory_gb"),
        gpu_use_percent=line.get("gpu_use_percent"),
        mfu=line.get("mfu"),
    )


def note(rows: Sequence[Row]) -> str:
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    beside = sum(row.published_s is not None for row in rows)
    return (
        f"{len(rows)} rows measured on {devices}; {beside} of them beside what the source "
        "published on its own GPUs."
    )


def draw(rows: Sequence[Row], figure: Any) -> None:
    """One line per engine over the layouts, and the published values."""
    axes = figure.subplots()
    labels = list(dict.fromkeys(row.layout.label for row in rows))
    for engine in dict.fromkeys(row.engine for row in rows):
        ours = {row.layout.label: row.measured_s for row in rows if row.engine == engine}
        axes.plot(range(len(labels)), [ours.get(label) for label in labels], "o", label=engine)
    published = {row.layout.label: row.published_s for row in rows}
    axes.plot(
        range(len(labels)),
        [published[label] for label in labels],
        "x",
        color="grey",
        label="published",
    )
    axes.set_xticks(range(len(labels)), labels, fontsize="x-small")
    axes.set_ylabel("seconds an iteration")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
