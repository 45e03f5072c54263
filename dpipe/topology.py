"""A network as a run sees it: one directed link between each two ranks, and each rank's own egress.

A message of n bytes on a link takes n * 8 / bandwidth to put on the wire, then the link's delay to arrive.
What a rank sends to several peers at once shares its egress, because `tc` shapes an interface and not a peer.
"""

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpipe.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks: one-way delay and its jitter in milliseconds, bandwidth in gigabits a second,
    and the share of packets that is lost, in percent."""

    delay_ms: float
    bandwidth_gbps: float
    jitter_ms: float = 0.0
    loss_percent: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms < math.inf:
            raise ProfileError(f"delay_ms must be a number that is not negative, got {self.delay_ms}")
        if not 0 < self.bandwidth_gbps < math.inf:
            raise ProfileError(f"bandwidth_gbps must be a positive number, got {self.bandwidth_gbps}")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise ProfileError(f"jitter_ms must lie between 0 and delay_ms {self.delay_ms}, got {self.jitter_ms}")
        if not 0 <= self.loss_percent < 100:
            raise ProfileError(f"loss_percent must be at least 0 and below 100, got {self.loss_percent}")

    @property
    def delay_us(self) -> float:
        return self.delay_ms * 1e3

    def serialisation_us(self, num_bytes: int) -> float:
        return num_bytes * 8 / (self.bandwidth_gbps * 1e3)


LOOPBACK = Link(delay_ms=0.1, bandwidth_gbps=8.0)


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a run by (from rank, to rank); pairs that are not listed use `default`."""

    name: str = "loopback"
    default: Link = LOOPBACK
    links: dict[tuple[int, int], Link] = field(default_factory=dict)

    def link(self, source: int, target: int) -> Link:
        return self.links.get((source, target), self.default)

    def egress_gbps(self, rank: int) -> float:
        """What `rank` can send in all: the fastest of its links, as an interface shaped to that rate would."""
        return max([self.default.bandwidth_gbps, *(k.bandwidth_gbps for (s, _), k in self.links.items() if s == rank)])


_SHAPE = {"delay_ms", "bandwidth_gbps", "jitter_ms", "loss_percent"}
_TOP = {"name", "link"} | _SHAPE
_LINK = {"from", "to"} | _SHAPE


def load_network(path: str | Path) -> Network:
    """Read a network profile (TOML).

        name = "two sites"
        delay_ms = 0.1            # one way, between each two ranks not listed below
        bandwidth_gbps = 10
        [[link]]                  # both directions, unless the opposite pair is listed as well
        from = 0
        to = 1
        delay_ms = 50
        bandwidth_gbps = 1

    Raises `ProfileError` naming the file and the key.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return parse_network(table, default_name=Path(path).stem)
    except FileNotFoundError:
        raise ProfileError(f"network profile {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ProfileError) as error:
        raise ProfileError(f"network profile {path}: {error}") from None


def parse_network(table: dict[str, Any], default_name: str) -> Network:
    _only(table, _TOP, "the profile")
    default = _link(table, "the profile")
    links: dict[tuple[int, int], Link] = {}
    for row in _rows(table.get("link", [])):
        _only(row, _LINK, "[[link]]")
        ends = (_rank(row, "from"), _rank(row, "to"))
        if ends[0] == ends[1]:
            raise ProfileError(f"[[link]] from {ends[0]} to itself: a link is between two ranks")
        if ends in links:
            raise ProfileError(f"[[link]] from {ends[0]} to {ends[1]} is listed twice")
        links[ends] = _link(row, f"[[link]] from {ends[0]} to {ends[1]}")
    mirrored = {(b, a): link for (a, b), link in links.items() if (b, a) not in links}
    return Network(str(table.get("name", default_name)), default, links | mirrored)


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise ProfileError(f"unknown key {unknown[0]!r} in {where}; known keys: {', '.join(sorted(known))}")


def _rows(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ProfileError("links are written as [[link]] in double brackets, one block a link")
    return value


def _number(table: dict[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"{where} needs {key}, a number; got {value!r}")
    return float(value)


def _link(table: dict[str, Any], where: str) -> Link:
    required = (_number(table, key, where) for key in ("delay_ms", "bandwidth_gbps"))
    return Link(*required, *(_number(table, key, where, default=0.0) for key in ("jitter_ms", "loss_percent")))


def _rank(table: dict[str, Any], key: str) -> int:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProfileError(f"[[link]] needs {key!r}, a rank (0, 1, ...); got {value!r}")
    return value
