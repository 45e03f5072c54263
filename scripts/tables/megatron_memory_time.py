"""BERT and GPT-2 345M under Megatron, by sequence length and strategy: peak memory, and time over
the baseline's.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tables.megatron import V100, Shape, Strategy, layer_us, rank_memory

MICRO_BATCH = {
    "bert-345m": 2,
    "gpt2-345m": 4,
}  # not published; with other sizes no formula comes near
VOCABULARY = {"bert-345m": 30522, "gpt2-345m": 50257}
STRATEGIES = (
    "baseline",
    "sequence-parallel",
    "selective-recompute",
    "sequence-parallel+selective-recompute",
    "full-recompute",
)
# Rows whose time the host's three figures are fitted to: BERT on tensor x pipeline = 2 x 2.
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
    """MiB of the fullest GPU and time over the baseline of the same model, cut and length, in
    percent.

    `fitted` marks rows whose time was used; of memory none is. Errors: percent of the memory,
    points of the overhead.
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
    """What the errors come to; times of the fitted rows are left out of theirs."""
    memory = [abs(row.memory_error) for row in rows]
    time = [
        abs(row.overhead_error) for row in rows if not row.fitted and row.strategy != "baseline"
    ]
    bert, gpt2 = MICRO_BATCH["bert-345m"], MICRO_BATCH["gpt2-345m"]
    return (
        f"Memory: mean error {sum(memory) / len(memory):.2f} %, largest {max(memory):.2f} %; no "
        "row is fitted, but the "
        f"micro-batch, {bert} of BERT and {gpt2} of GPT-2, is deduced. Time over the baseline: "
        "mean error "
        f"{sum(time) / len(time):.1f} points, largest {max(time):.1f}, fitted rows apart."
    )


def draw(rows: Sequence[Row], figure: Any) -> None:
    """A column of plots for each model and cut: time above, memory below, over the sequence
    length.
    """
    groups = list(
        dict.fromkeys((row.model, row.tensor_parallel, row.pipeline_parallel) for row in rows)
    )
    figure.set_size_inches(4 * len(groups), 8)
    axes = figure.subplots(2, len(groups), sharex=True)
    for column, group in enumerate(groups):
        ours = [
            row for row in rows if (row.model, row.tensor_parallel, row.pipeline_parallel) == group
        ]
        base = {row.sequence: row.published_ms for row in ours if row.strategy == "baseline"}
        for number, strategy in enumerate(STRATEGIES):
            line = [row for row in ours if row.strategy == strategy]
            lengths, colour = [row.sequence for row in line], f"C{number}"
            times = [base[row.sequence] * (1 + row.predicted_overhead / 100) for row in line]
            axes[0, column].plot(lengths, [row.published_ms for row in line], "o", color=colour)
            axes[0, column].plot(lengths, times, "-", color=colour, label=strategy)
            axes[1, column].plot(lengths, [row.published_mib for row in line], "o", color=colour)
            axes[1, column].plot(
                lengths, [row.predicted_mib for row in line], "-", color=colour, label=strategy
            )
        axes[0, column].set_title(
            f"{group[0]}, tensor {group[1]} x pipeline {group[2]}", fontsize="small"
        )
        axes[1, column].set_xlabel("sequence length")
    axes[0, 0].set_ylabel("ms an iteration (points: published)")
    axes[1, 0].set_ylabel("MiB of the fullest GPU (points: published)")
    axes[1, 0].legend(fontsize="x-small")


def _group(line: dict[str, str]) -> tuple[str, ...]:
    return tuple(
        line[key] for key in ("model", "tensor_parallel", "pipeline_parallel", "sequence_length")
    )


def _row(line: dict[str, str], baseline: dict[str, str]) -> Row:
    model, t, p = line["model"], int(line["tensor_parallel"]), int(line["pipeline_parallel"])
    sequence, strategy = int(line["sequence_length"]), cast(Strategy, line["strategy"])
    shape = Shape(
        24, 1024, 16, sequence, VOCABULARY[model], MICRO_BATCH[model], bert=model.startswith("bert")
    )
    published, predicted = (
        float(line["peak_memory_mb"]),
        rank_memory(shape, t, p, strategy).total / MIB,
    )
    overhead = (float(line["time_ms"]) / float(baseline["time_ms"]) - 1) * 100
    base, ours = (sum(layer_us(shape, t, kind, V100)) for kind in ("baseline", strategy))
    foreseen = (ours / base - 1) * 100
    return Row(
        model=model,
        tensor_parallel=t,
        pipeline_parallel=p,
        sequence=sequence,
        strategy=strategy,
        published_mib=published,
        predicted_mib=round(predicted, 1),
        memory_error=round((predicted / published - 1) * 100, 2),
        published_ms=float(line["time_ms"]),
        published_overhead=round(overhead, 1),
        predicted_overhead=round(foreseen, 1),
        overhead_error=round(foreseen - overhead, 1),
        fitted=(model, t, p) == ("bert-345m", 2, 2) and (sequence, strategy) in FITTED,
    )
