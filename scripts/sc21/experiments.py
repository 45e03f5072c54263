"""Table 1 and figures 11 to 18 of Narayanan et al. 2021 as cases, with the paper's statements.

Sizes are from the scripts published with the paper (Megatron-LM, examples/sc21); those of strong
scaling are from its table 2. Sequences have 2048 tokens and the vocabulary 51,200 entries, with
full recomputation unless noted. Figures quoted from the paper are from memory, except for the last
row of table 1, which is in its abstract.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sc21.case import Case
from sc21.rows import Row


@dataclass(frozen=True)
class Experiment:
    """`finds` says in words what the rows show about the paper's `statement`; `y` is the plotted
    column.
    """

    title: str
    statement: str
    x_label: str
    cases: tuple[Case, ...]
    finds: Callable[[Sequence[Row]], str]
    y: str = "tflops"


# Billions of parameters: layers, width, heads, tensor, pipeline, GPUs, micro-batch, batch, stages
# per rank, TFLOP/s.
_TABLE_1 = {
    "1.7": (24, 2304, 24, 1, 1, 32, 16, 512, 1, 137),
    "3.6": (30, 3072, 32, 2, 1, 64, 16, 512, 1, 138),
    "7.5": (36, 4096, 32, 4, 1, 128, 16, 512, 1, 142),
    "18.4": (40, 6144, 48, 8, 1, 256, 8, 1024, 1, 135),
    "39.1": (48, 8192, 64, 8, 2, 512, 4, 1536, 1, 138),
    "76.1": (60, 10240, 80, 8, 4, 1024, 2, 1792, 3, 140),
    "145.6": (80, 12288, 96, 8, 8, 1536, 2, 2304, 2, 148),
    "310.1": (96, 16384, 128, 8, 16, 1920, 1, 2160, 2, 155),
    "529.6": (105, 20480, 128, 8, 35, 2520, 1, 2520, 3, 163),
    "1008": (128, 25600, 160, 8, 64, 3072, 1, 3072, 1, 163),
}
# The efficiency in cluster.py is fitted to this row, because it has only data parallelism.
FITTED = "1.7"


def table_1() -> Iterator[Case]:
    for size, (layers, width, heads, t, p, gpus, micro, batch, each, tflops) in _TABLE_1.items():
        data = gpus // (t * p)
        case = Case(
            "", size, layers, width, heads, t, p, data, micro, batch, each, published=tflops
        )
        yield replace(case, fitted=size == FITTED)


def strong_scaling() -> Iterator[Case]:
    """The two models of table 2, with the same batch on more GPUs."""
    for data, tflops in ((4, 153), (8, 149), (16, 141)):
        yield Case("174.6", str(96 * data), 96, 12288, 96, 8, 12, data, 1, 1536, published=tflops)
    for data, tflops in ((2, 171), (4, 167), (8, 159)):
        yield Case(
            "529.6", str(280 * data), 105, 20480, 128, 8, 35, data, 1, 2240, published=tflops
        )


def figure_11() -> Iterator[Case]:
    for batch in (8, 128):
        for p in (1, 2, 4, 8):
            yield Case(f"batch {batch}", str(p), 3 * p, 20480, 128, 8, p, 1, 1, batch)


def figure_12() -> Iterator[Case]:
    for series, each in (("non-interleaved", 1), ("interleaved", 4)):
        for batch in range(12, 61, 12):
            yield Case(series, str(batch), 96, 12288, 96, 8, 12, 1, 1, batch, each)


def figure_13() -> Iterator[Case]:
    for batch in (32, 128):
        for p in (2, 4, 8, 16, 32):
            yield Case(f"batch {batch}", f"{p}, {64 // p}", 32, 20480, 128, 64 // p, p, 1, 1, batch)


def figure_14() -> Iterator[Case]:
    for batch in (32, 512):
        for p in (2, 4, 8, 16, 32):
            yield Case(f"batch {batch}", f"{p}, {64 // p}", 32, 3840, 32, 1, p, 64 // p, 1, batch)


def figure_15() -> Iterator[Case]:
    for batch in (32, 128, 512):
        for t in (2, 4, 8, 16, 32):
            yield Case(f"batch {batch}", f"{t}, {64 // t}", 32, 3840, 32, t, 1, 64 // t, 1, batch)


def figure_16() -> Iterator[Case]:
    for batch in (128, 512):
        for micro in (1, 2, 4, 8):
            yield Case(f"batch {batch}", str(micro), 32, 15360, 128, 8, 8, 1, micro, batch)


def figure_17() -> Iterator[Case]:
    for series, again in (("recomputed", True), ("kept", False)):
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            yield Case(series, str(batch), 80, 12288, 96, 8, 16, 1, 1, batch, recompute=again)


def figure_18() -> Iterator[Case]:
    for series, scatters in (("whole", False), ("scattered", True)):
        for batch in range(12, 61, 12):
            yield Case(
                series, str(batch), 96, 12288, 96, 8, 12, 1, 1, batch, 4, scatter_gather=scatters
            )


def _largest_error(rows: Sequence[Row]) -> str:
    errors = [
        abs(row.error_percent) for row in rows if row.error_percent is not None and not row.fitted
    ]
    mean = sum(errors) / len(errors)
    return f"mean error {mean:.1f} %, largest {max(errors):.1f} %, without fitted rows"


def _ends(rows: Sequence[Row]) -> str:
    """The last point of each line relative to its first."""
    shares = {series: line[-1].tflops / line[0].tflops for series, line in _by_series(rows).items()}
    return "; ".join(
        f"{series}: {share:.2f} of the first at the last" for series, share in shares.items()
    )


def _best(rows: Sequence[Row]) -> str:
    tops = {
        series: max(line, key=lambda row: row.tflops) for series, line in _by_series(rows).items()
    }
    return "; ".join(
        f"{series}: best at {row.x}, {row.tflops:.0f} TFLOP/s" for series, row in tops.items()
    )


def _gains(rows: Sequence[Row]) -> str:
    """The gain of the second line over the first at each point."""
    first, second = _by_series(rows).items()
    pairs = zip(first[1], second[1], strict=True)
    gains = ", ".join(
        f"{b.x}: {(b.sequences_per_s / a.sequences_per_s - 1) * 100:+.1f} %" for a, b in pairs
    )
    return f"{second[0]} over {first[0]} by batch: {gains}"


def _recomputation(rows: Sequence[Row]) -> str:
    again, kept = _by_series(rows).values()
    fitting = [row for row in kept if row.fits]
    if not fitting:
        return "without recomputation nothing fits"
    slower = min(
        a.sequences_per_s / b.sequences_per_s - 1 for a, b in zip(again, fitting, strict=False)
    )
    best, most = (max(row.sequences_per_s for row in line) for line in (fitting, again))
    return (
        f"recomputing costs up to {-slower * 100:.0f} % where both fit; without it batches up to "
        f"{fitting[-1].x} fit; the best with it is {most / best:.2f} times the best without"
    )


def _by_series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.series, []).append(row)
    return lines


def _of(
    title: str,
    x_label: str,
    cases: Callable[[], Iterator[Case]],
    finds: Callable[[Sequence[Row]], str],
    statement: str,
    y: str = "tflops",
) -> Experiment:
    return Experiment(title, statement, x_label, tuple(cases()), finds, y)


EXPERIMENTS = {
    "table_1": _of(
        "Weak scaling from 1.7 billion to a trillion parameters",
        "billions of parameters",
        table_1,
        _largest_error,
        "137 to 163 TFLOP/s per GPU; the largest model at 502 PFLOP/s on 3072 GPUs, 52 % of their "
        "peak",
    ),
    "strong_scaling": _of(
        "Strong scaling: the same batch on more GPUs",
        "GPUs",
        strong_scaling,
        _largest_error,
        "153 to 141 TFLOP/s per GPU (174.6 billion parameters), 171 to 159 (529.6 billion) on four "
        "times the GPUs",
    ),
    "figure_11": _of(
        "Weak scaling of pipeline parallelism",
        "pipeline stages",
        figure_11,
        _ends,
        "the larger batch scales better, because its bubble is spread over more micro-batches",
    ),
    "figure_12": _of(
        "The interleaved schedule, 175 billion parameters on 96 GPUs",
        "batch",
        figure_12,
        _gains,
        "interleaved is faster than non-interleaved, and the gap closes as the batch grows",
    ),
    "figure_13": _of(
        "Pipeline against tensor parallelism, 162.2 billion parameters on 64 GPUs",
        "pipeline, tensor parallel size",
        figure_13,
        _best,
        "best with a tensor parallel size of 8, the GPUs of one machine",
    ),
    "figure_14": _of(
        "Pipeline against data parallelism, 5.9 billion parameters on 64 GPUs",
        "pipeline, data parallel size",
        figure_14,
        _ends,
        "slower the larger the pipeline parallel size",
    ),
    "figure_15": _of(
        "Tensor against data parallelism, 5.9 billion parameters on 64 GPUs",
        "tensor, data parallel size",
        figure_15,
        _ends,
        "slower the larger the tensor parallel size",
    ),
    "figure_16": _of(
        "Micro-batch size, 91 billion parameters on 64 GPUs",
        "micro-batch",
        figure_16,
        _best,
        "best at a micro-batch of 2",
    ),
    "figure_17": _of(
        "Activation recomputation, 145 billion parameters on 128 GPUs",
        "batch",
        figure_17,
        _recomputation,
        "up to 33 % slower at small batches, and needed for the large ones, which are up to twice "
        "as fast as the best without it",
        y="sequences_per_s",
    ),
    "figure_18": _of(
        "The scatter/gather optimisation, 175 billion parameters on 96 GPUs, interleaved",
        "batch",
        figure_18,
        _gains,
        "up to 11 % faster",
    ),
}
