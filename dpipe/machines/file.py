"""`machines.toml`, read and written. What is written reads as it was, to the last digit."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from dpipe.errors import ProfileError
from dpipe.machines.machine import Cluster, LayerTime, Machine, Measurement, Pair
from dpipe.network.link import Link
from dpipe.network.profile import SHAPE, parse_link, parse_rows, refuse_unknown
from dpipe.toml import parse_toml, read_text, to_toml

Row = TypeVar("Row", LayerTime, Machine, Measurement)

_TOP = {"name", "measured", "default_link", "machine", "link"}
_LINK = {"from", "to", "relayed"} | SHAPE


def load_machines(path: str | Path) -> Cluster:
    """Read a `machines.toml`.

        [measured]                    # when, and with which model; not in one written by hand
        at = "2026-11-23T12:00:00Z"
        model = "5f84501"
        [default_link]                # of any two machines that are not listed below; optional
        delay_ms = 0.1
        bandwidth_gbps = 10
        [[machine]]                   # further keys: the fields of `Machine`
        name = "a"
        [[machine.layer]]             # of this machine: the fields of `LayerTime`
        kind = "block"
        micro_batch_size = 1
        forward_ms = 1.0
        backward_ms = 2.0
        [[link]]                      # both directions, unless the opposite one is listed as well
        from = "a"
        to = "b"
        delay_ms = 10                 # further keys: those of a network profile
        bandwidth_gbps = 1
        relayed = true                # by the coordinator's machine: neither can dial the other

    Raises `ProfileError` naming the file, the table and the key.
    """
    try:
        # A pipe or a device would be waited for; a folder says so itself when it is read.
        if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
            raise ProfileError("it is not a regular file")
        return parse_machines(parse_toml(read_text(path)), default_name=Path(path).stem)
    except FileNotFoundError:
        raise ProfileError(f"machines file {path} does not exist") from None
    except OSError as error:
        raise ProfileError(f"machines file {path} cannot be read: {error.strerror}") from None
    except (ValueError, ProfileError) as error:  # TOML, UTF-8, or a path that no file can have
        raise ProfileError(f"machines file {path}: {error}") from None


def lists_machines(path: str | Path) -> bool:
    """Whether the file is one of machines rather than a network profile. False where it cannot be
    read: who reads it as a profile says why.
    """
    try:
        return "machine" in parse_toml(read_text(path))
    except (OSError, ValueError):
        return False


def parse_machines(table: dict[str, Any], default_name: str = "machines") -> Cluster:
    """The cluster of a file's table. Raises `ProfileError` naming the table and the key."""
    refuse_unknown(table, _TOP, "the file")
    name = table.get("name", default_name)
    if not isinstance(name, str):
        raise ProfileError(f"name must be a text, got {name!r:.100}")
    machines = tuple(_machine(row) for row in parse_rows(table, "machine"))
    default_link = None
    if "default_link" in table:
        row = _table(table, "default_link")
        refuse_unknown(row, SHAPE, "[default_link]")
        with _within("[default_link]"):
            default_link = parse_link(row, "it")
    measured = None
    if "measured" in table:
        with _within("[measured]"):
            measured = _parse(Measurement, _table(table, "measured"))
    links = _links(table)
    return Cluster(machines, links, default_link, measured, name, _relayed(table))


def dump_machines(cluster: Cluster) -> str:
    """The text of a file that reads as `cluster`. Each direction of a link has a block of its own,
    as they are measured.
    """
    blocks = [_block("", {"name": cluster.name})]
    if cluster.measured is not None:
        blocks.append(_block("[measured]", _stated(cluster.measured)))
    if cluster.default_link is not None:
        blocks.append(_block("[default_link]", _stated(cluster.default_link)))
    for machine in cluster.machines:
        stated = _stated(machine)
        stated.pop("layers", None)
        blocks.append(_block("[[machine]]", stated))
        for layer in machine.layers:
            blocks.append(_block("[[machine.layer]]", _stated(layer)))
    for (source, target), link in cluster.links.items():
        ends = {"from": source, "to": target}
        stated = ends | _stated(link)
        if (source, target) in cluster.relayed:
            stated["relayed"] = True
        blocks.append(_block("[[link]]", stated))
    return "\n".join(blocks)


