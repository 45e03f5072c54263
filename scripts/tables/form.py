"""Rows of a table as Markdown, CSV or JSON. Rows are dataclasses and their fields the columns."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dpipe.errors import ConfigError


@dataclass(frozen=True)
class Parameter:
    """A figure that a table's predictions depend on and that the table's source does not give.

    `origin` begins with one of `ORIGINS`: "nominal" for a data sheet or a program's default,
    "deduced" for a conclusion from the source, "assumed", or "fitted on" the rows that it names.
    """

    name: str
    value: float
    unit: str
    origin: str


ORIGINS = ("nominal", "deduced", "assumed", "fitted on")


def as_text(
    rows: Sequence[Any],
    form: str | None,
    note: str,
    parameters: Sequence[Parameter] = (),
    digits: int = 10,
) -> str:
    """`form` is "csv", "json", or None for Markdown with the `note` and the parameters below it.

    Numbers have at most `digits` significant digits.
    """
    names = [field.name for field in fields(rows[0])]
    if form == "json":
        return json.dumps([asdict(row) for row in rows], indent=2)
    if form == "csv":
        lines = io.StringIO()
        table = [[_cell(getattr(row, name), digits) for name in names] for row in rows]
        csv.writer(lines, lineterminator="\n").writerows([names, *table])
        return lines.getvalue().rstrip()
    return f"{as_markdown(rows, digits)}\n\n{with_parameters(note, parameters)}"


def with_parameters(note: str, parameters: Sequence[Parameter]) -> str:
    """The summary that the docs show of a table with too many rows for a page."""
    if not parameters:
        return note
    return f"{note}\n\n{as_markdown(parameters)}"


def as_markdown(rows: Sequence[Any], digits: int = 10) -> str:
    names = [field.name for field in fields(rows[0])]
    lines = [names, ["---"] * len(names)]
    lines += [[_cell(getattr(row, name), digits) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: float | str | bool | None, digits: int) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else ""
        case float():
            return f"{value:.{digits}g}"  # four would make 1.1e+04 of a published 10999
    return str(value)


def put_between_marks(path: Path, name: str, mode: str, text: str) -> None:
    """Replace what is between the two marks in `path`. Raises `ConfigError` if one is missing."""
    begin, end = f"<!-- {name} {mode} -->", "<!-- end -->"
    before, begin_mark, rest = path.read_text(encoding="utf-8").partition(begin)
    _, end_mark, after = rest.partition(end)
    if not (begin_mark and end_mark):
        raise ConfigError(
            f"{path} has no lines {begin} and {end} for the comparison to stand between"
        )
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def new_figure() -> Any:
    """Raises `ConfigError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "--png needs matplotlib; install dpipe with the extra: pip install 'dpipe[plot]'"
        ) from None
    return Figure(figsize=(9, 5), layout="constrained")
