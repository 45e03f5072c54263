"""Rows of any table as Markdown, CSV or JSON: rows are dataclasses, their fields the columns."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any


def as_text(rows: Sequence[Any], form: str | None, note: str) -> str:
    """`form` is "csv", "json" or None, for Markdown with the `note` below it."""
    names = [field.name for field in fields(rows[0])]
    table = [[_cell(getattr(row, name)) for name in names] for row in rows]
    if form == "json":
        return json.dumps([asdict(row) for row in rows], indent=2)
    if form == "csv":
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([names, *table])
        return lines.getvalue().rstrip()
    lines_ = [names, ["---"] * len(names), *table]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines_), "", note])


def _cell(value: float | str | bool | None) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else ""
        case float():
            return f"{value:.4g}"
    return str(value)
