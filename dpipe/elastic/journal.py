"""What the coordinator must not forget, on disk: FOLDER/journal.sqlite.

    run      by key: the format, the run's configuration, the newest step, how it ended
    epochs   number, the step at which it resumed, who had which rank
    events   what a person should know, with its time

An epoch is in it before any agent hears of the epoch. SQLite makes each change whole or not at all,
also where the process or the machine dies in the middle.
"""

import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dpipe.elastic.agents import Epoch
from dpipe.elastic.rendezvous import Past
from dpipe.errors import CheckpointError, RunError
from dpipe.wire.schema import Schema
from dpipe.wire.text import visible

FORMAT = 1
NAME = "journal.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS epochs
    (number INTEGER PRIMARY KEY, resume_step INTEGER NOT NULL, seats TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS events (time REAL NOT NULL, text TEXT NOT NULL) STRICT;
"""
_BUSY_S = 5.0
_READ_S = 2.0  # for a reader of somebody's journal
_OPERATIONS = 10_000  # of SQLite between two looks at the clock
_EVENT_BYTES = 1 << 20
_SEATS = Schema[list[str]](Annotated[list[str], Field(min_length=1, max_length=1 << 16)])


class RunJournal:
    """Open from the constructor until `close`. Used under the lock of its server, but `content`.

    Raises `CheckpointError` where the file is damaged, or of another version of dpipe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # held while a change is half made
        self._database = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        try:
            self._open()
        except (sqlite3.Error, ValueError) as error:
            self.close()
            raise CheckpointError(
                f"the journal {path} is damaged ({visible(str(error))}): put back a copy of it; "
                "or move it away, and the run continues from its newest checkpoint"
            ) from None

    def _open(self) -> None:
        self._database.executescript(_TABLES)
        (verdict,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise ValueError(verdict)
        kept_format = self.get("format")
        if kept_format is None:
            self.put("format", str(FORMAT))
        elif kept_format != str(FORMAT):
            raise ValueError(f"its format is {kept_format!r:.20}, this dpipe's {FORMAT}")
        self.past()

    def close(self) -> None:
        self._database.close()

    def get(self, key: str) -> str | None:
        row = self._database.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        self._write("INSERT OR REPLACE INTO run VALUES (?, ?)", key, value)

    def begin(self, epoch: Epoch) -> None:
        seats = json.dumps(epoch.seats)
        self._write("INSERT INTO epochs VALUES (?, ?, ?)", epoch.number, epoch.resume_step, seats)
        self.put("newest_step", str(epoch.resume_step))

    def note(self, text: str) -> None:
        self._write("INSERT INTO events VALUES (?, ?)", time.time(), text)

    def events(self, most: int) -> list[tuple[float, str]]:
        """The last ones, oldest first."""
        return _events(self._database, most)

    def content(self) -> bytes:
        """The whole file, as it would be read now."""
        with self._lock:
            return self._database.serialize()

    def past(self) -> Past:
        """Raises `ValueError` where it does not hold what it should."""
        order = "SELECT number, resume_step, seats FROM epochs ORDER BY number"
        rows = self._database.execute(order).fetchall()
        resumed_at = tuple((int(number), int(step)) for number, step, _ in rows)
        seats: tuple[str, ...] = ()
        if rows:
            last = rows[-1]
            seats = tuple(_SEATS.read(str(last[2]).encode()))
        newest_step = int(self.get("newest_step") or 0)
        return Past(resumed_at, seats, newest_step)

    def _write(self, order: str, *values: object) -> None:
        """Raises `RunError`: what is not kept must not happen."""
        try:
            with self._lock, self._database:
                self._database.execute(order, values)
        except sqlite3.Error as error:
            raise RunError(
                f"cannot write the journal {self._path}: {error}; make room there, and start the "
                "coordinator again"
            ) from None


def read_events(path: Path, most: int) -> list[tuple[float, str]]:
    """The last events of a journal, oldest first, which a coordinator may have open; none where
    there is no file. The journal may be anybody's: a view in the place of the table may have rows
    without end. Raises `sqlite3.Error` for one that is none, or takes too long.
    """
    # SQLite follows links and opens what is no file; the folder may be somebody else's.
    if not path.is_file() or path.is_symlink():
        return []
    address = f"{path.absolute().as_uri()}?mode=ro"
    database = sqlite3.connect(address, uri=True, timeout=_BUSY_S)
    until = time.monotonic() + _READ_S
    database.set_progress_handler(lambda: time.monotonic() > until, _OPERATIONS)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _EVENT_BYTES)
    try:
        return _events(database, most)
    except (TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(f"its events are none: {error}") from None
    finally:
        database.close()


def _events(database: sqlite3.Connection, most: int) -> list[tuple[float, str]]:
    order = "SELECT time, text FROM events ORDER BY rowid DESC LIMIT ?"
    rows = database.execute(order, (most,)).fetchall()
    return [(float(at), str(text)) for at, text in reversed(rows)]
