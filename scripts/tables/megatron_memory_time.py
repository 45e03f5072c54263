"""BERT and GPT-2 345M under Megatron on eight V100, by sequence length and strategy: peak memory,
time, and time over the baseline's.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tables.devices import V100_FP16_TERAFLOPS, V100_MEMORY_RATE, DeviceParameters
from tables.form import Parameter
from tables.iteration import Job, Machine, iteration_s
from tables.megatron import Shape, Strategy, layer_us, rank_memory

# Not published. Only these sizes agree with the published memory.
BERT_MICRO_BATCH = Parameter("micro-batch of BERT", 2, "", "deduced from the memory of all rows")
GPT2_MICRO_BATCH = Parameter("micro-batch of GPT-2", 4, "", "deduced from the memory of all rows")
MICRO_BATCH = {
    "bert-345m": int(BERT_MICRO_BATCH.value),
    "gpt2-345m": int(GPT2_MICRO_BATCH.value),
}
BATCH = Parameter("sequences of an iteration", 16, "", "deduced from the times of all rows")
_ON = "fitted on the four marked rows of BERT on 2 x 2, their time over the baseline"
DEVICE = DeviceParameters(
    V100_FP16_TERAFLOPS,
    V100_MEMORY_RATE,
    Parameter("all-reduce in the machine", 60, "GB/s", "assumed"),
    Parameter("share of both that kernels reach", 0.6, "", "assumed"),
    host_us=Parameter("host, for an operation", 104, "us", _ON),
    collective_us=Parameter("host, for a collective", 155, "us", _ON),
    checkpoint_us=Parameter("host, for what is recomputed", 350, "us", _ON),
)
PARAMETERS = (BERT_MICRO_BATCH, GPT2_MICRO_BATCH, BATCH, *DEVICE.all)
V100 = DEVICE.device()
MACHINE = Machine(V100, network_gigabytes_per_s=math.inf)  # one machine: no network
VOCABULARY = {"bert-345m": 30522, "gpt2-345m": 50257}
STRATEGIES = (
    "baseline",
    "sequence-parallel",
    "selective-recompute",
    "sequence-parallel+selective-recompute",
    "full-recompute",
)
# The rows that the host's three times are fitted to: BERT on tensor x pipeline = 2 x 2.
FITTED = {
    (512, "baseline"),
    (2048, "baseline"),
    (512, "sequence-parallel"),
    (512, "selective-recompute"),
}
MIB = 2**20

MODES = ("sim",)


@dataclass(frozen=True)
class Row:
    """MiB of the fullest GPU, milliseconds per iteration, and the overhead over the baseline of the
    same model, layout and length in percent.

    `fitted` marks rows whose overhead was fitted to. Errors are in percent for memory and time, in
    percentage points for the overhead.
    """

    model: str
    tensor_parallel: int
    pipeline_parallel: int
    sequence: int
    strategy: str
    published_mib: float
    predicted_mib: float
    memory_error: float
    published_ms: float
    predicted_ms: float
    time_error: float
    published_overhead: float
    predicted_overhead: float
    overhead_error: float
    fitted: bool


def simulated(source: Path) -> list[Row]:
    """The published rows, in the source's order, the baseline of each group first."""
    with source.open(encoding="utf-8") as lines:
        published = list(csv.DictReader(lines))
    baselines = {_group(line): line for line in published if line["strategy"] == "baseline"}
    return [_row(line, baselines[_group(line)]) for line in published]


def note(rows: Sequence[Row]) -> str:
    """The errors in words; the overheads of fitted rows are left out."""
    memory = [abs(row.memory_error) for row in rows]
    time = [abs(row.time_error) for row in rows]
    overhead = [
        abs(row.overhead_error) for row in rows if not row.fitted and row.strategy != "baseline"
    ]
    return (
        f"Memory, {_errors(memory, '%')}: nothing is fitted. Time, {_errors(time, '%')}: no time "
        "is fitted, but overheads of four rows. Time over the baseline, "
        f"{_errors(overhead, 'points')}, fitted rows and baselines apart."
    )


def _errors(values: Sequence[float], unit: str) -> str:
    mean = sum(values) / len(values)
    return f"{len(values)} rows: mean error {mean:.1f} {unit}, largest {max(values):.1f} {unit}"


