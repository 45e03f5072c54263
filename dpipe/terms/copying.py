"""`RunCopies`: what a coordinator has in its folder that another one needs, at the URL of terms.

FOLDER/journal.sqlite   0001-journal.sqlite             before an epoch begins; else each second
FOLDER/config.json ...  0001-config.json ...            once
FOLDER/metrics.jsonl    0001-rows-00000.jsonl ...       500 rows each; the last one as it grows
"""

import json
import os
import threading
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

from dpipe.elastic.journal import NAME, RunJournal
from dpipe.errors import CheckpointError
from dpipe.store.identity import RUN_FILE
from dpipe.terms.storing import TermStore

METRICS = "metrics.jsonl"
_ONCE = ("config.json", RUN_FILE)
_ROWS = 500
_BEFORE_THE_FIRST = (0, 0)  # the number of a file of rows, and where it begins in the metrics


class RunCopies:
    """Two threads may use it. Raises `TermStoreError` where the URL does not answer."""

    def __init__(self, store: TermStore, number: int, folder: Path, journal: RunJournal) -> None:
        self._store = store
        self._number = number
        self._folder = folder
        self._journal = journal
        self._lock = threading.Lock()
        self._kept = b""  # the journal as it was copied last
        self._metrics = (0, 0)  # inode and size, as they were copied last
        self._newest_rows = _BEFORE_THE_FIRST
        self._is_whole = False

    def copy_journal(self) -> None:
        with self._lock:
            content = self._journal.content()
            # Compared whole: it is small, and changes with every step.
            if content != self._kept:
                self._store.write(self._number, NAME, content)
                self._kept = content

    def copy(self) -> None:
        """What has changed. The journal comes last: where it is, all the rest is."""
        self._copy_rows()
        if not self._is_whole:
            for name in _ONCE:
                self._store.write(self._number, name, (self._folder / name).read_bytes())
        self.copy_journal()
        if not self._is_whole:
            self._is_whole = True
            # Not before: until then whoever takes over needs those of the term before.
            for earlier in range(1, self._number):
                self._store.forget(earlier)

    def _copy_rows(self) -> None:
        path = self._folder / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            metrics = (status.st_ino, status.st_size)
            if metrics == self._metrics:
                return
            # Rows are appended, or the file is another one, without those that are made again.
            if status.st_ino != self._metrics[0] or status.st_size < self._metrics[1]:
                self._newest_rows = _BEFORE_THE_FIRST
            number, start = self._newest_rows
            file.seek(start)
            while True:
                lines = list(islice(file, _ROWS))
                self._store.write(self._number, _rows_name(number), b"".join(lines))
                self._newest_rows = (number, start)
                if len(lines) < _ROWS:
                    break
                number += 1
                start += sum(map(len, lines))
        self._metrics = metrics


def fetch(store: TermStore, run: str, folder: Path) -> None:
    """Bring the newest copies of the run with that id into `folder`, over older ones there.

    Raises `CheckpointError` where there are none, `TermStoreError`.
    """
    number = _newest_with_journal(store, run)
    _replace(folder / METRICS, _rows(store, number))
    # The journal comes last here, too: a folder that has one is a run's that goes on.
    for name in (*_ONCE, NAME):
        content = store.read(number, name)
        if content is None:
            raise CheckpointError(f"{store.url} has no {name} of term {number}: it was deleted")
        _replace(folder / name, content)


def _newest_with_journal(store: TermStore, run: str) -> int:
    for number in range(store.newest(), 0, -1):
        term = store.term(number)
        if term is not None and term.run == run and store.read(number, NAME) is not None:
            return number
    raise CheckpointError(
        f"no coordinator has kept its journal at {store.url}: nothing had begun, and there is "
        f"nothing to take over; delete {store.place}, and start `dpipe coordinate` without "
        "--standby"
    )


def _rows(store: TermStore, number: int) -> bytes:
    """In order of steps. A file of rows may be older than the one before it, and have its rows."""
    by_key: dict[tuple[int, bool], bytes] = {}
    # In the order of their numbers, until one is missing.
    for part in count():
        content = store.read(number, _rows_name(part))
        if content is None:
            break
        for line in content.splitlines():
            # Whoever may write there may write anything.
            with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                row = json.loads(line)
                by_key.setdefault((int(row["step"]), "loss" in row), line)
    lines = [by_key[key] + b"\n" for key in sorted(by_key)]
    return b"".join(lines)


def _rows_name(number: int) -> str:
    return f"rows-{number:05d}.jsonl"


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
