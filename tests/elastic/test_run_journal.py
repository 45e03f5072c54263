import sqlite3
from pathlib import Path

import pytest

from dpipe.elastic.agents import Epoch
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.errors import CheckpointError, RunError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of two epochs."""
    path = tmp_path / NAME
    journal = RunJournal(path)
    journal.begin(Epoch(1, 0, ("a", "b")))
    journal.begin(Epoch(2, 7, ("c", "b")))
    journal.put("newest_step", "9")
    journal.note("a was lost")
    journal.close()
    return path


def test_journal_holds_what_was_kept(path: Path) -> None:
    journal = RunJournal(path)
    past = journal.past()
    assert past.resumed_at == ((1, 0), (2, 7))
    assert past.seats == ("c", "b")
    assert past.newest_step == 9
    assert [text for _, text in journal.events(5)] == ["a was lost"]
    journal.close()


def test_epoch_is_kept_once(path: Path) -> None:
    journal = RunJournal(path)
    with pytest.raises(RunError, match="cannot write the journal"):
        journal.begin(Epoch(2, 8, ("c", "b")))
    assert journal.past().resumed_at == ((1, 0), (2, 7))
    journal.close()


@pytest.mark.parametrize("damage", ["garbage", "cut", "flipped", "seats", "format", "number"])
def test_damaged_journal_is_refused_with_words(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage == "garbage":
        path.write_bytes(b"not a database" * 100)
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[4096:4196] = b"\xff" * 100
        path.write_bytes(content)
    else:
        orders = {
            "seats": "UPDATE epochs SET seats = '{}'",
            "format": "UPDATE run SET value = '99' WHERE key = 'format'",
            "number": "UPDATE run SET value = 'many' WHERE key = 'newest_step'",
        }
        database = sqlite3.connect(path)
        with database:
            database.execute(orders[damage])
        database.close()
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"(?s)journal.sqlite is damaged .*: put back a copy"):
        RunJournal(path)
    assert path.read_bytes() == before
