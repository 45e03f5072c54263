"""The checkpoints of a run are not deleted by another run, nor mistaken for its own."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dpipe.config.load import Config
from dpipe.coordinator.alone import Alone
from dpipe.errors import CheckpointError, RunAborted, RunError, TransferError
from dpipe.plan import run_plan
from dpipe.run.start import launch_ranks
from dpipe.store import storage
from dpipe.store.checkpoint import latest
from dpipe.store.identity import RunIdentity, agreed_identity, claim, identity_of, owner_of, release
from dpipe.store.run_folder import checkpoint_url, open_folder
from dpipe.wire.schema import Schema

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
RunRanks = Callable[..., list[BaseException | None]]

FIRST = RunIdentity("0123456789abcdef", "/runs/first", "here")
SECOND = RunIdentity("fedcba9876543210", "/runs/second", "there")


@pytest.fixture(params=["file", "memory", "plain"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A URL that several runs share."""
    if request.param == "memory":
        yield f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    elif request.param == "file":
        yield f"file://{tmp_path}/shared"
    else:
        yield str(tmp_path / "shared")


def content(url: str) -> dict[str, bytes]:
    fs, root = fsspec.url_to_fs(url)
    return {path: fs.cat_file(path) for path in sorted(fs.find(root))}


def strip_identity(url: str) -> None:
    """Make it a checkpoint from before runs had an id."""
    fs, root = fsspec.url_to_fs(url)
    fs.rm_file(f"{root}/run.json")
    for path in fs.glob(f"{root}/step-*/index.json"):
        index = json.loads(fs.cat_file(path))
        del index["run"]
        fs.pipe_file(path, json.dumps(index).encode())


def test_new_run_with_the_url_of_another_is_refused_before_it_writes(
    tiny: Make, losses: Losses, run_ranks: RunRanks, tmp_path: Path, url: str
) -> None:
    """It deleted the other's checkpoints, and the first run, resumed, took the second's."""
    first = tiny(run__checkpoint_url=url, train__steps=40, run__checkpoint_every=35)
    losses(first)
    before = content(url)
    second = first.with_(run__folder=str(tmp_path / "second"), train__steps=5)
    (error,) = run_ranks(second)
    assert isinstance(error, CheckpointError)
    assert error.exit_code == 2
    identity = identity_of(tmp_path / "run")
    assert f"are of {identity}, and this is a new run; set another run.checkpoint_url" in str(error)
    assert content(url) == before
    assert not (tmp_path / "second").exists()
    losses(first.with_(train__steps=41), resume=True)
    assert latest(url) == 41


