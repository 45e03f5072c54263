"""What a person sees of a run on rank 0: a live line on a terminal, plain lines elsewhere."""

import io
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_RECENT = 20  # steps that the time left is estimated from
_LARGEST_LOSS = 20.0

LOG = logging.getLogger("dpipe")


def lasting(stream: TextIO | None) -> TextIO:
    """Wrap `stream` so that a run outlives its terminal: closed, piped to `head`, on a full disk.

    After the first write that fails, nothing more is written and the log says so. No write raises.
    """
    return cast(TextIO, _Lasting(stream))


class _Lasting(io.TextIOBase):
    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None: there is none, or writing to it has failed
        self._encoding = "utf-8" if stream is None else stream.encoding
        self._is_terminal = stream is not None and stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """rich chooses by it which characters it draws boxes with."""
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, act: Callable[[TextIO], object]) -> None:
        stream = self._stream
        # Who closed it wants nothing more of it; Python flushes once more as it is collected.
        if stream is None or stream.closed:
            return
        try:
            # A broken pipe and a full disk alike: what is shown is worth no run.
            act(stream)
        except OSError as error:
            self._stream = None
            point_nowhere(stream)
            LOG.warning(
                "cannot write to %s (%s): the run continues, and nothing more is shown",
                stream.name,
                str(error),  # as a text: who keeps the record would keep the stream open
            )


def point_nowhere(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device.

    The interpreter flushes its buffer once more when it ends; a failure there would make the exit
    code 120.
    """
    with suppress(OSError):  # it has no file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Display:
    """Shows rows of metrics as they come; a context manager. On a terminal it redraws one line."""

    def __init__(self, console: Console, first_step: int, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._step_s = deque[float](maxlen=_RECENT)
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[text]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task(
                "train", total=num_steps, completed=first_step, text=""
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, row: Mapping[str, Any]) -> None:
        """`row` as `Metrics.write` gets it: of a training step, or of a held-out loss."""
        if "held_out_loss" in row:
            self._print(f"step {row['step']}  {describe_held_out(row)}")
            return
        self._step_s.append(row["step_s"])
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"] + 1, text=describe(row))
        else:
            line = f"step {row['step'] + 1}/{self._num_steps}  {describe(row)}"
            self._print(f"{line}  ETA {self._left(row['step'] + 1)}")

    def _left(self, done: int) -> str:
        """The time that is left, by the last steps: `0:12:30`."""
        step_s = sum(self._step_s) / len(self._step_s)
        return str(timedelta(seconds=round(step_s * (self._num_steps - done))))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def describe_held_out(row: Mapping[str, Any]) -> str:
    """`held-out loss 2.5310, perplexity 12.57, token accuracy 48.3%`."""
    loss = row["held_out_loss"]
    parts = [f"held-out loss {loss:.4f}"]
    # Of more than this no model has learned anything, and no number would fit.
    if loss < _LARGEST_LOSS:
        parts.append(f"perplexity {math.exp(loss):.2f}")
    if "held_out_accuracy" in row:
        parts.append(f"token accuracy {row['held_out_accuracy']:.1%}")
    return ", ".join(parts)


def describe(row: Mapping[str, Any]) -> str:
    """`loss 2.5310  lr 3.0e-03  8,400 tokens/s  bubble 31%  MB/s 0->1 2.1 1->0 2.1`."""
    parts = [
        f"loss {row['loss']:.4f}",
        f"lr {row['learning_rate']:.1e}",
        f"{row['tokens_per_s']:,.0f} tokens/s",
        f"bubble {row['bubble']:.0%}",
    ]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.0%}")
    if "left_out" in row:
        parts.append("left out replica " + ", ".join(map(str, row["left_out"])))
    if row.get("goodput", 1.0) < 1.0:
        parts.append(f"goodput {row['goodput']:.1%}")
    relayed = row.get("relayed", ())
    rates = []
    for link, rate in sorted(row["mb_per_s"].items()):
        mark = " (relayed)" if link in relayed else ""
        rates.append(f"{link} {rate:.1f}{mark}")
    if rates:
        parts.append("MB/s " + " ".join(rates))
    return "  ".join(parts)
