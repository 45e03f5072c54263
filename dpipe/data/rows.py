"""Rows of files, each with its place: jsonl, json, csv, parquet and arrow, here or at a URL,
compressed or not.

    data.files ──find_row_files──> RowFile, ... ──read_rows──> ("chats.jsonl, line 12", row)

A row that cannot be read is named by its file and its line, or its number where there are no lines.
Rows are read one after the other: no file need fit in memory, and none at a URL is copied here.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.utils import infer_compression

from dpipe.data.corpus import find_files
from dpipe.errors import DataError, DpipeError
from dpipe.hub.extra import extra_library

Row = dict[str, Any]
Placed = tuple[str, Row]  # "chats.jsonl, line 12", and what is there
_ARROW_ROWS = 1000  # of a parquet file in memory at a time
_KINDS = ".jsonl, .json, .csv (also .gz, .xz; .zst with zstandard installed), .parquet or .arrow"


@dataclass(frozen=True)
class RowFile:
    """A file on any file system that fsspec knows."""

    name: str  # as the user knows it: a path or a URL
    path: str  # as its file system does
    fs: Any

    @property
    def suffix(self) -> str:
        """Of what is inside, where it is compressed."""
        path = PurePosixPath(self.path)
        return path.suffix if self._compression is None else path.with_suffix("").suffix

    @property
    def _compression(self) -> str | None:
        found: str | None = infer_compression(self.path)
        return found

    def open(self) -> Any:
        return self.fs.open(self.path, "rb", compression=self._compression)

    def content_digest(self) -> bytes:
        with self.open() as file:  # it may be larger than memory
            return hashlib.file_digest(file, "sha256").digest()

    def state_digest(self) -> bytes:
        """Of its size, its time of writing and such, which costs no reading."""
        state = f"{self.name} {self.fs.ukey(self.path)}"
        return hashlib.sha256(state.encode()).digest()


def find_row_files(patterns: Sequence[str], key: str) -> list[RowFile]:
    """The files that the patterns of `key` name: globs, URLs, and folders of datasets.

    Raises `DataError` for one that names nothing.
    """
    remote = []
    tables = []
    plain = []
    for pattern in patterns:
        path = Path(pattern)
        if "://" in pattern:
            remote += _at_url(pattern, key)
        elif path.is_dir():
            tables += _table_files(path, key)
        else:
            plain.append(pattern)
    if plain or not patterns:
        tables += find_files(plain, key)
    return [*local_files(tables), *remote]


def local_files(paths: Iterable[Path]) -> list[RowFile]:
    fs = fsspec.filesystem("file")
    return [RowFile(str(path), str(path.absolute()), fs) for path in paths]


def _at_url(pattern: str, key: str) -> list[RowFile]:
    try:
        fs, inside = fsspec.url_to_fs(pattern)
        # What is no glob may lie where nothing can be listed, as behind http.
        paths = sorted(fs.glob(inside)) if "*" in inside else [inside] * bool(fs.exists(inside))
    # A file system that is not installed, a scheme that none has, and whatever a client raises.
    except Exception as error:
        raise DataError(f"{key} {pattern!r} cannot be read: {_in_a_line(error)}") from None
    if not paths:
        raise DataError(f"{key} {pattern!r} does not exist")
    return [RowFile(fs.unstrip_protocol(path), path, fs) for path in paths]


def _table_files(folder: Path, key: str) -> list[Path]:
    """As `Dataset.save_to_disk` has named them. Raises `DataError` for other folders."""
    files = sorted(folder.glob("data-*.arrow"))
    if files:
        return files
    splits = {str(path.parent) for path in folder.glob("*/data-*.arrow")}
    hint = ", or name files: FOLDER/*.jsonl"
    if splits:
        names = ", ".join(sorted(splits))
        hint = f"; name a split: {names}"
    raise DataError(f"{key} {folder} is not a folder that Dataset.save_to_disk has written{hint}")


def read_rows(files: Iterable[RowFile]) -> Iterator[Placed]:
    """The rows of all files, in order. Raises `DataError` for one that is not a table's row."""
    for file in files:
        yield from rows_of(file)


