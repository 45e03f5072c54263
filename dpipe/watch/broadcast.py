"""One reader for all who watch: each is sent what it has not seen yet."""

import threading
import time
from collections.abc import Iterator
from typing import Protocol

from dpipe.watch.picture import Picture, as_json, as_table
from dpipe.watch.points import RunPoints, thinned

_MOST_POINTS = 3000  # of a page that has just been opened


class PictureSource(Protocol):
    """Where pictures come from."""

    @property
    def points(self) -> RunPoints:
        """All points; changed by `poll` alone."""

    @property
    def is_preparing(self) -> bool:
        """Whether a later picture will show more of the same files."""

    def poll(self) -> Picture:
        """The run as it is now."""

    def close(self) -> None:
        """Free what the source holds."""


class Broadcast:
    """The newest picture, read at most every `interval_s`, however many watch."""

    def __init__(self, source: PictureSource, interval_s: float = 1.0) -> None:
        self.over = threading.Event()  # set where nobody is to be told any more
        self._source = source
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._picture = ""

    def news(self, seen: "Seen") -> list[tuple[str, str]]:
        """Events that this watcher has not seen: name, and JSON."""
        with self._lock:
            # Whoever comes first reads; the others are told the same.
            now = time.monotonic()
            if not self._picture or now - self._read_at >= self._interval_s:
                self._picture = as_json(as_table(self._source.poll()))
                self._read_at = time.monotonic()
            return list(seen.take(self._picture, self._source.points))


class Seen:
    """What one watcher has been sent."""

    def __init__(self) -> None:
        self._picture = ""
        self._generation = -1
        self._num_points = 0

    def take(self, picture: str, points: RunPoints) -> Iterator[tuple[str, str]]:
        if points.generation != self._generation:
            self._generation = points.generation
            self._num_points = len(points.points)
            yield "begin", as_json(thinned(points.points, _MOST_POINTS))
        elif len(points.points) > self._num_points:
            yield "points", as_json(points.points[self._num_points :])
            self._num_points = len(points.points)
        # Behind the points: the page draws when the picture is there.
        if picture != self._picture:
            self._picture = picture
            yield "picture", picture
