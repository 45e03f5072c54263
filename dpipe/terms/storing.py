"""`TermStore`: terms at a URL. A term's record is created by one alone, which not every file system
can promise.
"""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from dpipe.errors import CheckpointError, ConfigError, DpipeError, RunError
from dpipe.store.storage import Storage
from dpipe.terms.records import HOLDER_BEAT, TERM, HolderBeat, Term
from dpipe.wire.schema import Schema
from dpipe.wire.text import visible

T = TypeVar("T")
_FOLDER = "coordinator"
_TERM = re.compile(r"(\d{4,9})-term\.json")
# Which create a name once, however many try: POSIX by a link; the others by a condition that the
# service itself checks (If-None-Match, ifGenerationMatch), as s3fs, gcsfs and adlfs send it. What
# is in memory is of one process, in which there is one coordinator.
_CREATES_ONCE = ("file", "memory", "s3", "gs", "abfs")


class TermStoreError(RunError):
    """The URL could not be read or written: of the terms nothing is known."""


class TermStore:
    """Raises `TermStoreError` where the URL does not answer, `CheckpointError` where a record there
    is damaged.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._storage = Storage(self.place)

    def refuse_unfit(self) -> None:
        """Raises `ConfigError` unless one name can be created here once alone."""
        protocols = self._storage.protocols
        known = ", ".join(f"{protocol}://" for protocol in _CREATES_ONCE)
        if not set(protocols) & set(_CREATES_ONCE):
            raise ConfigError(
                f"{self.url} cannot keep who coordinates: two coordinators could both create the "
                f"same term there; set run.checkpoint_url to one of {known}"
            )
        # An old version of the library behind it may not send the condition.
        probe = f"probe-{secrets.token_hex(8)}"
        with self._reaching():
            try:
                is_once = self._create(probe, b"first") and not self._create(probe, b"second")
            finally:
                self._storage.remove_file(probe)
        if not is_once:
            raise ConfigError(
                f"{self.url} takes a second object of one name, so that two could coordinate at "
                "once: install a newer version of the library that reaches it, or set "
                "run.checkpoint_url elsewhere"
            )

    def newest(self) -> int:
        """The number of the newest term; 0 where there is none."""
        with self._reaching():
            names = self._storage.names()
        matches = [_TERM.fullmatch(name) for name in names]
        return max((int(match[1]) for match in matches if match), default=0)

    def is_claimed(self, number: int) -> bool:
        return self.read(number, "term.json") is not None

    def claim(self, number: int, term: Term) -> bool:
        """Create a term; whether it is ours."""
        with self._reaching():
            return self._create(_name(number, "term.json"), term.model_dump_json().encode())

    def term(self, number: int) -> Term | None:
        return self._record(number, "term.json", TERM)

    def beat(self, number: int) -> HolderBeat | None:
        """None: its holder has not written one yet."""
        return self._record(number, "beat.json", HOLDER_BEAT)

    def say(self, number: int, beat: HolderBeat) -> None:
        self.write(number, "beat.json", beat.model_dump_json().encode())

    def read(self, number: int, name: str) -> bytes | None:
        """A file of a term; None where there is none."""
        with self._reaching():
            try:
                return self._storage.read_newest(_name(number, name))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, number: int, name: str, content: bytes) -> None:
        with self._reaching():
            self._storage.replace(_name(number, name), content)

    def forget(self, number: int) -> None:
        """Remove the files of an old term, but for the records of who held it."""
        kept = {_name(number, name) for name in ("term.json", "beat.json")}
        with self._reaching():
            for name in self._storage.names():
                if name.startswith(_name(number, "")) and name not in kept:
                    self._storage.remove_file(name)

    @property
    def place(self) -> str:
        """Where people find it."""
        return f"{self.url.rstrip('/')}/{_FOLDER}"

    def _record(self, number: int, name: str, schema: Schema[T]) -> T | None:
        content = self.read(number, name)
        if content is None:
            return None
        try:
            return schema.read(content)
        except ValueError as error:
            raise CheckpointError(
                f"{self.place}/{_name(number, name)} is damaged ({error}): who coordinates cannot "
                f"be told; stop all coordinators, and delete {self.place}"
            ) from None

    def _create(self, name: str, content: bytes) -> bool:
        self._storage.create(name, content)
        # Read back: also where an answer was lost, and a second attempt found the first.
        return self._storage.read_newest(name) == content

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """What the libraries behind fsspec raise is not all an `OSError`."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, DpipeError):
                reason = str(error)
            else:
                reason = visible(f"{type(error).__name__}: {error}")[:500]
            raise TermStoreError(f"cannot reach {self.url}: {reason}") from error


def _name(number: int, name: str) -> str:
    return f"{number:04d}-{name}"
