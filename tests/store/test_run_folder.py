import errno
import fcntl
import json
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from dpipe.config.load import Config
from dpipe.config.run import RunConfig
from dpipe.errors import CheckpointError, ConfigError, JoinError, RunError
from dpipe.run.start import launch_ranks
from dpipe.store.identity import identity_of
from dpipe.store.run_folder import (
    absent,
    changes,
    chosen_before,
    keep_upload,
    load_configuration,
    logging_to,
    open_folder,
    opened,
    save_configuration,
    take_back,
)

Make = Callable[..., Config]


def test_failed_run_without_a_checkpoint_suggests_no_resume(tiny: Make, tmp_path: Path) -> None:
    """A first run often fails before its first checkpoint."""
    folder = open_folder(tiny(), resume=False)
    (folder / "metrics.jsonl").touch()
    with pytest.raises(
        ConfigError, match="already holds a run; choose another run.folder, or delete it"
    ):
        open_folder(tiny(), resume=False)


def test_nothing_is_created_for_a_missing_run(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        open_folder(tiny(), resume=True)
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_made_is_named(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file of that name")
    with pytest.raises(ConfigError, match="run.folder .*run cannot be written: .*Not a directory"):
        open_folder(tiny(), resume=False)


def test_configuration_that_is_none_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(
        ConfigError,
        match=r"/config\.json is not what a run writes: the configuration: .*, got \[\]",
    ):
        load_configuration(tmp_path)


@pytest.mark.parametrize("resume", [False, True])
def test_run_that_is_under_way_is_not_opened_by_another(tiny: Make, resume: bool) -> None:
    """For example if its launcher was killed and its ranks still write a checkpoint."""
    config = tiny()
    checkpoint = Path(config.run.folder) / "checkpoints" / "step-00000001"
    with opened(config, False, 0) as folder, opened(config, False, 1):
        identity = identity_of(folder)
        assert identity is not None
        checkpoint.mkdir(parents=True)
        (checkpoint / "index.json").write_text(json.dumps({"run": identity.as_table()}))
        with (
            pytest.raises(ConfigError, match="another process has the run in .* open"),
            opened(config, resume, 0),
        ):
            pass
        with pytest.raises(
            ConfigError, match="another process has the run in .* open"
        ):  # as a launcher looks
            open_folder(config, resume)
    with opened(config, resume, 0):
        pass


def test_folder_without_locks_is_reported(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with opened(tiny(), False, 0):
        assert "nothing prevents a second process from using it" in caplog.text


def start_that_fails(config: Config, rank: int, error: Exception) -> None:
    with (
        pytest.raises(type(error)),
        opened(config, False, rank) as folder,
        logging_to(folder, rank),
    ):
        raise error


@pytest.fixture
def deep(tiny: Make, tmp_path: Path) -> Config:
    return tiny(run__folder=str(tmp_path / "runs" / "first" / "try"))


def test_ranks_that_cannot_join_leave_nothing(deep: Config, tmp_path: Path) -> None:
    start_that_fails(deep, 0, JoinError("the port is in use"))
    assert not (tmp_path / "runs").exists()


def test_folder_that_was_there_stays(deep: Config) -> None:
    """The launcher that made it may be reading the logs in it."""
    folder = open_folder(deep, resume=False)
    start_that_fails(deep, 0, JoinError("the port is in use"))
    assert (folder / "logs" / "rank-0.log").exists()


def test_only_rank_0_removes_a_folder(deep: Config) -> None:
    folder = open_folder(deep, resume=False)
    start_that_fails(deep, 1, JoinError("wrong token"))
    assert (folder / "trace").exists()


def test_folder_that_holds_more_than_a_start_stays(deep: Config) -> None:
    folder = Path(deep.run.folder)
    made = absent(folder)
    (open_folder(deep, resume=False) / "logs" / "rank-1.log").touch()
    take_back(folder, made)
    assert [path.name for path in folder.rglob("*")] == ["logs", "rank-1.log"]


def test_log_of_a_run_that_began_stays(deep: Config) -> None:
    with pytest.raises(JoinError), opened(deep, False, 0) as folder, logging_to(folder, 0):  # noqa: PT012 - in this order
        save_configuration(folder, deep)
        raise JoinError("the ranks of a stage cannot meet")
    assert (folder / "logs" / "rank-0.log").exists()


def test_log_of_a_start_that_broke_stays(deep: Config) -> None:
    start_that_fails(deep, 0, RunError("no memory left"))
    assert (Path(deep.run.folder) / "logs" / "rank-0.log").exists()


def test_refused_folder_leaves_no_cache_behind(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the cache of the text is in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("[model]\nnum_layers = 2\n[data]\nfiles = ['text.txt']\n")
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        launch_ranks("job.toml", (), num_ranks=None, resume="elsewhere", fallback=False, say=print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "text.txt"]


def test_configuration_that_finds_no_room_leaves_the_one_that_is_there(
    tiny: Make, tmp_path: Path
) -> None:
    """A resumed run writes it again."""
    save_configuration(tmp_path, tiny())
    (tmp_path / "config.tmp").symlink_to("/dev/full")
    with pytest.raises(
        RunError, match=r"cannot write .*config\.json: .*No space left on device; make room there"
    ):
        save_configuration(tmp_path, tiny(train__steps=5))
    assert load_configuration(tmp_path).train.steps == tiny().train.steps


def test_upload_that_finds_no_room_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-1.json").symlink_to("/dev/full")
    with pytest.raises(
        RunError, match=r"cannot write .*trace/rank-1\.json: .*No space left on device"
    ):
        keep_upload(tmp_path, 1, "trace", b"spans")


@pytest.mark.parametrize("kind", ["../../evil", "/tmp/evil", "", "checkpoints"])
def test_upload_of_another_kind_writes_nothing(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RunError, match="rank 1 uploaded '.*'; the kinds are trace"):
        keep_upload(tmp_path, 1, kind, b"spans")
    assert list(tmp_path.iterdir()) == []


def test_log_without_room_is_silent(deep: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line was a traceback on the terminal."""
    folder = open_folder(deep, resume=False)
    (folder / "logs" / "rank-0.log").unlink()
    (folder / "logs" / "rank-0.log").symlink_to("/dev/full")
    with logging_to(folder, 0):
        logging.getLogger("dpipe").info("step 0")
    assert capsys.readouterr() == ("", "")


def test_run_keeps_what_auto_took(tiny: Make) -> None:
    auto = {
        "pipeline__wire": "auto",
        "pipeline__wire_allowed": ("none", "int8"),
        "data_parallel__kind": "local-sgd",
        "data_parallel__replicas": 2,
        "data_parallel__inner_steps": "auto",
    }
    began = tiny(**auto | {"pipeline__wire": "int8", "data_parallel__inner_steps": 30})
    save_configuration(open_folder(began, resume=False), began)
    goes_on = tiny(**auto)
    assert changes(goes_on) == {}
    again = chosen_before(goes_on)
    assert (again.pipeline.wire, again.data_parallel.inner_steps) == ("int8", 30)


def test_formats_are_chosen_again_for_other_stages(tiny: Make) -> None:
    began = tiny(pipeline__wire="int8", pipeline__stages=2, model__num_layers=4)
    save_configuration(open_folder(began, resume=False), began)
    goes_on = tiny(pipeline__wire="auto", pipeline__wire_allowed=("none",), model__num_layers=4)
    assert chosen_before(goes_on).pipeline.wire == "auto"


def test_json_log_is_an_object_a_line(tmp_path: Path) -> None:
    """Whatever is in a message: what collects logs splits them at lines."""
    (tmp_path / "logs").mkdir()
    with logging_to(tmp_path, 0, RunConfig(log_format="json")):
        logging.getLogger("dpipe").info('step %d\nof "%s"', 3, "7")
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("dpipe").info("failed", exc_info=True)
    lines = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    first, second = [json.loads(line) for line in lines]
    assert datetime.fromisoformat(first.pop("time")).utcoffset() == timedelta(0)
    assert first == {"level": "info", "rank": 0, "message": 'step 3\nof "7"'}
    assert "ValueError: x" in second["exception"]
