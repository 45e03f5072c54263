"""`FileTail`: lines that are appended to a file, each read once."""

import os
import stat
from pathlib import Path

_PIECE_BYTES = 4 << 20
_MOST_LINE_BYTES = 4 << 20  # a row of 65,536 ranks has less


class FileTail:
    """Follows a file that may not be there yet, and may be written anew.

        read 1     a b c             lines of the file
        read 2           d e         what came since then
        read 3     a b x             another file, or a shorter one: from its beginning

    `most_bytes` bounds how far back the first read looks; None: to the beginning.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._rest = b""
        self.changed_at: float | None = None  # when it was last written; None: there is none

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether the file is read from its beginning, and whole lines, at most some MB of them:
        after some lines there may be more.

        A link, a pipe or a device counts as no file: a copied folder may hold one.
        """
        try:
            number = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return self._absent()
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                return self._absent()
            is_new = self._is_new(status)
            self.changed_at = status.st_mtime
            file.seek(self._offset)
            content = file.read(_PIECE_BYTES)
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > _MOST_LINE_BYTES:
            self._rest = b""
        return is_new, lines

    def _is_new(self, status: os.stat_result) -> bool:
        file = (status.st_dev, status.st_ino)
        if file == self._file and status.st_size >= self._offset:
            return False
        self._file = file
        self._offset = 0
        self._rest = b""
        if self._most_bytes is not None:
            # The first line is then cut; who reads it does not know it for one.
            self._offset = max(0, status.st_size - self._most_bytes)
        return True

    def _absent(self) -> tuple[bool, list[bytes]]:
        was_there = self._file is not None
        self._file = None
        self._offset = 0
        self._rest = b""
        self.changed_at = None
        return was_there, []