def rows_of(file: RowFile, first: int = 0) -> Iterator[Placed]:
    """The rows of one file from row `first` on, counted from 0: those before are not parsed, but in
    formats that can be read only as a whole. Raises as `read_rows`.
    """
    readers = {
        ".jsonl": _json_lines,
        ".json": _json,
        ".csv": _csv,
        ".parquet": _parquet,
        ".arrow": _arrow,
    }
    if file.suffix not in readers:
        raise DataError(
            f"data.files: {file.name} holds no rows by its name; give {_KINDS}, or take "
            'data.format = "text"'
        )
    try:
        yield from readers[file.suffix](file, first)
    except DpipeError:
        raise
    except Exception as error:  # whatever a file system, a decompressor and pyarrow raise
        raise DataError(f"{file.name} cannot be read: {_in_a_line(error)}") from None


def _json_lines(file: RowFile, first: int) -> Iterator[Placed]:
    # Bytes, so that one line that is not UTF-8 does not hide where it is.
    with file.open() as lines:
        filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for number, line in islice(filled, first, None):
            place = f"{file.name}, line {number}"
            yield place, _as_row(line, place)


def _as_row(content: bytes, place: str) -> Row:
    try:
        row = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{place} is not JSON: {error}; correct or remove it") from None
    return _checked(row, place)


def _checked(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{place} must be a JSON object, got {row!r:.80}")
    return row


def _json(file: RowFile, first: int) -> Iterator[Placed]:
    """A list; or a row a line, as many files of the hub have it under this name."""
    with file.open() as opened:
        content = opened.read(1)
        while content.isspace():
            content = opened.read(1)
        if content == b"[":
            content += opened.read()
    if content[:1] != b"[":
        yield from _json_lines(file, first)
        return
    try:
        rows = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{file.name} is not JSON: {error}") from None
    for number, row in enumerate(rows[first:], first + 1):
        place = f"{file.name}, row {number}"
        yield place, _checked(row, place)


def _csv(file: RowFile, first: int) -> Iterator[Placed]:
    with file.open() as opened:
        text = io.TextIOWrapper(opened, encoding="utf-8", newline="")
        reader = csv.DictReader(text, strict=True)
        try:
            for row in islice(reader, first, None):
                place = f"{file.name}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{place} does not have the header's columns")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file.name}, line {reader.line_num + 1}: {error}") from None


def _parquet(file: RowFile, first: int) -> Iterator[Placed]:
    """Of a row group before row `first` not even the bytes are read."""
    parquet = _pyarrow("pyarrow.parquet", file)
    with parquet.ParquetFile(file.open()) as table:
        groups: list[int] = []
        start = 0  # rows of the groups that are left out
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            if not groups and start + count <= first:
                start += count
            else:
                groups.append(group)
        batches = table.iter_batches(_ARROW_ROWS, row_groups=groups)
        yield from _numbered(file, batches, start, first)


def _arrow(file: RowFile, first: int) -> Iterator[Placed]:
    """The stream that datasets writes."""
    ipc = _pyarrow("pyarrow.ipc", file)
    with ipc.open_stream(file.open()) as batches:
        yield from _numbered(file, batches, 0, first)


def _pyarrow(module: str, file: RowFile) -> Any:
    return extra_library(module, f"data.files {file.name}")


def _numbered(file: RowFile, batches: Iterable[Any], start: int, first: int) -> Iterator[Placed]:
    """The rows of `batches`, the first of which is row `start` of the file, from `first` on."""
    batches = iter(batches)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # whatever pyarrow and the file system raise
            raise DataError(
                f"{file.name} cannot be read after row {start}: {_in_a_line(error)}"
            ) from None
        if batch is None:
            return
        skipped = min(max(0, first - start), batch.num_rows)
        for number, row in enumerate(batch.slice(skipped).to_pylist(), start + skipped + 1):
            yield f"{file.name}, row {number}", row
        start += batch.num_rows


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
