"""A term that is held, with its threads, at fsspec's file system in memory."""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpipe.elastic.agents import Epoch
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.errors import CheckpointError, TermLost
from dpipe.terms.copying import METRICS, RunCopies, fetch
from dpipe.terms.holding import HeldTerm
from dpipe.terms.policy import TermTimes
from dpipe.terms.records import Term
from dpipe.terms.storing import TermStore, TermStoreError

RUN = "0" * 16
TIMES = TermTimes(beat_s=0.02, lease_s=0.4, patience_s=0.4)


@dataclass
class Kept:
    """A folder with a journal, whose first term is held."""

    folder: Path
    store: TermStore
    journal: RunJournal
    held: HeldTerm

    def take_over(self) -> None:
        assert self.store.claim(self.held.number + 1, Term(run=RUN, holder="b" * 16, host="there"))

    def cut(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        """From here on the URL does not answer, until what is returned is called."""
        inner = TermStore.write

        def fails(*args: object) -> None:
            raise TermStoreError("cannot reach it")

        monkeypatch.setattr(TermStore, "write", fails)
        return lambda: monkeypatch.setattr(TermStore, "write", inner)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    for name in ("config.json", "run.json"):
        (tmp_path / name).write_text("{}")
    journal = RunJournal(tmp_path / NAME)
    store = TermStore(f"memory://{secrets.token_hex(8)}")
    assert store.claim(1, Term(run=RUN, holder="a" * 16, host="here"))
    held = HeldTerm(store, 1, TIMES, RunCopies(store, 1, tmp_path, journal))
    held.start("here:1")
    yield Kept(tmp_path, store, journal, held)
    held.close()
    journal.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def count(kept: Kept) -> int:
    beat = kept.store.beat(1)
    assert beat is not None
    return beat.count


def test_count_rises_while_the_term_is_held(kept: Kept) -> None:
    first = count(kept)
    wait_until(lambda: count(kept) > first + 3)
    kept.held.check()


def test_holder_sees_that_another_has_taken_over(kept: Kept) -> None:
    kept.take_over()
    wait_until(lambda: kept.held.is_lost)
    with pytest.raises(TermLost, match="coordinates the run no longer"):
        kept.held.check()
    assert "in term 2: this one has stopped" in kept.held.lost_to()


def test_epoch_is_told_to_nobody_where_another_has_taken_over(kept: Kept) -> None:
    """Also before the next beat could have shown it."""
    kept.held.stop_waiting()
    kept.take_over()
    with pytest.raises(TermLost):
        kept.held.publish()


def test_epoch_is_at_the_url_before_it_is_told(kept: Kept, tmp_path: Path) -> None:
    kept.journal.begin(Epoch(1, 7, ("a", "b")))
    kept.held.publish()
    there = tmp_path / "there"
    there.mkdir()
    fetch(kept.store, RUN, there)
    journal = RunJournal(there / NAME)
    assert journal.past().resumed_at == ((1, 7),)
    journal.close()


def test_nobody_is_answered_while_the_url_is_away(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend = kept.cut(monkeypatch)
    wait_until(lambda: not kept.held.holds)
    assert not kept.held.is_lost
    mend()
    kept.held.check()
    assert kept.held.holds


def test_wait_for_the_url_ends_where_the_coordinator_is_to_stop(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.cut(monkeypatch)
    wait_until(lambda: not kept.held.holds)
    kept.held.stop_waiting()
    with pytest.raises(TermLost):
        kept.held.check()


def test_end_of_the_run_is_said_with_its_reason(kept: Kept) -> None:
    kept.held.close("over", "x" * 2000)
    beat = kept.store.beat(1)
    assert beat is not None
    assert (beat.state, beat.failure) == ("over", "x" * 1000)


def rows(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


def line(step: int) -> bytes:
    return json.dumps({"step": step, "loss": float(step)}).encode() + b"\n"


def test_rows_are_copied_as_they_come_and_once_those_that_are_made_again(
    kept: Kept, tmp_path: Path
) -> None:
    copies = RunCopies(kept.store, 2, kept.folder, kept.journal)
    assert kept.store.claim(2, Term(run=RUN, holder="a" * 16, host="here"))
    metrics = kept.folder / METRICS
    there = tmp_path / "there"
    there.mkdir()
    for number in (10, 700, 1203):
        metrics.write_bytes(b"".join(map(line, range(number))))
        copies.copy()
        fetch(kept.store, RUN, there)
        assert rows(there / METRICS) == list(range(number))
    # Of an epoch that began at step 900; what lies behind is of the one before.
    fewer = kept.folder / "fewer"
    fewer.write_bytes(b"".join(map(line, range(900))))
    fewer.replace(metrics)
    copies.copy()
    fetch(kept.store, RUN, there)
    assert rows(there / METRICS)[:900] == list(range(900))


def test_lines_that_are_no_rows_are_left_out(kept: Kept, tmp_path: Path) -> None:
    content = line(0) + b"[" * 100_000 + b"\n[]\n{}\n" + line(1)
    kept.store.write(1, "rows-00000.jsonl", content)
    there = tmp_path / "there"
    there.mkdir()
    fetch(kept.store, RUN, there)
    assert rows(there / METRICS) == [0, 1]


def test_copies_of_earlier_terms_are_removed_behind_those_of_a_new_one(kept: Kept) -> None:
    kept.take_over()
    RunCopies(kept.store, 2, kept.folder, kept.journal).copy()
    assert kept.store.read(1, NAME) is None
    assert kept.store.read(2, NAME) is not None
    assert kept.store.is_claimed(1)


def test_url_without_a_journal_has_nothing_to_take_over(tmp_path: Path) -> None:
    store = TermStore(str(tmp_path))
    store.claim(1, Term(run=RUN, holder="a" * 16, host="here"))
    with pytest.raises(CheckpointError, match="no coordinator has kept its journal"):
        fetch(store, RUN, tmp_path)
