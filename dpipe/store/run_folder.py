"""The folder of a run: opened by one process at a time, never written over.

FOLDER/config.json  metrics.jsonl  tensorboard/  logs/rank-N.log  trace/  checkpoints/step-N/
"""

import fcntl
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from dpipe.config.load import Config, build
from dpipe.errors import CheckpointError, ConfigError, InputError, RunError
from dpipe.store.checkpoint import latest

LOG = logging.getLogger("dpipe")


def refuse_folder(config: Config, resume: bool) -> None:
    """Raises `ConfigError` where the run's folder holds another run, `CheckpointError` where a run
    that is to be resumed has no checkpoint.
    """
    folder = Path(config.run.folder)
    url = checkpoint_url(config)
    if resume and latest(url) is None:
        raise CheckpointError(f"there is no checkpoint in {url}; has the run written one yet?")
    if (folder / "metrics.jsonl").exists() and not resume:
        way_on = (
            f"or continue it: --resume {folder}"
            if latest(url) is not None
            else "or delete it: it saved nothing"
        )
        raise ConfigError(f"{folder} already holds a run; choose another run.folder, {way_on}")


def open_folder(config: Config, resume: bool) -> Path:
    """The run's folder. Nothing is overwritten, nor made for a run that is not there.

    Raises as `refuse_folder` does, and `ConfigError` where the run is under way or the folder
    cannot be written.
    """
    refuse_folder(config, resume)
    folder = Path(config.run.folder)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "trace").mkdir(exist_ok=True)
        with _run_held(folder):
            return folder
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be written: {error}") from None


def _run_held(folder: Path) -> AbstractContextManager[None]:
    log = folder / "logs" / "rank-0.log"
    return held(log, f"another process has the run in {folder} open ({log} says how far it is)")


@contextmanager
def held(path: Path, refusal: str) -> Iterator[None]:
    """`path`, made if need be, is for no other process of this machine, nor of one that shares the
    file system.

    Raises `ConfigError` with `refusal` where one has it. It ends with the process, however that
    ends.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{refusal}: stop it, or wait until it has ended") from None
        except OSError as error:
            LOG.warning(
                "%s cannot be locked (%s): nothing keeps a second process from it", path, error
            )
        yield


def absent(folder: Path) -> list[Path]:
    """The folder and those around it that are not there, from within."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def take_back(folder: Path, made: list[Path]) -> None:
    """Remove what `open_folder` and rank 0's log made for a run that did not begin, in a folder
    that was not there.
    """
    if folder in made and not (folder / "config.json").exists():
        (folder / "logs" / "rank-0.log").unlink(missing_ok=True)
        for path in (folder / "logs", folder / "trace", *made):
            with suppress(OSError):  # something else is in it
                path.rmdir()


@contextmanager
def opened(config: Config, resume: bool, rank: int) -> Iterator[Path]:
    """The run's folder, which rank 0 opens; one that was made for ranks which then could not meet
    is removed again.
    """
    folder = Path(config.run.folder)
    made = absent(folder) if rank == 0 else []
    if rank == 0:
        open_folder(config, resume)
    with _run_held(folder) if rank == 0 else nullcontext():
        try:
            yield folder
        except InputError:
            take_back(folder, made)
            raise


def checkpoint_url(config: Config, folder: Path | None = None) -> str:
    """Where a run's checkpoints are: where it was told, else in its folder (which may have moved to
    `folder`).
    """
    return config.run.checkpoint_url or str((folder or Path(config.run.folder)) / "checkpoints")


@contextmanager
def needing_room(path: Path) -> Iterator[None]:
    """Raises `RunError` naming the file, which is written within, where that fails."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}; make room there") from None


def save_configuration(folder: Path, config: Config) -> None:
    """What all ranks agreed on, for the commands that come back to the run; no addresses, no
    token.
    """
    path = folder / "config.json"
    whole = path.with_suffix(".tmp")  # a run that goes on writes it again, and must not lose it
    with needing_room(path):
        whole.write_text(json.dumps(config.model_dump(mode="json", exclude={"node"}), indent=1))
        os.replace(whole, path)


def load_configuration(folder: Path) -> Config:
    """Raises `ConfigError` where `folder` is no run's."""
    try:
        table = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no folder of a run: {error}") from None
    try:
        return build(table)
    except ConfigError as error:
        raise ConfigError(f"{folder}/config.json is not what a run writes: {error}") from None


def keep_upload(folder: Path, rank: int, kind: str, payload: bytes) -> None:
    """What a rank gives to the run, kept on rank 0's machine."""
    path = folder / kind / f"rank-{rank}.json"
    with needing_room(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)


@contextmanager
def logging_to(folder: Path, rank: int) -> Iterator[None]:
    """Rank 0 logs into the folder, because its terminal shows the run live; the others to their
    standard error.
    """
    log = logging.getLogger("dpipe")
    errors = logging.StreamHandler()
    errors.setLevel(logging.WARNING if rank == 0 else logging.INFO)
    handlers: list[logging.Handler] = [errors]
    if rank == 0:
        handlers.append(_LogFile(folder / "logs" / "rank-0.log"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            with suppress(OSError):  # of what could not be written before
                handler.close()


class _LogFile(logging.FileHandler):
    """Without room it goes without lines: a run ends of what it must keep, and says so once."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
