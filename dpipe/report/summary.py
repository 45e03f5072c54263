"""The summary at the end of a run: what was learned, what it took against what was predicted, where
things are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from statistics import mean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpipe.report.metrics import read_rows
from dpipe.report.trace import Trace, load_trace

_END_ROWS = 20  # the training loss at the end is a mean over so many rows: one batch is noisy


@dataclass(frozen=True)
class Learned:
    """Losses in nats a token; None where the run did not measure it."""

    train_start: float
    train_end: float
    held_out_start: float | None
    held_out_end: float | None


@dataclass(frozen=True)
class TextScale:
    """What turns nats a token into bits a byte, and the text's own measure."""

    train_bytes_per_token: float
    held_out_bytes_per_token: float
    bigram_entropy: float  # bits a byte


def learned(rows: Sequence[dict[str, Any]]) -> Learned | None:
    """From the rows of `metrics.jsonl`; None for a run without a training step."""
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    if not losses:
        return None
    ends = (held_out[0], held_out[-1]) if held_out else (None, None)
    return Learned(losses[0], mean(losses[-_END_ROWS:]), *ends)


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
    """Print it; every figure comes from the run's own files. `shards` of the optimizer's state make
    a whole one.

    Without a `scale` losses are told as they are: no model of bytes has made them, and none can
    continue a text.
    """
    rows = read_rows(run)
    steps = [row for row in rows if "loss" in row]
    console.print(
        f"\n[bold]{_duration(steps)} of training[/bold] ({escape(str(run))})",
        highlight=False,
        soft_wrap=True,
    )
    result = learned(rows)
    if (
        result is not None and checkpoint_url is not None
    ):  # replay has neither losses nor checkpoints
        console.print(_losses(result, scale))
        if scale is not None and result.held_out_end is not None:
            console.print(
                _against_bigram(result.held_out_end, scale), highlight=False, soft_wrap=True
            )
    if (run / "trace" / "plan.json").exists():
        console.print(_prediction(load_trace(run)), highlight=False, soft_wrap=True)
    if steps and shards > 1:
        console.print(
            _sharded(list(steps[-1]["optimizer_mb"].values()), shards),
            highlight=False,
            soft_wrap=True,
        )
    if steps and "gpu_memory_mb" in steps[-1]:
        console.print(_gpu_memory(steps[-1]["gpu_memory_mb"]), highlight=False, soft_wrap=True)
    if sample is not None:
        console.print("\n[bold]The model writes:[/bold]")
        console.print(sample, highlight=False, markup=False)
    console.print("\n[bold]Where it is[/bold]")
    for what, where in _places(run, checkpoint_url, generates=scale is not None):
        console.print(f"  {what:12} {where}", highlight=False, markup=False, soft_wrap=True)


def _duration(steps: Sequence[dict[str, Any]]) -> str:
    """Of all steps of the run, which need not have a row each."""
    number = steps[-1]["step"] + 1 if steps else 0
    seconds = sum(row["step_s"] for row in steps)
    if len(steps) < number:
        return f"{number} steps in about {seconds / len(steps) * number:.0f} s"
    return f"{number} steps in {seconds:.0f} s"


def _sharded(held_mb: Sequence[float], shards: int) -> str:
    """`held_mb` by rank; ranks that are a pipeline's length apart hold shards of the same
    stages.
    """
    length = len(held_mb) // shards
    largest = max(range(len(held_mb)), key=lambda rank: held_mb[rank])
    whole = sum(held_mb[largest % length :: length])
    return (
        f"optimizer's state: {held_mb[largest]:.2f} MB on rank {largest}, which has most of it; "
        "unsharded "
        f"{whole:.2f} MB, so {whole - held_mb[largest]:.2f} MB are saved"
    )


def _losses(result: Learned, scale: TextScale | None) -> Table:
    table = Table("loss" if scale is None else "bits per byte", "start", "end")
    for name, row, bytes_per_token in (
        ("training", (result.train_start, result.train_end), scale and scale.train_bytes_per_token),
        (
            "held out",
            (result.held_out_start, result.held_out_end),
            scale and scale.held_out_bytes_per_token,
        ),
    ):
        told = [
            x if x is None or not bytes_per_token else bits_per_byte(x, bytes_per_token)
            for x in row
        ]
        table.add_row(name, *("-" if x is None else f"{x:.3f}" for x in told))
    if scale is not None:
        table.add_row("bigram entropy of the text", "", f"{scale.bigram_entropy:.3f}")
    return table


def _against_bigram(held_out: float, scale: TextScale) -> str:
    bits = bits_per_byte(held_out, scale.held_out_bytes_per_token)
    verb = "beats" if bits < scale.bigram_entropy else "does not beat"
    return f"held-out loss {bits:.3f} {verb} the bigram entropy {scale.bigram_entropy:.3f}"


def _prediction(trace: Trace) -> str:
    predicted = trace.predicted.duration_us / 1e3
    measured = trace.measured_us / 1e3
    return (
        f"step time: predicted {predicted:.1f} ms, measured {measured:.1f} ms, measured / "
        "predicted "
        f"{measured / predicted:.3f} (median of the last {len(trace.steps)} steps)"
    )


def _gpu_memory(peak_mb: dict[str, float]) -> str:
    return "peak GPU memory: " + ", ".join(
        f"rank {rank} {mb / 1e3:.1f} GB" for rank, mb in peak_mb.items()
    )


def _places(run: Path, checkpoint_url: str | None, *, generates: bool) -> list[tuple[str, str]]:
    places = [("metrics", f"{run}/metrics.jsonl")]
    if checkpoint_url is not None:
        places.append(("checkpoints", checkpoint_url))
    if generates:
        places.append(("generate", f'dpipe generate {quote(str(run))} --prompt "..."'))
    if (run / "tensorboard").exists():
        places.append(("TensorBoard", f"tensorboard --logdir {quote(f'{run}/tensorboard')}"))
    if (run / "trace" / "plan.json").exists():
        places.append(
            (
                "trace",
                f"dpipe trace {quote(str(run))}  (then open {run}/trace.json in ui.perfetto.dev)",
            )
        )
    return places
