"""A network profile: one TOML file."""

import tomllib
from pathlib import Path
from typing import Any

from dpipe.errors import ProfileError
from dpipe.network.link import Link, Network

_SHAPE = {"delay_ms", "bandwidth_gbps", "jitter_ms", "loss_percent", "window_bytes"}


_TOP = {"name", "link"} | _SHAPE


_LINK = {"from", "to"} | _SHAPE


def load_network(path: str | Path) -> Network:
    """Read a network profile (TOML).

        name = "two sites"
        delay_ms = 0.1            # one way, between each two ranks not listed below
        bandwidth_gbps = 10       # leave both out where every pair is listed
        window_bytes = 4e6        # TCP's, if it is known to matter; also for the links below that state none
        [[link]]                  # both directions, unless the opposite pair is listed as well
        from = 0
        to = 1
        delay_ms = 50
        bandwidth_gbps = 1

    Raises `ProfileError` naming the file and the key.
    """
    try:
        table = tomllib.loads(
            Path(path).read_text(encoding="utf-8-sig")
        )  # some editors begin a file with a mark
        return parse_network(table, default_name=Path(path).stem)
    except FileNotFoundError:
        raise ProfileError(f"network profile {path} does not exist") from None
    except OSError as error:
        raise ProfileError(f"network profile {path} cannot be read: {error.strerror}") from None
    except (ValueError, ProfileError) as error:  # TOML, UTF-8, or a path that no file can have
        raise ProfileError(f"network profile {path}: {error}") from None


def parse_network(table: dict[str, Any], default_name: str) -> Network:
    _only(table, _TOP, "the profile")
    stated = _SHAPE & set(table) - {"window_bytes"}
    default = _link(table, "the profile") if stated or "link" not in table else None
    links: dict[tuple[int, int], Link] = {}
    for row in _rows(table.get("link", [])):
        _only(row, _LINK, "[[link]]")
        ends = (_rank(row, "from"), _rank(row, "to"))
        if ends[0] == ends[1]:
            raise ProfileError(f"[[link]] from {ends[0]} to itself: a link is between two ranks")
        if ends in links:
            raise ProfileError(f"[[link]] from {ends[0]} to {ends[1]} is listed twice")
        links[ends] = _link(
            {"window_bytes": table.get("window_bytes")} | row,
            f"[[link]] from {ends[0]} to {ends[1]}",
        )
    mirrored = {(b, a): link for (a, b), link in links.items() if (b, a) not in links}
    return Network(str(table.get("name", default_name)), default, links | mirrored)


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise ProfileError(
            f"unknown key {unknown[0]!r} in {where}; known keys: {', '.join(sorted(known))}"
        )


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
    window = None if table.get("window_bytes") is None else _number(table, "window_bytes", where)
    return Link(
        delay_ms=_number(table, "delay_ms", where),
        bandwidth_gbps=_number(table, "bandwidth_gbps", where),
        jitter_ms=_number(table, "jitter_ms", where, default=0.0),
        loss_percent=_number(table, "loss_percent", where, default=0.0),
        window_bytes=window,
    )


def _rank(table: dict[str, Any], key: str) -> int:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProfileError(f"[[link]] needs {key!r}, a rank (0, 1, ...); got {value!r}")
    return value
