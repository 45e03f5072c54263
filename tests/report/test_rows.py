"""Rows of metrics through a pipe, both ends in this process."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dpipe.report.rows import RowPipe, rows_to_launcher

ROWS = [{"step": 0, "loss": 5.5, "mb_per_s": {"0->1": 2.0}}, {"step": 0, "held_out_loss": 5.25}]


@pytest.fixture
def rows() -> list[Mapping[str, Any]]:
    return []


@pytest.fixture
def pipe(rows: list[Mapping[str, Any]]) -> Iterator[RowPipe]:
    with RowPipe(rows.append) as pipe:
        yield pipe


@pytest.fixture
def environ(pipe: RowPipe) -> Iterator[dict[str, str]]:
    """Rank 0's environment, with its end of the pipe."""
    inherited = os.dup(pipe.write_fd)
    yield {"DPIPE_ROWS_FD": str(inherited)}
    os.close(inherited)


def test_rows_come_as_they_were_sent(
    pipe: RowPipe, rows: list[Mapping[str, Any]], environ: dict[str, str]
) -> None:
    send = rows_to_launcher(environ)
    assert send is not None
    pipe.take()
    assert rows == []
    for row in ROWS:
        send(row)
    pipe.take()
    assert rows == ROWS


def test_incomplete_row_is_waited_for(pipe: RowPipe, rows: list[Mapping[str, Any]]) -> None:
    os.write(pipe.write_fd, b'{"step": 1}\n{"st')
    pipe.take()
    assert rows == [{"step": 1}]
    os.write(pipe.write_fd, b'ep": 2}\n')
    pipe.take()
    assert rows == [{"step": 1}, {"step": 2}]


def test_environment_of_rank_0_has_the_end_to_write_to(pipe: RowPipe) -> None:
    assert pipe.added_to({"HOME": "/root"}) == {
        "HOME": "/root",
        "DPIPE_ROWS_FD": str(pipe.write_fd),
    }


def test_nothing_is_sent_where_no_launcher_asked() -> None:
    assert rows_to_launcher({"HOME": "/root"}) is None


def test_rank_continues_without_its_launcher() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    send = rows_to_launcher({"DPIPE_ROWS_FD": str(write_fd)})
    assert send is not None
    send(ROWS[0])
    send(ROWS[1])
    del send  # Python 3.13 says so where its stream is flushed into a descriptor that is closed
    os.close(write_fd)