def test_launcher_refuses_it_before_any_rank_starts(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    first = tiny(run__checkpoint_url=f"{tmp_path}/shared")
    losses(first)
    second = first.with_(run__folder=str(tmp_path / "second"))
    job = tmp_path / "job.json"
    job.write_text(json.dumps(second.model_dump(mode="json", exclude_unset=True)))
    with pytest.raises(CheckpointError, match="and this is a new run"):
        launch_ranks(str(job), (), num_ranks=None, resume=None, fallback=False, say=print)
    assert not (tmp_path / "second").exists()


def test_resumed_run_does_not_take_the_checkpoints_of_another(
    tiny: Make, losses: Losses, run_ranks: RunRanks, tmp_path: Path, url: str
) -> None:
    first = tiny(run__folder=str(tmp_path / "first"))
    second = tiny(run__folder=str(tmp_path / "second"), run__checkpoint_url=url)
    losses(first)
    losses(second)
    before = content(url)
    (error,) = run_ranks(first.with_(run__checkpoint_url=url, train__steps=9), resume=True)
    assert isinstance(error, CheckpointError)
    for folder in ("first", "second"):
        assert str(identity_of(tmp_path / folder)) in str(error)
    assert content(url) == before


def test_checkpoint_of_another_run_that_was_put_among_ones_own_is_refused(
    tiny: Make, losses: Losses, run_ranks: RunRanks, tmp_path: Path
) -> None:
    first = tiny(run__folder=str(tmp_path / "first"))
    second = tiny(run__folder=str(tmp_path / "second"), train__steps=5)
    losses(first)
    losses(second)
    strange = "checkpoints/step-00000005"
    shutil.copytree(tmp_path / "second" / strange, tmp_path / "first" / strange)
    (error,) = run_ranks(first.with_(train__steps=9), resume=True)
    assert isinstance(error, CheckpointError)
    assert f"are of {identity_of(tmp_path / 'second')}, and this is" in str(error)


def test_pruning_leaves_what_another_run_wrote(tiny: Make, losses: Losses, tmp_path: Path) -> None:
    """However it got there."""
    first = tiny(run__folder=str(tmp_path / "first"), train__steps=5)
    second = tiny(run__folder=str(tmp_path / "second"), run__keep=1, train__steps=3)
    losses(first)
    losses(second)
    saved = tmp_path / "second/checkpoints"
    for step in (2, 5):
        shutil.copytree(tmp_path / "first/checkpoints/step-00000005", saved / f"step-0000000{step}")
    os.rename(saved / "step-00000005", tmp_path / "aside")
    losses(second.with_(train__steps=4), resume=True)
    assert sorted(path.name for path in saved.glob("step-*")) == ["step-00000002", "step-00000004"]


def test_second_of_two_runs_at_once_is_refused_at_its_start(
    tiny: Make, run_ranks: RunRanks, tmp_path: Path, url: str
) -> None:
    """The first has written no checkpoint yet."""
    claim(url, FIRST, takes_unmarked=False)
    before = content(url)
    (error,) = run_ranks(tiny(run__checkpoint_url=url))
    assert isinstance(error, CheckpointError)
    assert str(FIRST) in str(error)
    assert content(url) == before
    assert not (tmp_path / "run").exists()


def test_run_that_was_faster_between_look_and_claim_is_found(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = storage.Storage.create

    def too_late(self: storage.Storage, name: str, content: bytes) -> None:
        claim_of_first = json.dumps(FIRST.as_table()).encode()
        real(self, name, claim_of_first)
        real(self, name, content)

    monkeypatch.setattr(storage.Storage, "create", too_late)
    with pytest.raises(CheckpointError, match=r"are of run 0123456789abcdef .*run fedcba98765432"):
        claim(url, SECOND, takes_unmarked=False)
    assert owner_of(url) == FIRST


def test_folder_without_hard_links_is_claimed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    claim(str(tmp_path), FIRST, takes_unmarked=False)
    with pytest.raises(CheckpointError, match="are of run 0123456789abcdef"):
        claim(str(tmp_path), SECOND, takes_unmarked=False)


def test_claim_of_a_run_that_saved_nothing_ends_with_it(url: str) -> None:
    claim(url, FIRST, takes_unmarked=False)
    release(url, SECOND)
    assert owner_of(url) == FIRST
    release(url, FIRST)
    claim(url, SECOND, takes_unmarked=False)
    assert owner_of(url) == SECOND


def test_each_machine_checks_its_own_folder(
    tiny: Make,
    losses: Losses,
    run_ranks: RunRanks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 keeps its part on a disk of its own, on which another run has left checkpoints."""
    earlier = checkpoint_url(tiny(run__folder=str(tmp_path / "earlier")))
    losses(tiny(run__folder=str(tmp_path / "earlier")))
    before = content(earlier)

    def url_here(config: Config) -> str:
        return earlier if threading.current_thread().name == "rank 1" else checkpoint_url(config)

    monkeypatch.setattr(run_plan, "checkpoint_url", url_here)
    errors = run_ranks(tiny(pipeline__stages=2))
    assert isinstance(errors[1], CheckpointError)
    assert str(identity_of(tmp_path / "earlier")) in str(errors[1])
    assert isinstance(errors[0], RunAborted)
    assert "rank 1" in str(errors[0])
    assert content(earlier) == before


def test_checkpoints_of_before_are_resumed_by_the_run_that_holds_them(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    config = tiny(train__decay="none")
    losses(config)
    strip_identity(checkpoint_url(config))
    (tmp_path / "run/run.json").unlink()
    losses(config.with_(train__steps=5), resume=True)
    assert owner_of(checkpoint_url(config)) == identity_of(tmp_path / "run")


def test_checkpoints_of_before_at_a_url_are_those_of_the_run_that_they_name(
    tiny: Make, losses: Losses, run_ranks: RunRanks, tmp_path: Path, url: str
) -> None:
    first = tiny(run__checkpoint_url=url, train__decay="none")
    other = tiny(run__folder=str(tmp_path / "other"), train__seed=1)
    losses(first)
    losses(other)
    strip_identity(url)
    for folder in ("run", "other"):
        (tmp_path / folder / "run.json").unlink()
    before = content(url)
    for refused, resume in [(other, True), (other.with_(run__folder=f"{tmp_path}/new"), False)]:
        (error,) = run_ranks(refused.with_(run__checkpoint_url=url), resume=resume)
        assert isinstance(error, CheckpointError)
        assert "do not say of which run they are" in str(error)
        assert content(url) == before
    losses(first.with_(train__steps=5), resume=True)
    assert owner_of(url) == identity_of(tmp_path / "run")


def test_checkpoints_of_before_at_a_url_are_not_taken_by_a_folder_without_a_run(
    tiny: Make, losses: Losses, run_ranks: RunRanks, tmp_path: Path, url: str
) -> None:
    losses(tiny(run__checkpoint_url=url))
    strip_identity(url)
    new = tiny(run__checkpoint_url=url, run__folder=str(tmp_path / "new"), train__steps=5)
    (error,) = run_ranks(new, resume=True)
    assert isinstance(error, CheckpointError)
    assert "do not say of which run they are" in str(error)


def test_machine_that_replaces_a_lost_one_takes_up_the_run(
    tiny: Make, losses: Losses, tmp_path: Path, url: str
) -> None:
    """Its folder is empty, and it resumes: there is no other run to confuse this one with."""
    config = tiny(run__checkpoint_url=url, train__decay="none")
    losses(config)
    identity = identity_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    losses(config.with_(train__steps=5), resume=True)
    assert identity_of(tmp_path / "run") == identity


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, '{"id": "../x", "folder": "", "host": ""}', '{"id": 1}'],
    ids=["empty", "list", "no keys", "deep", "no id", "number"],
)
def test_invalid_identity_is_reported_as_damage(tiny: Make, tmp_path: Path, text: str) -> None:
    config = tiny()
    open_folder(config, resume=False)
    (tmp_path / "run/run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"run/run\.json is damaged"):
        open_folder(config, resume=False)


def test_name_of_a_run_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    evil = RunIdentity("0123456789abcdef", "\x1b]0;owned\x07", "\x1b[2J")
    claim(str(tmp_path), evil, takes_unmarked=False)
    with pytest.raises(CheckpointError) as caught:
        claim(str(tmp_path), SECOND, takes_unmarked=False)
    assert str(caught.value).isprintable()


def test_url_that_cannot_be_claimed_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write .*run\.json.*set run\.checkpoint_url"):
        claim(str(tmp_path / "file" / "below"), FIRST, takes_unmarked=False)


def test_rank_0_that_names_no_run_is_refused(tiny: Make) -> None:
    class Silent(Alone):
        rank = 1

        def share(self, key: str, value: Any, timeout_s: float, schema: Schema[Any]) -> list[Any]:
            return [None, None]

    with pytest.raises(TransferError, match="rank 0 does not say which run this is"):
        agreed_identity("run", tiny(), Silent())


def test_older_of_two_copies_of_a_run_ends_at_its_next_checkpoint(
    tiny: Make, run_ranks: RunRanks, tmp_path: Path, url: str
) -> None:
    """Both have the same id: a copy of the folder goes on while the first still trains."""
    config = tiny(run__checkpoint_url=url, train__steps=6, run__checkpoint_every=2)

    def copy_starts(row: Mapping[str, Any]) -> None:
        if row["step"] == 2:
            identity = identity_of(tmp_path / "run")
            assert identity is not None
            claim(url, replace(identity, start="f" * 16), takes_unmarked=True)

    (error,) = run_ranks(config, on_row=copy_starts)
    assert isinstance(error, RunError)
    assert "another process has continued run" in str(error)
    assert latest(url) == 2


def test_restarted_run_is_not_mistaken_for_a_copy(
    tiny: Make, losses: Losses, tmp_path: Path, url: str
) -> None:
    config = tiny(run__checkpoint_url=url, train__decay="none")
    losses(config)
    losses(config.with_(train__steps=5), resume=True)
    assert latest(url) == 5


def test_start_that_cannot_be_marked_is_named(tmp_path: Path) -> None:
    claim(str(tmp_path), FIRST, takes_unmarked=False)
    (tmp_path / "start").mkdir()
    with pytest.raises(RunError, match="cannot write .*start"):
        claim(str(tmp_path), replace(FIRST, start="f" * 16), takes_unmarked=False)
