"""Somebody's folder of a run, shown by `dpipe watch` and `dpipe report`: nothing in it hangs,
floods or crashes them, and none of its texts becomes markup or commands a terminal.
"""

import json
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.bounds import quickly

from dpipe.cli.main import main
from dpipe.elastic.journal import NAME
from dpipe.watch.folder import RunFolder
from dpipe.watch.report import write_report

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J"
ENDLESS = (
    "CREATE VIEW events AS WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) "
    "SELECT x AS time, 'a' AS text, x AS rowid FROM t"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    write_rows(folder, {"step": 0, "loss": 2.0, "step_s": 0.5})
    return folder


def write_rows(folder: Path, *rows: object) -> None:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


ROWS = [
    b'{"step": 1, "loss": NaN}',
    b'{"step": 1, "loss": 1e999}',
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 9007199254740993, "loss": 1.0}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\xff\xfe\x00",
    {"step": 1, "loss": -1e308, "elapsed_s": -1e308, "bubble": 1e308},
    {"step": 1, "loss": [1, 2], "elapsed_s": "x", "mb_per_s": 7},
    {"step": 1, "mb_per_s": {f"0->{HOSTILE}": 1.0, "1->0": 1e308}},
    {"step": -5, "loss": 1.0},
    {"step": True},
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row)[:40])
def test_report_of_any_row_is_one_page_without_its_markup(run: Path, row: object) -> None:
    write_rows(run, {"step": 0, "loss": 2.0}, row, {"step": 2, "loss": 2.0})
    with quickly():
        page = write_report([str(run)], None).read_text()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in page
    found = re.search(r'id="report">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    # What a browser's JSON.parse refuses: NaN and infinities.
    json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} in the page"))


def test_line_without_an_end_takes_little_memory(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.truncate(64 << 20)
    source = RunFolder(run)
    with quickly(megabytes=100):
        while source.poll().step is None:
            continue
        for _ in range(20):
            source.poll()
    source.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/rank-0.log", "journal.sqlite"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipe_or_link_in_the_place_of_a_file_is_none(
    run: Path, name: str, make: Callable[[Path], None]
) -> None:
    (run / name).unlink(missing_ok=True)
    make(run / name)
    source = RunFolder(run)
    with quickly():
        picture = source.poll()
    source.close()
    assert picture.events == ()


JOURNALS = {
    "rows without end": [ENDLESS],
    "values that are none": [
        "CREATE TABLE events (time, text)",
        "INSERT INTO events VALUES ('x', x'ff')",
    ],
    "no time that there is": [
        "CREATE TABLE events (time, text)",
        "INSERT INTO events VALUES (1e300, 'y')",
    ],
    "a text of 50 MB": [
        "CREATE TABLE events (time, text)",
        "INSERT INTO events VALUES (1, zeroblob(50000000))",
    ],
}


@pytest.mark.parametrize("orders", JOURNALS.values(), ids=JOURNALS.keys())
def test_journal_of_an_attacker_is_left_out(
    run: Path, orders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view in the place of the table had `dpipe report` run for ever."""
    monkeypatch.setattr("dpipe.elastic.journal._READ_S", 0.2)
    database = sqlite3.connect(run / NAME)
    for order in orders:
        database.execute(order)
    database.commit()
    database.close()
    source = RunFolder(run)
    with quickly():
        events = source.poll().events
    source.close()
    assert all(event.at == "?" for event in events)


BIND = [
    "",
    ":",
    "7007",
    "127.0.0.1:",
    "127.0.0.1:99999",
    "127.0.0.1:-1",
    "\x1b[2J:1",
    "no.where.:1",
]


@pytest.mark.parametrize("bind", BIND)
def test_watch_refuses_an_address_that_is_none(run: Path, bind: str) -> None:
    result = CliRunner().invoke(main, ["watch", str(run), "--bind", bind])
    assert result.exit_code == 2, result.output
    assert "--bind" in result.output
    assert "\x1b" not in result.output
