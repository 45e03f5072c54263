"""What a coordinator and a standby are refused, before anything is done."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from dpipe.agent.claiming import address_of, claim_term
from dpipe.agent.coordinate import coordinate
from dpipe.config.load import Config
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.errors import CheckpointError, ConfigError, RunError
from dpipe.store.run_folder import opened, save_configuration
from dpipe.terms.copying import RunCopies
from dpipe.terms.holding import HeldTerm
from dpipe.terms.policy import TermTimes
from dpipe.terms.storing import TermStore


@pytest.fixture
def config(tiny: Callable[..., Config], tmp_path: Path) -> Config:
    return tiny(
        pipeline__stages=2,
        run__folder=str(tmp_path / "first"),
        run__checkpoint_url=str(tmp_path / "shared"),
    )


@pytest.fixture
def first(config: Config) -> Iterator[HeldTerm]:
    """The term of a coordinator that has begun."""
    with opened(config, resume=False, rank=0) as folder:
        save_configuration(folder, config)
        journal = RunJournal(folder / NAME)
        store = TermStore(str(config.run.checkpoint_url))
        number = claim_term(store, folder, journal)
        copies = RunCopies(store, number, folder, journal)
        held = HeldTerm(store, number, TermTimes.of(config.timeouts.heartbeat), copies)
        held.start("127.0.0.1:7000")
        yield held
        held.close()
        journal.close()


def start(config: Config, *, standby: bool = True) -> list[str]:
    """What it says."""
    said: list[str] = []
    options: dict[str, Any] = {"patience_s": 1.0, "say": said.append, "standby": standby}
    coordinate(config, (), "127.0.0.1:0", **options)  # type: ignore[arg-type]
    return said


def elsewhere(config: Config, tmp_path: Path, **changes: Any) -> Config:
    return config.with_(run__folder=str(tmp_path / "second"), **changes)


def test_standby_without_a_url_is_refused(tiny: Callable[..., Config]) -> None:
    config = tiny(pipeline__stages=2)
    with pytest.raises(ConfigError, match=r"finds the run by run\.checkpoint_url: set it"):
        start(config)
    assert not Path(config.run.folder).exists()


def test_standby_at_a_url_that_creates_names_twice_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFileSystem, "protocol", "hdfs")
    with pytest.raises(ConfigError, match="cannot keep who coordinates"):
        start(config)
    assert not Path(config.run.folder).exists()


def test_second_coordinator_of_a_live_term_is_refused(
    first: HeldTerm, config: Config, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="coordinates another run at .*shared: set another"):
        start(elsewhere(config, tmp_path), standby=False)
    first.check()


def test_standby_of_another_job_is_refused(first: HeldTerm, config: Config, tmp_path: Path) -> None:
    other = elsewhere(config, tmp_path, train__seed=7)
    with pytest.raises(ConfigError, match=r"train\.seed"):
        start(other)
    assert not Path(other.run.folder).exists()


def test_standby_in_the_folder_of_another_run_is_refused(
    first: HeldTerm, config: Config, tmp_path: Path
) -> None:
    other = elsewhere(config, tmp_path)
    with opened(other.with_(run__checkpoint_url=None), resume=False, rank=0):
        pass
    with pytest.raises(ConfigError, match="second holds run .*choose another run.folder"):
        start(other)


def test_standby_in_the_folder_of_the_coordinator_is_refused(
    first: HeldTerm, config: Config
) -> None:
    with pytest.raises(ConfigError, match="another coordinator has the run in .*first"):
        start(config)


@pytest.mark.parametrize("name", ["term.json", "beat.json", NAME])
def test_damaged_record_is_refused(
    first: HeldTerm, config: Config, tmp_path: Path, name: str
) -> None:
    first.close()
    first._store.write(1, name, b"\x00 what somebody else wrote")
    with pytest.raises(CheckpointError, match="is damaged"):
        start(elsewhere(config, tmp_path))


def test_standby_of_a_run_that_has_failed_says_why(
    first: HeldTerm, config: Config, tmp_path: Path
) -> None:
    ending = threading.Timer(1.0, first.close, ("over", "it failed 3 times at step 5"))
    ending.start()
    with pytest.raises(RunError, match="has failed: it failed 3 times at step 5"):
        start(elsewhere(config, tmp_path))
    ending.join()


def test_standby_of_a_run_that_has_finished_ends(
    first: HeldTerm, config: Config, tmp_path: Path
) -> None:
    first.close("over")
    assert "has finished" in start(elsewhere(config, tmp_path))[-1]
    assert not (tmp_path / "second").exists()


def test_coordinator_that_is_started_again_in_its_folder_has_the_next_term(
    first: HeldTerm, config: Config
) -> None:
    folder = Path(config.run.folder)
    journal = RunJournal(folder / NAME)
    assert claim_term(first._store, folder, journal) == 2
    journal.close()


def test_machines_are_told_what_node_advertise_says(config: Config) -> None:
    assert address_of(config, "127.0.0.1", 7000) == "127.0.0.1:7000"
    public = config.with_(node__advertise="203.0.113.7")
    assert address_of(public, "0.0.0.0", 7000) == "203.0.113.7:7000"