def save_machines(cluster: Cluster, path: str | Path, comments: Iterable[str] = ()) -> None:
    """Write the file, with `comments` on top; one that is there is replaced as a whole, so that no
    reader sees a part.
    """
    lines = []
    for comment in comments:
        for line in comment.splitlines():
            lines.append(f"# {line}\n")
    path = Path(path)
    part = path.with_name(path.name + ".part")
    # In the same folder: only there a rename replaces a file in one go.
    part.write_text("".join(lines) + dump_machines(cluster), encoding="utf-8")
    part.replace(path)


def _machine(row: dict[str, Any]) -> Machine:
    where = f"machine {row.get('name', '?')!r:.100}"
    with _within(where):
        layers = tuple(_layer(layer) for layer in parse_rows(row, "layer"))
        own = {key: value for key, value in row.items() if key != "layer"}
        return _parse(Machine, own, layers=layers)


def _layer(row: dict[str, Any]) -> LayerTime:
    with _within(f"[[machine.layer]] {row.get('kind', '?')!r:.100}"):
        return _parse(LayerTime, row)


def _links(table: dict[str, Any]) -> dict[Pair, Link]:
    links: dict[Pair, Link] = {}
    for row in parse_rows(table, "link"):
        refuse_unknown(row, _LINK, "[[link]]")
        source = _text(row, "from")
        target = _text(row, "to")
        where = f"[[link]] from {source!r:.100} to {target!r:.100}"
        if (source, target) in links:
            raise ProfileError(f"{where} is listed twice")
        with _within(where):
            links[source, target] = parse_link(row, "it")
    return links


def _relayed(table: dict[str, Any]) -> frozenset[Pair]:
    relayed = set()
    for row in parse_rows(table, "link"):
        value = row.get("relayed", False)
        if not isinstance(value, bool):
            raise ProfileError(f"[[link]] relayed must be true or false, got {value!r:.100}")
        if value:
            relayed.add((_text(row, "from"), _text(row, "to")))
    return frozenset(relayed)


def _parse(kind: type[Row], row: Mapping[str, Any], **parsed: Any) -> Row:
    """A dataclass from the table that has its fields as keys; `parsed` are those that are tables
    themselves.
    """
    keys = {each.name: each for each in fields(kind) if each.name not in parsed}
    refuse_unknown(row, set(keys), "it")
    for key, each in keys.items():
        if key not in row and each.default is MISSING:
            raise ProfileError(f"it needs {key}")
    values = {key: _value(keys[key], value) for key, value in row.items()}
    return kind(**values, **parsed)


def _value(into: Field[Any], value: Any) -> Any:
    """`value` as the field's type has it; a whole number is a float as well, and true is none."""
    types = str(into.type)
    if isinstance(value, str) and "str" in types:
        return value
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and "int" in types:
        return value
    if "float" in types and (whole or isinstance(value, float)):
        return _as_float(into.name, value)
    raise ProfileError(f"{into.name} must be {_spoken(types)}, got {value!r:.100}")


def _as_float(key: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ProfileError(f"{key} is too large for any machine") from None


def _spoken(types: str) -> str:
    if "float" in types:
        return "a number"
    names = {"str": "a text", "int": "a whole number"}
    return " or ".join(names[each] for each in ("str", "int") if each in types)


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table[key]
    if not isinstance(value, dict):
        raise ProfileError(f"{key} is a table, [{key}]; got {value!r:.100}")
    return value


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ProfileError(f"[[link]] needs {key!r}, the name of a machine; got {value!r:.100}")
    return value


@contextmanager
def _within(where: str) -> Iterator[None]:
    """Names the table in what is said of its keys."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _stated(of: Any) -> dict[str, Any]:
    """The fields that say more than their defaults do."""
    values = {}
    for each in fields(of):
        value = getattr(of, each.name)
        if value != each.default:
            values[each.name] = value
    return values


def _block(title: str, values: Mapping[str, Any]) -> str:
    lines = [title] if title else []
    for key, value in values.items():
        lines.append(f"{key} = {to_toml(value)}")
    return "\n".join(lines) + "\n"
