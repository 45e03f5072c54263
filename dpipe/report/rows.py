"""Rows of metrics on their way from rank 0 to the process that launched it.

launcher   RowPipe(on_row) ── environment, write end ──> rank 0   rows_to_launcher(environ)
               ^                                                          |
               '------------------- one JSON object a line ---------------'
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

from dpipe.report.display import lasting

Row = Mapping[str, Any]
OnRow = Callable[[Row], None]

_WRITE_END = "DPIPE_ROWS_FD"
_READ_BYTES = 64 << 10  # what a pipe holds on Linux


class RowPipe:
    """The launcher's end; use it as a context. `write_fd` is for rank 0 to inherit."""

    def __init__(self, on_row: OnRow) -> None:
        self._on_row = on_row
        self._rest = b""  # the beginning of a row whose end has not come yet
        self.read_fd, self.write_fd = os.pipe()
        # The launcher looks in between its other duties, and must not wait for a row.
        os.set_blocking(self.read_fd, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of rank 0."""
        return {**environ, _WRITE_END: str(self.write_fd)}

    def take(self) -> None:
        """Call `on_row` with every row that has come. Raises what it raises."""
        while chunk := self._read():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._on_row(json.loads(line))

    def _read(self) -> bytes:
        try:
            return os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return b""


def rows_to_launcher(environ: Mapping[str, str]) -> OnRow | None:
    """What rank 0 calls with each row; None where no launcher asked for them.

    Where nobody reads any more, rows are dropped: the run goes on.
    """
    if _WRITE_END not in environ:
        return None
    # the descriptor is this process's until it ends
    write_fd = int(environ[_WRITE_END])
    stream = lasting(os.fdopen(write_fd, "w", encoding="utf-8", closefd=False))

    def send(row: Row) -> None:
        stream.write(json.dumps(row) + "\n")
        stream.flush()

    return send
