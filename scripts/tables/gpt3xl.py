"""GPT-3 XL on p3.16xlarge machines with eight V100 of 16 GB: Megatron by layout and micro-batch,
and PyTorch's Pipe.

The source trained a classifier of question pairs with SGD: it has two classes, and no logits over
the vocabulary. Seventeen figures of these tables are for one machine and thirty for six. Five
numbers are fitted, each to one row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tables.devices import (
    V100_FP16_TERAFLOPS,
    V100_FP32_TERAFLOPS,
    V100_LINK_RATE,
    V100_MEMORY_GIB,
    V100_MEMORY_RATE,
)
from tables.form import Parameter
from tables.iteration import Job, Machine
from tables.megatron import Device, Shape, Strategy, rank_memory
from tables.scaling import Case, Row, by_layout, errors_of, lines_of, row_of

_ON_ONE = "fitted on batch 64, fp32, micro-batch 1, "
_ON_SIX = "fitted on batch 252, "
FP32_EFFICIENCY = Parameter("efficiency of a product in fp32", 0.7315, "", f"{_ON_ONE}1 x 8")
LATENCY_US = Parameter("latency of an all-reduce in a machine", 441.3, "us", f"{_ON_ONE}8 x 1")
NETWORK = Parameter("network of a machine", 2.568, "GB/s", f"{_ON_SIX}fp32, micro-batch 1, 8 x 1")
MESSAGE_US = Parameter(
    "a hop that leaves a machine, of its interface",
    3329,
    "us",
    f"{_ON_SIX}fp32, micro-batch 1, 1 x 8",
)
FP16_EFFICIENCY = Parameter(
    "efficiency of a product in fp16",
    0.4131,
    "",
    f"{_ON_SIX}fp16, recomputed, micro-batch 1, 1 x 8",
)
MEMORY_EFFICIENCY = Parameter("share of the memory's rate", 0.8, "", "assumed")
LIBRARIES_GIB = Parameter("context of CUDA and buffers of NCCL", 1.5, "GiB", "assumed")
WORDS = Parameter("words of the classifier", 28_996, "", "nominal: BERT's cased vocabulary")
MEGATRON_PARAMETERS = (
    FP32_EFFICIENCY,
    LATENCY_US,
    NETWORK,
    MESSAGE_US,
    FP16_EFFICIENCY,
    MEMORY_EFFICIENCY,
    V100_FP32_TERAFLOPS,
    V100_FP16_TERAFLOPS,
    V100_MEMORY_RATE,
    V100_LINK_RATE,
    V100_MEMORY_GIB,
    LIBRARIES_GIB,
    WORDS,
)


def p3_machine(precision: str) -> Machine:
    half = precision == "fp16"
    device = Device(
        (V100_FP16_TERAFLOPS if half else V100_FP32_TERAFLOPS).value,
        V100_MEMORY_RATE.value,
        V100_LINK_RATE.value,
        (FP16_EFFICIENCY if half else FP32_EFFICIENCY).value,
        MEMORY_EFFICIENCY.value,
        collective_latency_us=LATENCY_US.value,
    )
    return Machine(device, NETWORK.value, MESSAGE_US.value)


@dataclass(frozen=True)
class FittingRow(Row):
    """`contradicts` marks rows that no smooth model can explain (`contradicting`). `fits` says
    whether `memory_gib` of the fullest rank and the libraries' share fit into a GPU.
    """

    contradicts: bool
    memory_gib: float
    fits: bool


# Batch, precision, micro-batch, tensor, pipeline; all with full recomputation.
FITTED = {
    ("64", "fp32", "1", "1", "8"),
    ("64", "fp32", "1", "8", "1"),
    ("252", "fp32", "1", "8", "1"),
    ("252", "fp32", "1", "1", "8"),
    ("252", "fp16", "1", "1", "8"),
}


def gpt3xl(
    micro_batch: int,
    t: int,
    p: int,
    d: int,
    batch: int,
    strategy: Strategy,
    precision: str,
    **kind: Any,
) -> Job:
    """The model that the source trained: a classifier of question pairs, with SGD."""
    words = int(WORDS.value)
    value_bytes = 2 if precision == "fp16" else 4
    shape = Shape(
        24,
        2048,
        16,
        2048,
        words,
        micro_batch,
        classifies=True,
        value_bytes=value_bytes,
        adam=False,
    )
    return Job(shape, t, p, d, batch, strategy, **kind)


def megatron_cases(source: Path) -> Iterator[Case]:
    for line in lines_of(source):
        micro_batch, t, p, d = (
            int(line[key])
            for key in ("micro_batch_size", "tensor_parallel", "pipeline_parallel", "data_parallel")
        )
        again = line["recompute"] == "full"
        strategy: Strategy = "full-recompute" if again else "baseline"
        precision = line["precision"]
        job = gpt3xl(micro_batch, t, p, d, int(line["batch_size"]), strategy, precision)
        key = (line["batch_size"], line["precision"], line["micro_batch_size"], str(t), str(p))
        fitted = again and key in FITTED
        yield Case(job, p3_machine(precision), line, precision, line["recompute"], fitted)


def pipe_cases(source: Path, *, machines: int) -> Iterator[Case]:
    """PyTorch's Pipe: GPipe with recomputation of every micro-batch but the last; on several
    machines with FSDP.
    """
    for line in lines_of(source):
        batch = 64 if machines == 1 else 252
        micro_batch = int(line["micro_batch_size"])
        job = gpt3xl(
            micro_batch,
            1,
            8,
            machines,
            batch,
            "full-recompute",
            "fp32",
            schedule="gpipe",
            gathers_parameters=machines > 1,
            pipeline_inside=True,
        )
        yield Case(job, p3_machine("fp32"), line, "fp32", "full")


def with_memory(cases: Sequence[Case]) -> list[FittingRow]:
    marked = contradicting(cases)
    return [_with_memory(case, index in marked) for index, case in enumerate(cases)]


def _with_memory(case: Case, contradicts: bool) -> FittingRow:
    job = case.job
    held = rank_memory(
        job.shape, job.tensor_parallel, job.pipeline_parallel, job.strategy, job.num_microbatches
    )
    held_gib = held.total / 2**30
    fits = held_gib + LIBRARIES_GIB.value <= V100_MEMORY_GIB.value
    row = asdict(row_of(case))
    return FittingRow(**row, contradicts=contradicts, memory_gib=round(held_gib, 2), fits=fits)


def contradicting(cases: Sequence[Case]) -> set[int]:
    """Indices of two kinds of rows: pairs in which recomputation takes more than 1.5 times as long,
    although it adds only a third to the arithmetic; and rows that take over 1.2 times as long as
    both the row with half and the row with twice their micro-batch.
    """
    seconds = {case.layout: case.published_s for case in cases}
    marked = set()
    for index, case in enumerate(cases):
        layout = case.layout
        pair = [seconds.get(replace(layout, recompute=kind)) for kind in ("full", "none")]
        full, none = pair
        if full and none and full > 1.5 * none:
            marked.add(index)
        beside = [
            seconds.get(replace(layout, micro_batch=size))
            for size in (layout.micro_batch / 2, layout.micro_batch * 2)
        ]
        own = case.published_s
        if own and all(other and own > 1.2 * other for other in beside):
            marked.add(index)
    return marked


def megatron_note(rows: Sequence[FittingRow]) -> str:
    unseen = [row for row in rows if not row.fitted]
    smooth = [row for row in unseen if not row.contradicts]
    groups = {
        "Without the rows that contradict their neighbours": smooth,
        "of them on one machine": [row for row in smooth if row.gpus == 8],
        "of them on six": [row for row in smooth if row.gpus > 8],
        "With all rows": unseen,
    }
    errors = "; ".join(f"{name}, {errors_of(group)}" for name, group in groups.items())
    right = sum(row.fits == (row.published_s is not None) for row in rows)
    return (
        f"{sum(row.fitted for row in rows)} rows fitted, {sum(row.contradicts for row in rows)} "
        f"contradict their neighbours. {errors}. Whether it fits in 16 GB is right in {right} of "
        f"{len(rows)} rows."
    )


PIPE_PARAMETERS = (
    FP32_EFFICIENCY,
    MEMORY_EFFICIENCY,
    V100_FP32_TERAFLOPS,
    V100_MEMORY_RATE,
    V100_LINK_RATE,
    WORDS,
)
TABLES = {
    "gpt3xl_megatron": by_layout(
        megatron_cases, MEGATRON_PARAMETERS, "replay", simulated=with_memory, note=megatron_note
    ),
    "gpt3xl_torch_pipe": by_layout(partial(pipe_cases, machines=1), PIPE_PARAMETERS),
    "gpt3xl_torch_pipe_fsdp": by_layout(
        partial(pipe_cases, machines=6), (*PIPE_PARAMETERS, NETWORK)
    ),
}
