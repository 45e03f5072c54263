"""The summary at the end of a run: losses, step time against prediction, where the files are."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpipe.report.metrics import read_rows
from dpipe.report.trace import Trace, load_trace

_END_ROWS = 20  # one batch is noisy: the final training loss is the mean over so many rows


@dataclass(frozen=True)
class Learned:
    """Losses in nats a token; None where the run did not measure one."""

    train_start: float
    train_end: float
    held_out_start: float | None
    held_out_end: float | None


@dataclass(frozen=True)
class TextScale:
    """What converts nats a token to bits a byte, and the entropy of the text to compare with."""

    train_bytes_per_token: float
    held_out_bytes_per_token: float
    bigram_entropy: float  # in bits a byte


def learned(rows: Sequence[dict[str, Any]]) -> Learned | None:
    """From the rows of `metrics.jsonl`; None for a run without a training step."""
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    if not losses:
        return None
    return Learned(
        train_start=losses[0],
        train_end=mean(losses[-_END_ROWS:]),
        held_out_start=held_out[0] if held_out else None,
        held_out_end=held_out[-1] if held_out else None,
    )


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    return nats_per_token / math.log(2) / bytes_per_token


def show_summary(
    console: Console,
    run: Path,
    *,
    scale: TextScale | None,
    checkpoint_url: str | None,
    sample: str | None,
    shards: int = 1,
) -> None:
    """Print it; every figure comes from the run's own files.

    Without a `scale`, losses are in nats, and nothing is said of generating text. `checkpoint_url`
    is None for a replay, which has neither losses nor checkpoints. `shards` is the number of ranks
    that divide the optimizer state of a stage among them.
    """
    rows = read_rows(run)
    steps = [row for row in rows if "loss" in row]
    _print(console, f"\n[bold]{_duration(steps)} of training[/bold] ({escape(str(run))})")
    result = learned(rows)
    if result is not None and checkpoint_url is not None:  # a replay's loss is 0
        console.print(_loss_table(result, scale))
        if scale is not None and result.held_out_end is not None:
            _print(console, _against_bigram(result.held_out_end, scale))
    if _has_trace(run):
        _print(console, _prediction(load_trace(run), steps))
    if steps and shards > 1:
        _print(console, _sharded(list(steps[-1]["optimizer_mb"].values()), shards))
    if steps and "gpu_memory_mb" in steps[-1]:
        _print(console, _gpu_memory(steps[-1]["gpu_memory_mb"]))
    if sample is not None:
        console.print("\n[bold]The model writes:[/bold]")
        console.print(sample, highlight=False, markup=False)
    console.print("\n[bold]Where it is[/bold]")
    for what, where in _files(run, checkpoint_url, generates=scale is not None):
        console.print(f"  {what:12} {where}", highlight=False, markup=False, soft_wrap=True)


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _has_trace(run: Path) -> bool:
    return (run / "trace" / "plan.json").exists()


def _duration(steps: Sequence[dict[str, Any]]) -> str:
    """Of all steps of the run. With run.log_every above 1 not all have a row: then an estimate."""
    number = steps[-1]["step"] + 1 if steps else 0
    seconds = sum(row["step_s"] for row in steps)
    if len(steps) < number:  # the rows there are stand for the steps between them
        return f"{number} steps in about {seconds / len(steps) * number:.0f} s"
    return f"{number} steps in {seconds:.0f} s"


def _sharded(held_mb: Sequence[float], shards: int) -> str:
    """`held_mb` by rank; ranks a pipeline's length apart hold shards of the same stages."""
    length = len(held_mb) // shards
    largest = held_mb.index(max(held_mb))
    whole = sum(held_mb[largest % length :: length])
    return (
        f"optimizer state: {held_mb[largest]:.2f} MB on rank {largest}, which has most of it; "
        f"unsharded {whole:.2f} MB, so {whole - held_mb[largest]:.2f} MB are saved"
    )


def _loss_table(result: Learned, scale: TextScale | None) -> Table:
    train_scale = None
    held_out_scale = None
    if scale is not None:
        train_scale = scale.train_bytes_per_token
        held_out_scale = scale.held_out_bytes_per_token
    table = Table("loss" if scale is None else "bits per byte", "start", "end")
    table.add_row(
        "training",
        _loss(result.train_start, train_scale),
        _loss(result.train_end, train_scale),
    )
    table.add_row(
        "held out",
        _loss(result.held_out_start, held_out_scale),
        _loss(result.held_out_end, held_out_scale),
    )
    if scale is not None:
        table.add_row("bigram entropy of the text", "", f"{scale.bigram_entropy:.3f}")
    return table


def _loss(nats: float | None, bytes_per_token: float | None) -> str:
    if nats is None:
        return "-"
    if not bytes_per_token:
        return f"{nats:.3f}"
    return f"{bits_per_byte(nats, bytes_per_token):.3f}"


def _against_bigram(held_out: float, scale: TextScale) -> str:
    bits = bits_per_byte(held_out, scale.held_out_bytes_per_token)
    verb = "beats" if bits < scale.bigram_entropy else "does not beat"
    return f"held-out loss {bits:.3f} {verb} the bigram entropy {scale.bigram_entropy:.3f}"


def _prediction(trace: Trace, rows: Sequence[dict[str, Any]]) -> str:
    """`rows` are of steps, as rank 0 timed them from one to the next; the last step has one."""
    traced = {step for step, _, _ in trace.steps}
    seconds = [row["step_s"] for row in rows if row["step"] in traced]
    predicted = trace.predicted.step_us / 1e3
    measured = median(seconds) * 1e3
    return (
        f"step time: predicted {predicted:.1f} ms, measured {measured:.1f} ms, "
        f"measured / predicted {measured / predicted:.3f} "
        f"(median of the last {len(seconds)} steps)"
    )


def _gpu_memory(peak_mb: dict[str, float]) -> str:
    by_rank = [f"rank {rank} {mb / 1e3:.1f} GB" for rank, mb in peak_mb.items()]
    return "peak GPU memory: " + ", ".join(by_rank)


def _files(run: Path, checkpoint_url: str | None, *, generates: bool) -> Iterator[tuple[str, str]]:
    """What there is to look at, and the path or the command that shows it."""
    yield "metrics", f"{run}/metrics.jsonl"
    if checkpoint_url is not None:
        yield "checkpoints", checkpoint_url
    if generates:
        yield "generate", f'dpipe generate {quote(str(run))} --prompt "..."'
    if (run / "tensorboard").exists():
        yield "TensorBoard", f"tensorboard --logdir {quote(f'{run}/tensorboard')}"
    if _has_trace(run):
        command = f"dpipe trace {quote(str(run))}"
        yield "trace", f"{command}  (then open {run}/trace.json in ui.perfetto.dev)"
