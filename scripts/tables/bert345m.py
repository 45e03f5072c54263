"""BERT 345M on 1 to 128 A100 under Megatron: an iteration split by Megatron's timers of the last
pipeline rank.

    first stage   [F0][F1][F2]..              ..[B2][B3][params]
    last stage    :...[F0]|[B0][F1]|[B1][F2]|[B2][F3]|[B3]|[params]:::::[embedding][optimizer]
                  receive                                          wait for B3 of the first stage

The layers are so small that the host is the limit: a layer takes the time to launch its kernels,
whatever the tensor parallel size. Where the job has several machines the hosts are slower: threads
that serve the network run on them, too.

At each | replicas wait for the slowest of them, because they average their losses, or gradients. It
is the later, the more it computed since they met, and by as much again where they are twice as
many. The optimizer's check for infinities waits for other ranks as well.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tables.form import Parameter
from tables.iteration import Crossings, Job, crossings
from tables.megatron import Shape, layer_parameters
from tables.scaling import errors_of, lines_of, percent

_ONE = "fitted on 1 GPU, "
_EIGHT = "fitted on 8 GPUs, "
_MORE = "fitted on 32 GPUs, "
FORWARD_MS = Parameter("a layer, forward", 0.9046, "ms", f"{_ONE}forward-compute")
BACKWARD_MS = Parameter("a layer, backward", 1.8904, "ms", f"{_ONE}backward-compute")
COLLECTIVE_MS = Parameter("a collective of a layer", 0.066, "ms", f"{_EIGHT}forward and backward")
COPY_RATE = Parameter("copy of gradients", 30.9, "million/ms", f"{_ONE}params-all-reduce")
MACHINE_RATE = Parameter("a ring in a machine", 51.3, "GB/s", f"{_EIGHT}params-all-reduce")
NETWORK_RATE = Parameter("a ring between machines", 8.21, "GB/s", f"{_MORE}params-all-reduce")
HOST = Parameter(
    "layers, where there are several machines", 1.097, "times", f"{_MORE}backward-compute"
)
SLOWEST = Parameter(
    "the slowest of twice as many replicas",
    0.0692,
    "of what it computed",
    f"{_MORE}forward-compute",
)
UPDATE_RATE = Parameter("update", 18.7, "million/ms", "fitted on 1 and 8 GPUs, optimizer")
UPDATE_MS = Parameter("update, in any case", 3.1, "ms", "fitted on 1 and 8 GPUs, optimizer")
CHECK_MS = Parameter(
    "check in one machine", 2.857, "ms", "fitted on 1 and 8 GPUs, unscale-and-check-inf"
)
WAIT_MS = Parameter("check over machines", 40.61, "ms", f"{_MORE}unscale-and-check-inf")
REST_MS = Parameter("what no timer has", 23.6, "ms", f"{_EIGHT}the iteration")
PARAMETERS = (
    FORWARD_MS,
    BACKWARD_MS,
    COLLECTIVE_MS,
    COPY_RATE,
    MACHINE_RATE,
    NETWORK_RATE,
    HOST,
    SLOWEST,
    UPDATE_RATE,
    UPDATE_MS,
    CHECK_MS,
    WAIT_MS,
    REST_MS,
)
_VALUE_BYTES = 2
_GPUS_OF_A_MACHINE = 8

# By part, the timers that add up to it.
TIMERS = {
    "forward": ("forward-compute",),
    "backward": ("backward-compute",),
    "waiting for neighbours": ("forward-recv", "backward-send", "backward-send-forward-recv"),
    "all-reduce of gradients": ("backward-params-all-reduce",),
    "all-reduce of the embedding": ("backward-embedding-all-reduce",),
    "optimizer": ("optimizer",),  # without the check, which is a part of its own
    "check for infinities": ("optimizer-unscale-and-check-inf",),
}
FITTED = {
    1: ("forward", "backward", "all-reduce of gradients", "optimizer", "check for infinities"),
    8: ("forward", "backward", "all-reduce of gradients", "optimizer", "check for infinities"),
    32: ("forward", "backward", "all-reduce of gradients", "check for infinities"),
}
FITTED_ITERATIONS = (1, 8, 32)  # numbers of GPUs
_APART = 1.2  # times: more than what neighbouring runs differ by


def job_of(line: dict[str, str]) -> Job:
    micro_batch = int(line["micro_batch_size"])
    shape = Shape(24, 1024, 16, 512, 30522, micro_batch, bert=True)
    cut = [int(line[f"{kind}_parallel"]) for kind in ("tensor", "pipeline", "data")]
    return Job(shape, *cut, int(line["global_batch_size"]), "full-recompute")


def parts_ms(job: Job) -> dict[str, float]:
    """The parts of TIMERS on the last pipeline rank."""
    across = crossings(job, _GPUS_OF_A_MACHINE)
    forward, backward = layers_ms(job, across)
    later = SLOWEST.value * math.log2(job.data_parallel) if across.rings else 0.0
    piped = job.pipeline_parallel > 1
    own = parameters(job) / 1e6
    return {
        "forward": job.num_microbatches * (forward + later * (backward + forward)),
        "backward": job.num_microbatches * backward,
        "waiting for neighbours": piped * (forward + job.num_microbatches * hop_ms(job, across)),
        "all-reduce of gradients": own / COPY_RATE.value + later * backward + ring_ms(job, across),
        "all-reduce of the embedding": piped * (backward + table_ms(job, across)),
        "optimizer": own / UPDATE_RATE.value + UPDATE_MS.value,
        "check for infinities": (WAIT_MS if across.rings else CHECK_MS).value,
    }


def layers_ms(job: Job, across: Crossings) -> tuple[float, float]:
    """Forward and backward of a stage and a micro-batch."""
    layers = job.shape.num_layers / job.pipeline_parallel
    if across.hops or across.rings:
        layers *= HOST.value
    collectives = 0.0
    if job.tensor_parallel > 1:
        collectives = 2 * COLLECTIVE_MS.value
    forward = layers * (FORWARD_MS.value + collectives)
    # Full recomputation repeats the collectives of forward.
    backward = layers * (BACKWARD_MS.value + 2 * collectives)
    return forward, backward


def parameters(job: Job) -> float:
    """Of a rank of the last stage, which has a copy of the embedding."""
    t = job.tensor_parallel
    blocks = job.shape.num_layers / job.pipeline_parallel * layer_parameters(job.shape, t)
    return blocks + job.shape.vocabulary(t) * job.shape.width


def ring_ms(job: Job, across: Crossings) -> float:
    """Each rank sends its gradients twice, less a share of 1/d (Patarasuk & Yuan 2009)."""
    d = job.data_parallel
    rate = (NETWORK_RATE if across.rings else MACHINE_RATE).value
    return 2 * (d - 1) / d * parameters(job) * _VALUE_BYTES / rate / 1e6


def hop_ms(job: Job, across: Crossings) -> float:
    """An activation and a gradient, both ways at the same time."""
    rate = (NETWORK_RATE if across.hops else MACHINE_RATE).value
    return job.shape.activation_bytes / rate / 1e6


def table_ms(job: Job, across: Crossings) -> float:
    """The first and the last stage sum the gradients of the embedding."""
    rate = (NETWORK_RATE if across.hops else MACHINE_RATE).value
    table = job.shape.vocabulary(job.tensor_parallel) * job.shape.width
    return table * _VALUE_BYTES / rate / 1e6


@dataclass(frozen=True)
class Row:
    """An iteration. `contradicts` marks what no smooth model can explain (`contradicting`)."""

    gpus: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    published_ms_per_sample: float
    published_ms: float
    predicted_ms: float
    error_percent: float
    fitted: bool
    contradicts: bool


def iterations(source: Path) -> list[Row]:
    lines = lines_of(source)
    marked = contradicting({int(line["gpus"]): _published_ms(line) for line in lines})
    return [_iteration(line, marked) for line in lines]


def _published_ms(line: dict[str, str]) -> float:
    return float(line["ms_per_sample"]) * int(line["global_batch_size"])


def contradicting(times_ms: Mapping[int, float]) -> set[int]:
    """The runs, by number of GPUs, that take over 1.2 times as long as both the run on half and the
    run on twice as many; and, beside those that do not, the runs that take as much less than both.
    """
    marked = set()
    others = dict(times_ms)
    for gpus, own_ms, beside_ms in _between(times_ms):
        if own_ms > _APART * max(beside_ms):
            marked.add(gpus)
            del others[gpus]
    for gpus, own_ms, beside_ms in _between(others):
        if _APART * own_ms < min(beside_ms):
            marked.add(gpus)
    return marked


def _between(times_ms: Mapping[int, float]) -> Iterator[tuple[int, float, tuple[float, float]]]:
    """Those that have a run on half and one on twice as many GPUs beside them."""
    for gpus, own_ms in times_ms.items():
        half = gpus // 2
        twice = 2 * gpus
        if half in times_ms and twice in times_ms:
            beside_ms = times_ms[half], times_ms[twice]
            yield gpus, own_ms, beside_ms


def _iteration(line: dict[str, str], marked: set[int]) -> Row:
    job = job_of(line)
    gpus = int(line["gpus"])
    published = _published_ms(line)
    predicted = sum(parts_ms(job).values()) + REST_MS.value
    return Row(
        gpus,
        job.data_parallel,
        job.tensor_parallel,
        job.pipeline_parallel,
        float(line["ms_per_sample"]),
        round(published, 2),
        round(predicted, 1),
        percent(predicted, published) or 0.0,
        gpus in FITTED_ITERATIONS,
        gpus in marked,
    )


@dataclass(frozen=True)
class PartRow:
    """One part of an iteration, in the timers of the last pipeline rank."""

    gpus: int
    part: str
    published_ms: float
    predicted_ms: float
    error_percent: float
    fitted: bool
    contradicts: bool


def parts(source: Path) -> list[PartRow]:
    timers: dict[int, dict[str, float]] = {}
    for line in lines_of(source):
        timers.setdefault(int(line["gpus"]), {})[line["timer"]] = float(line["milliseconds"])
    published = {gpus: _published_parts(of_run) for gpus, of_run in timers.items()}
    marked = {
        part: contradicting({gpus: of_run[part] for gpus, of_run in published.items()})
        for part in TIMERS
    }
    layouts = lines_of(source.with_name("megatron_bert345m_scaling.csv"))
    jobs = {int(line["gpus"]): job_of(line) for line in layouts}
    return [
        PartRow(
            gpus,
            part,
            round(measured[part], 2),
            round(predicted, 2),
            percent(predicted, measured[part]) or 0.0,
            part in FITTED.get(gpus, ()),
            gpus in marked[part],
        )
        for gpus, measured in published.items()
        for part, predicted in parts_ms(jobs[gpus]).items()
        if predicted
    ]


def _published_parts(timers: dict[str, float]) -> dict[str, float]:
    """Milliseconds."""
    parts = {}
    for part, names in TIMERS.items():
        parts[part] = sum(timers.get(name, 0.0) for name in names)
    parts["optimizer"] -= parts["check for infinities"]
    return parts


def note(rows: Sequence[Any]) -> str:
    unseen = [row for row in rows if not row.fitted]
    smooth = [row for row in unseen if not row.contradicts]
    return (
        f"{sum(row.fitted for row in rows)} fitted, {sum(row.contradicts for row in rows)} "
        f"contradict the runs beside them; without those {errors_of(smooth)}; with them "
        f"{errors_of(unseen)}."
    )


def parts_note(rows: Sequence[PartRow]) -> str:
    smooth = [row for row in rows if not (row.fitted or row.contradicts)]
    named = dict.fromkeys(row.part for row in smooth)
    groups = {part: [row for row in smooth if row.part == part] for part in named}
    errors = "; ".join(f"{part}, {errors_of(group)}" for part, group in groups.items())
    return f"{note(rows)} By part, without those: {errors}."


def draw(rows: Sequence[Any], figure: Any) -> None:
    """Published over predicted milliseconds; they agree on the diagonal."""
    axes = figure.subplots()
    for gpus in dict.fromkeys(row.gpus for row in rows):
        ours = [row for row in rows if row.gpus == gpus]
        predicted = [row.predicted_ms for row in ours]
        axes.plot(predicted, [row.published_ms for row in ours], "o", label=f"{gpus} GPUs")
    most = max(row.predicted_ms for row in rows)
    axes.plot([0, most], [0, most], "--", color="grey")
    axes.set_xlabel("predicted, ms")
    axes.set_ylabel("published")
    axes.legend(fontsize="small")


def published(source: Path) -> dict[Any, float]:
    """Seconds by the layout of a measured line."""
    return {
        job_of(line).layout("fp16", "full"): float(line["ms_per_sample"])
        * int(line["global_batch_size"])
        / 1e3
        for line in lines_of(source)
    }


TABLES = {
    "megatron_bert345m_scaling": SimpleNamespace(
        MODES=("sim", "real"),
        PARAMETERS=PARAMETERS,
        simulated=iterations,
        published=published,
        note=note,
        draw=draw,
    ),
    "megatron_bert345m_timers": SimpleNamespace(
        MODES=("sim",), PARAMETERS=PARAMETERS, simulated=parts, note=parts_note, draw=draw
    ),
}
