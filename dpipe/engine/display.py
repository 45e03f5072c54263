"""What a person sees of a run on rank 0: a live line on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Shows rows of metrics as they come; use it as a context. On a terminal one line is redrawn in place."""

    def __init__(self, console: Console, first_step: int, num_steps: int) -> None:
        self._console = console
        self._held_out = ""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        if self._progress is not None:
            self._task = self._progress.add_task("train", total=num_steps, completed=first_step, text="")
        self._num_steps = num_steps

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, row: Mapping[str, Any]) -> None:
        """A row as `Metrics.write` gets it."""
        if "held_out_loss" in row:
            self._console.print(
                f"step {row['step']}  held-out loss {row['held_out_loss']:.4f}", highlight=False, soft_wrap=True
            )
        elif self._progress is not None:
            self._progress.update(self._task, completed=row["step"] + 1, text=describe(row))
        else:
            self._console.print(
                f"step {row['step'] + 1}/{self._num_steps}  {describe(row)}", highlight=False, soft_wrap=True
            )


def describe(row: Mapping[str, Any]) -> str:
    """`loss 2.5310  lr 3.0e-03  8,400 tokens/s  bubble 31%  MB/s 0->1 2.1 1->0 2.1`."""
    links = " ".join(f"{link} {rate:.1f}" for link, rate in sorted(row["mb_per_s"].items()))
    return (
        f"loss {row['loss']:.4f}  lr {row['learning_rate']:.1e}  {row['tokens_per_s']:,.0f} tokens/s  "
        f"bubble {row['bubble']:.0%}"
        + (f"  MFU {row['mfu']:.0%}" if "mfu" in row else "")
        + (f"  MB/s {links}" if links else "")
    )
