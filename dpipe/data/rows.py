"""Rows of files, each with its place: jsonl, json, csv, parquet, and a folder of datasets.

A row that cannot be read is named by its file and its line, or its number where there are no lines.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpipe.errors import DataError
from dpipe.hub.extra import extra_library

Row = dict[str, Any]
Placed = tuple[str, Row]  # "chats.jsonl, line 12", and what is there


def read_rows(paths: Iterable[Path]) -> Iterator[Placed]:
    """The rows of all files, in order. Raises `DataError` for one that is not a table's row."""
    for path in paths:
        match path.suffix:
            case ".jsonl":
                yield from _json_lines(path)
            case ".json":
                yield from _json_list(path)
            case ".csv":
                yield from _csv(path)
            case ".parquet" | ".arrow":
                yield from _arrow(path)
            case _:
                raise DataError(
                    f"data.files: {path} holds no rows by its name; give .jsonl, .json, .csv, "
                    '.parquet or .arrow, or take data.format = "text"'
                )


def _json_lines(path: Path) -> Iterator[Placed]:
    # Bytes, so that one line that is not UTF-8 does not hide where it is.
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _as_row(line, place)


def _as_row(content: bytes, place: str) -> Row:
    try:
        row = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{place} is not JSON: {error}; mend or remove it") from None
    return _checked(row, place)


def _checked(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{place} must be a JSON object, got {row!r:.80}")
    return row


def _json_list(path: Path) -> Iterator[Placed]:
    try:
        rows = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path} is not JSON: {error}; a row a line is .jsonl") from None
    if not isinstance(rows, list):
        raise DataError(f"{path} must be a JSON list of rows; a row a line is .jsonl")
    for number, row in enumerate(rows, 1):
        place = f"{path}, row {number}"
        yield place, _checked(row, place)


def _csv(path: Path) -> Iterator[Placed]:
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{place} does not have the header's columns")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {reader.line_num + 1}: {error}") from None


def _arrow(path: Path) -> Iterator[Placed]:
    """Memory-mapped by datasets: such files may be larger than memory."""
    datasets = extra_library("datasets", f"data.files {path}")
    read = datasets.Dataset.from_file
    if path.suffix == ".parquet":
        read = datasets.Dataset.from_parquet
    try:
        table = read(str(path))
    except Exception as error:  # whatever pyarrow and datasets raise
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from None
    for number, row in enumerate(table, 1):
        yield f"{path}, row {number}", dict(row)