def draw(rows: Sequence[Row], figure: Any) -> None:
    """A column of plots for each model and layout: time above, memory below, over the sequence
    length.
    """
    columns: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        layout = (row.model, row.tensor_parallel, row.pipeline_parallel)
        columns.setdefault(layout, []).append(row)
    figure.set_size_inches(4 * len(columns), 8)
    axes = figure.subplots(2, len(columns), sharex=True)
    for column, (layout, inside) in enumerate(columns.items()):
        time, memory = axes[:, column]
        for number, strategy in enumerate(STRATEGIES):
            of_strategy = [row for row in inside if row.strategy == strategy]
            _draw_strategy(of_strategy, time, memory, f"C{number}")
        model, t, p = layout
        time.set_title(f"{model}, tensor {t} x pipeline {p}", fontsize="small")
        memory.set_xlabel("sequence length")
    axes[0, 0].set_ylabel("ms an iteration (points: published)")
    axes[1, 0].set_ylabel("MiB of the fullest GPU (points: published)")
    axes[1, 0].legend(fontsize="x-small")


def _draw_strategy(rows: Sequence[Row], time: Any, memory: Any, colour: str) -> None:
    """Published values as points, predictions as a line."""
    lengths = [row.sequence for row in rows]
    label = rows[0].strategy
    time.plot(lengths, [row.published_ms for row in rows], "o", color=colour)
    time.plot(lengths, [row.predicted_ms for row in rows], "-", color=colour, label=label)
    memory.plot(lengths, [row.published_mib for row in rows], "o", color=colour)
    memory.plot(lengths, [row.predicted_mib for row in rows], "-", color=colour, label=label)


def _group(line: dict[str, str]) -> tuple[str, ...]:
    return tuple(
        line[key] for key in ("model", "tensor_parallel", "pipeline_parallel", "sequence_length")
    )


def _row(line: dict[str, str], baseline: dict[str, str]) -> Row:
    job = _job_of(line)
    published_mib = float(line["peak_memory_mb"])
    published_ms = float(line["time_ms"])
    published_overhead = _over(published_ms, float(baseline["time_ms"]))
    predicted_mib = _memory_mib(job)
    predicted_ms = iteration_s(job, MACHINE) * 1e3
    predicted_overhead = _over(_layer_us(job, job.strategy), _layer_us(job, "baseline"))
    return Row(
        model=line["model"],
        tensor_parallel=job.tensor_parallel,
        pipeline_parallel=job.pipeline_parallel,
        sequence=job.shape.sequence,
        strategy=job.strategy,
        published_mib=published_mib,
        predicted_mib=round(predicted_mib, 1),
        memory_error=round(_over(predicted_mib, published_mib), 2),
        published_ms=published_ms,
        predicted_ms=round(predicted_ms, 1),
        time_error=round(_over(predicted_ms, published_ms), 1),
        published_overhead=round(published_overhead, 1),
        predicted_overhead=round(predicted_overhead, 1),
        overhead_error=round(predicted_overhead - published_overhead, 1),
        fitted=_is_fitted(line["model"], job),
    )


def _job_of(line: dict[str, str]) -> Job:
    """On eight GPUs, which the replicas fill."""
    model = line["model"]
    t = int(line["tensor_parallel"])
    p = int(line["pipeline_parallel"])
    shape = Shape(
        24,
        1024,
        16,
        int(line["sequence_length"]),
        VOCABULARY[model],
        MICRO_BATCH[model],
        bert=model.startswith("bert"),
    )
    strategy = cast(Strategy, line["strategy"])
    return Job(shape, t, p, 8 // (t * p), int(BATCH.value), strategy)


def _memory_mib(job: Job) -> float:
    held = rank_memory(job.shape, job.tensor_parallel, job.pipeline_parallel, job.strategy)
    return held.total / MIB


def _layer_us(job: Job, strategy: Strategy) -> float:
    """Forward and backward of a layer."""
    return sum(layer_us(job.shape, job.tensor_parallel, strategy, V100))


def _is_fitted(model: str, job: Job) -> bool:
    layout = (model, job.tensor_parallel, job.pipeline_parallel)
    return layout == ("bert-345m", 2, 2) and (job.shape.sequence, job.strategy) in FITTED


def _over(value: float, base: float) -> float:
    """By how many percent `value` is above `base`."""
    return (value / base - 1) * 100
