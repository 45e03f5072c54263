"""What a person sees of a run on rank 0: a live line on a terminal, plain lines elsewhere."""

import io
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG = logging.getLogger("dpipe")


def lasting(stream: TextIO | None) -> TextIO:
    """`stream`, for what goes on when nobody can read it any more: a terminal that was closed, `| head`, a full disk.

    The first write that fails is the last, and the log says so; no write raises.
    """
    return cast(TextIO, _Lasting(stream))


class _Lasting(io.TextIOBase):
    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None where there is none, or none any more
        self._encoding = "utf-8" if stream is None else stream.encoding
        self._is_terminal = stream is not None and stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """By which rich chooses what it draws boxes of."""
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, act: Callable[[TextIO], object]) -> None:
        if (stream := self._stream) is None:
            return
        try:
            act(stream)
        except OSError as error:
            self._stream = None
            point_nowhere(stream)
            LOG.warning(
                "%s cannot be written (%s): all goes on, and nothing more is shown",
                stream.name,
                error,
            )


def point_nowhere(stream: TextIO) -> None:
    """For a stream that cannot be written: what is left in its buffer, which the interpreter writes
    once more when it ends, would make the exit code 120.
    """
    with suppress(OSError):  # it is no file of the system's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Display:
    """Shows rows of metrics as they come; use it as a context. On a terminal one line is redrawn in
    place.
    """

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
            self._task = self._progress.add_task(
                "train", total=num_steps, completed=first_step, text=""
            )
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
                f"step {row['step']}  held-out loss {row['held_out_loss']:.4f}",
                highlight=False,
                soft_wrap=True,
            )
        elif self._progress is not None:
            self._progress.update(self._task, completed=row["step"] + 1, text=describe(row))
        else:
            self._console.print(
                f"step {row['step'] + 1}/{self._num_steps}  {describe(row)}",
                highlight=False,
                soft_wrap=True,
            )


def describe(row: Mapping[str, Any]) -> str:
    """`loss 2.5310  lr 3.0e-03  8,400 tokens/s  bubble 31%  MB/s 0->1 2.1 1->0 2.1`."""
    links = " ".join(f"{link} {rate:.1f}" for link, rate in sorted(row["mb_per_s"].items()))
    return (
        f"loss {row['loss']:.4f}  lr {row['learning_rate']:.1e}  {row['tokens_per_s']:,.0f} "
        "tokens/s  "
        f"bubble {row['bubble']:.0%}"
        + (f"  MFU {row['mfu']:.0%}" if "mfu" in row else "")
        + (f"  MB/s {links}" if links else "")
    )
