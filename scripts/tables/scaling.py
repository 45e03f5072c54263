"""GPT-3 XL and BERT 345M on machines of eight GPUs, tensor x pipeline x data parallel: seconds an
iteration.

Each stated device has as few fitted figures as there are rows marked `fitted`; every other error is
printed as it is. The sources scatter by as much as their own neighbouring rows differ, and two
values of theirs they doubt themselves.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tables.iteration import Job, Machine, iteration_s
from tables.measured import Layout
from tables.megatron import Device, Shape, Strategy

HOST_US = (
    20.0,
    40.0,
    100.0,
)  # assumed, and seldom the limit here: an operation, a collective, a checkpoint
# Nominal, except: efficiency, link and network in fp32 on one row each, efficiency in fp16 on one
# more.
V100_FP32 = Machine(
    Device(15.7, 450, 13.35, 1.004, *HOST_US), value_bytes=4, network_gigabytes_per_s=1.329
)
V100_FP16 = Machine(
    Device(125, 900, 13.35, 0.4936, *HOST_US), value_bytes=2, network_gigabytes_per_s=1.329
)
# Efficiency on the row of one GPU, the network on the row of 32; NVLink's rate is assumed.
A100 = Machine(
    Device(312, 1555, 200, 0.4471, *HOST_US), value_bytes=2, network_gigabytes_per_s=4.622
)

MEGATRON_FITTED = {  # batch, precision, micro-batch, tensor, pipeline, with full recomputation
    ("64", "fp32", "1", "1", "8"),
    ("64", "fp32", "1", "8", "1"),
    ("252", "fp32", "1", "1", "8"),
    ("252", "fp16", "1", "1", "8"),
}
BERT_FITTED = {"1", "32"}  # GPUs


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


def note(rows: Sequence[Row]) -> str:
    errors = [
        abs(row.error_percent) for row in rows if row.error_percent is not None and not row.fitted
    ]
    fitted = sum(row.fitted for row in rows)
    if not errors:
        return "The source has no figure here: what stands above is a prediction alone."
    mean = sum(errors) / len(errors)
    return (
        f"{len(errors)} rows predicted from {fitted} fitted in this table: mean error {mean:.1f} "
        "%, median "
        f"{sorted(errors)[len(errors) // 2]:.1f} %, largest {max(errors):.1f} %."
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
        published = [row.published_s for row in ours]
        axes.plot(
            [row.predicted_s for row in ours],
            published,
            "o",
            label=f"{precision}, recompute {recompute}",
        )
    most = max(max(row.predicted_s, row.published_s or 0) for row in rows)
    axes.plot([0, most], [0, most], "--", color="grey")
    axes.set_xlabel("predicted, seconds an iteration")
    axes.set_ylabel("published")
    axes.legend(fontsize="small")


def gpt3xl(
    micro_batch: int, t: int, p: int, d: int, batch: int, strategy: Strategy, **kind: Any
) -> Job:
    return Job(Shape(24, 2048, 16, 2048, 50257, micro_batch), t, p, d, batch, strategy, **kind)


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
        return (
            float(self.told["seconds_per_iteration"])
            if self.told["seconds_per_iteration"]
            else None
        )

    @property
    def layout(self) -> Layout:
        """As a measured line has it (`measured.py`)."""
        job = self.job
        ranks = (job.tensor_parallel, job.pipeline_parallel, job.data_parallel)
        return Layout(*ranks, job.shape.micro_batch, job.batch_size, self.precision, self.recompute)


def megatron_cases(source: Path) -> Iterator[Case]:
    for line in _lines(source):
        micro_batch, t, p, d = (
            int(line[key])
            for key in ("micro_batch_size", "tensor_parallel", "pipeline_parallel", "data_parallel")
        )
        again = line["recompute"] == "full"
        job = gpt3xl(
            micro_batch, t, p, d, int(line["batch_size"]), "full-recompute" if again else "baseline"
        )
        key = (line["batch_size"], line["precision"], line["micro_batch_size"], str(t), str(p))
        machine = V100_FP32 if line["precision"] == "fp32" else V100_FP16
        fitted = again and key in MEGATRON_FITTED
        yield Case(job, machine, line, line["precision"], line["recompute"], fitted)


def pipe_cases(source: Path, *, machines: int) -> Iterator[Case]:
    """PyTorch's Pipe: GPipe, every micro-batch but the last run again in backward; with FSDP over
    several machines.
    """
    for line in _lines(source):
        batch = 64 if machines == 1 else 252
        kind: dict[str, Any] = {"schedule": "gpipe", "gathers_parameters": machines > 1}
        job = gpt3xl(int(line["micro_batch_size"]), 1, 8, machines, batch, "full-recompute", **kind)
        yield Case(job, V100_FP32, line, "fp32", "full")


def bert_cases(source: Path) -> Iterator[Case]:
    for line in _lines(source):
        t, p, d, batch = (
            int(line[key])
            for key in (
                "tensor_parallel",
                "pipeline_parallel",
                "data_parallel",
                "global_batch_size",
            )
        )
        shape = Shape(24, 1024, 16, 512, 30522, int(line["micro_batch_size"]), bert=True)
        seconds = float(line["ms_per_sample"]) * batch / 1e3
        told = line | {
            "seconds_per_iteration": str(seconds),
            "note": f"{line['ms_per_sample']} ms a sample",
        }
        job = Job(shape, t, p, d, batch, "full-recompute")
        yield Case(job, A100, told, "fp16", "full", line["gpus"] in BERT_FITTED)


def row_of(case: Case) -> Row:
    job, published = case.job, case.published_s
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
        None
        if published is None
        else round((predicted / published - 1) * 100, 1) + 0.0,  # no minus zero
        case.fitted,
        case.told["note"],
    )


def _lines(source: Path) -> list[dict[str, str]]:
    with source.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _table(cases: Callable[[Path], Iterator[Case]], *modes: str) -> SimpleNamespace:
    return SimpleNamespace(
        MODES=("sim", "real", *modes),
        simulated=lambda source: [row_of(case) for case in cases(source)],
        published=lambda source: {case.layout: case.published_s for case in cases(source)},
        note=note,
        draw=draw,
    )


TABLES = {
    "gpt3xl_megatron": _table(megatron_cases, "replay"),
    "gpt3xl_torch_pipe": _table(partial(pipe_cases, machines=1)),
    "gpt3xl_torch_pipe_fsdp": _table(partial(pipe_cases, machines=6)),
    "megatron_bert345m_scaling": _table(bert_cases),
}
