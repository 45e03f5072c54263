"""A network profile: one TOML file, which the simulator, the shaped transport, `netem/tc.py` and
tables read.
"""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from dpipe.errors import ProfileError
from dpipe.network.link import Link, Network
from dpipe.toml import parse_toml, read_text

SHAPE = {
    "delay_ms",
    "bandwidth_gbps",
    "jitter_ms",
    "loss_percent",
    "reorder_percent",
    "window_bytes",
}
_TOP = {"name", "link"} | SHAPE
_LINK = {"from", "to"} | SHAPE


def load_network(path: str | Path) -> Network:
    """Read a network profile (TOML).

        name = "two sites"
        delay_ms = 0.1            # one way, between any two ranks not listed below
        bandwidth_gbps = 10       # leave both out if every pair is listed
        window_bytes = 4e6        # TCP's, if known to matter; also of links below that state none
        [[link]]                  # both directions, unless the opposite pair is listed as well
        from = 0
        to = 1
        delay_ms = 50
        bandwidth_gbps = 1

    Raises `ProfileError` naming the file and the key.
    """
    try:
        if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
            raise ProfileError("it is not a regular file")  # a trace may name any path
        table = parse_toml(read_text(path))
        return parse_network(table, default_name=Path(path).stem)
    except FileNotFoundError:
        raise ProfileError(f"network profile {path} does not exist") from None
    except OSError as error:
        raise ProfileError(f"network profile {path} cannot be read: {error.strerror}") from None
    except (ValueError, ProfileError) as error:  # TOML, UTF-8, or a path that no file can have
        raise ProfileError(f"network profile {path}: {error}") from None


def parse_network(table: dict[str, Any], default_name: str) -> Network:
    """The network of a profile's table. Raises `ProfileError` naming the key."""
    refuse_unknown(table, _TOP, "the profile")
    # A window alone is no link: it is the default of those that are listed.
    describes_others = bool(SHAPE & set(table) - {"window_bytes"})
    default = None
    if describes_others or "link" not in table:
        default = parse_link(table, "the profile")
    links: dict[tuple[int, int], Link] = {}
    name = table.get("name", default_name)
    if not isinstance(name, str):
        raise ProfileError(f"name must be a text, got {name!r:.100}")
    for row in parse_rows(table, "link"):
        refuse_unknown(row, _LINK, "[[link]]")
        source = _rank(row, "from")
        target = _rank(row, "to")
        where = f"[[link]] from {source} to {target}"
        if source == target:
            raise ProfileError(f"[[link]] from {source} to itself: a link is between two ranks")
        if (source, target) in links:
            raise ProfileError(f"{where} is listed twice")
        inherited = {"window_bytes": table.get("window_bytes")}
        links[source, target] = parse_link(inherited | row, where)
    # After all rows: the opposite pair may be listed further down.
    for (source, target), link in list(links.items()):
        links.setdefault((target, source), link)
    return Network(name, default, links)


def refuse_unknown(table: Mapping[str, Any], known: Set[str], where: str) -> None:
    """Raises `ProfileError` for a key that is not known, with those that are."""
    unknown = sorted(set(table) - known)
    if unknown:
        raise ProfileError(
            f"unknown key {unknown[0]!r:.100} in {where}; known keys: {', '.join(sorted(known))}"
        )


def parse_rows(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The blocks `[[key]]` of a table; none where it has no such key."""
    value = table.get(key, [])
    tables = isinstance(value, list) and all(isinstance(row, dict) for row in value)
    if not tables:
        raise ProfileError(f"{key}s are written as [[{key}]] in double brackets, one block a {key}")
    rows: list[dict[str, Any]] = value
    return rows


def parse_number(
    table: Mapping[str, Any],
    key: str,
    where: str,
    default: float | None = None,
) -> float:
    """The number under `key`; without a default it must be there."""
    value = table.get(key, default)
    # TOML's true is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"{where} needs {key}, a number; got {value!r:.100}")
    try:
        return float(value)
    except OverflowError:
        raise ProfileError(f"{where}: {key} is too large for any network") from None


def parse_link(table: Mapping[str, Any], where: str) -> Link:
    """The link that the keys SHAPE describe."""
    window = None
    if table.get("window_bytes") is not None:
        window = parse_number(table, "window_bytes", where)
    return Link(
        delay_ms=parse_number(table, "delay_ms", where),
        bandwidth_gbps=parse_number(table, "bandwidth_gbps", where),
        jitter_ms=parse_number(table, "jitter_ms", where, default=0.0),
        loss_percent=parse_number(table, "loss_percent", where, default=0.0),
        window_bytes=window,
        reorder_percent=parse_number(table, "reorder_percent", where, default=0.0),
    )


def _rank(table: dict[str, Any], key: str) -> int:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProfileError(f"[[link]] needs {key!r}, a rank (0, 1, ...); got {value!r:.100}")
    return value
