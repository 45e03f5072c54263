"""The folder of a run: opened by one process at a time, never written over.

FOLDER/run.json  config.json  metrics.jsonl  tensorboard/  logs/rank-N.log  trace/
       checkpoints/step-N/
"""

import fcntl
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpipe.config.load import Config, build
from dpipe.config.run import RunConfig
from dpipe.config.trust import refuse_untrusted
from dpipe.coordinator.limits import UPLOADS
from dpipe.errors import CheckpointError, ConfigError, InputError, RunError
from dpipe.store.checkpoint import latest, saved_configuration
from dpipe.store.identity import (
    RUN_FILE,
    RunIdentity,
    identity_of,
    keep_identity,
    of_another,
    owner_of,
    unmarked,
)
from dpipe.store.storage import parsed_json, regular_bytes

LOG = logging.getLogger("dpipe")
_TEXT = RunConfig()
# In a run's folder. Where checkpoints are is checked as they are written.
_WRITTEN = (
    "*.json",
    "*.jsonl",
    "*.tmp",
    "logs",
    "logs/*",
    "trace",
    "trace/*",
    "tensorboard",
    "tensorboard/*",
    "wandb",
    "mlflow.db",
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What "auto" takes for these changes the losses, so that a run keeps it.
_CHOSEN = ("pipeline.wire", "data_parallel.inner_steps")
# The keys that decide which model comes of it; the others decide where, how fast and how long.
_ANOTHER_RUN = re.compile(
    r"model\..*|data\.(?!cache$).*|train\.(seed|batch_size|learning_rate|min_learning_rate"
    r"|warmup_steps|warmup_ratio|decay|optimizer|weight_decay|betas|clip_norm)"
)


def refuse_folder(config: Config, resume: bool) -> RunIdentity | None:
    """The run that is to go on; None for one that is new, or that began before runs had an id.

    Raises `ConfigError` if the run's folder holds another run, `CheckpointError` if a run that is
    to be resumed has no checkpoint, or if the checkpoints are another run's.
    """
    folder = Path(config.run.folder)
    url = checkpoint_url(config)
    if resume and latest(url) is None:
        raise CheckpointError(f"there is no checkpoint in {url}; has the run written one yet?")
    if (folder / "metrics.jsonl").exists() and not resume:
        alternative = f"or continue it: --resume {folder}"
        if latest(url) is None:
            alternative = "or delete it: it saved nothing"
        raise ConfigError(f"{folder} already holds a run; choose another run.folder, {alternative}")
    return _run_to_go_on(config, resume)


def _run_to_go_on(config: Config, resume: bool) -> RunIdentity | None:
    """An empty folder, such as that of a machine which replaces a lost one, takes up the run whose
    checkpoints it is told to resume.
    """
    folder = Path(config.run.folder)
    url = checkpoint_url(config)
    identity = identity_of(folder)
    owner = owner_of(url)
    if owner is None:
        if latest(url) is not None and not (resume and _has_written(config)):
            raise unmarked(url)
        return identity
    holds_run = any((folder / name).exists() for name in (RUN_FILE, "config.json"))
    if resume and not holds_run:
        LOG.warning("%s holds no run yet: it takes up %s", folder, owner)
        return owner
    if identity is None or identity.id != owner.id:
        raise of_another(url, owner, identity)
    return identity


def _has_written(config: Config) -> bool:
    """Whether checkpoints without an id are of the run in the folder: they lie in it, or hold the
    name of the folder, the model, the data and the seed that its config.json has.
    """
    if config.run.checkpoint_url is None:
        return True
    folder = Path(config.run.folder)
    if not (folder / "config.json").exists():
        return False
    # compared, and none of its code run
    of_folder = load_configuration(folder, trust_code=True).shared()
    saved = saved_configuration(config.run.checkpoint_url)
    keys = []
    for key in saved.keys() & of_folder.keys():
        if key in ("run.folder", "train.seed") or key.startswith(("model.", "data.")):
            keys.append(key)
    # Without the folder's name the rest says little: two runs of one job file have it in common.
    return "run.folder" in keys and all(saved[key] == of_folder[key] for key in keys)


def refuse_changes(config: Config, change: Collection[str]) -> None:
    """Raises `ConfigError` if the run in the folder was of another configuration, in a key that
    makes another run of it and that is not in `change`.
    """
    unknown = set(change) - config.shared().keys()
    if unknown:
        raise ConfigError(f"--change {min(unknown)}: there is no such key, such as train.seed")
    refused = []
    for key, line in changes(config).items():
        if _ANOTHER_RUN.fullmatch(key) and key not in change:
            refused.append(line)
    if refused:
        folder = config.run.folder
        refused_keys = "; ".join(refused)
        raise ConfigError(
            f"{folder} is a run of another configuration: {refused_keys}; leave it as it was, or "
            "give --change KEY for each that is meant"
        )


def changes(config: Config) -> dict[str, str]:
    """By key, what differs from the configuration that the run's folder holds. Raises
    `ConfigError` if that cannot be read.
    """
    folder = Path(config.run.folder)
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        table = parsed_json(regular_bytes(path, folder), str(path))
        saved = {
            f"{name}.{key}": value
            for name, section in table.items()
            for key, value in section.items()
        }
    # AttributeError: a section that is no table.
    except (AttributeError, CheckpointError, OSError) as error:
        raise ConfigError(
            f"{path} is not what a run writes: {error}; delete it to resume without comparing"
        ) from None
    # A key that an earlier version did not have, or has called otherwise, cannot be compared.
    shared = config.shared()
    # The run has kept the commit that a branch, or nothing, meant when it began.
    if not _COMMIT.fullmatch(config.model.revision or ""):
        del shared["model.revision"]
    if config.train.epochs is not None:
        del shared["train.steps"]  # they follow from it
    for key in _CHOSEN:
        if shared[key] == "auto":
            del shared[key]
    return {
        key: f"{key} was {saved[key]!a:.200} and is {value!a:.200}"
        for key, value in shared.items()
        if key in saved and saved[key] != value
    }


def revision_of(config: Config) -> str | None:
    """The revision of model.hf to read: of a branch, or of none, the commit that the run in the
    folder has found before.
    """
    folder = Path(config.run.folder)
    own = config.model.revision
    if _COMMIT.fullmatch(own or "") or not (folder / "config.json").exists():
        return own
    # compared, and none of its code run
    saved = load_configuration(folder, trust_code=True).model
    return saved.revision if saved.hf == config.model.hf else own


def chosen_before(config: Config) -> Config:
    """`config` with what "auto" took as the run in the folder began. Formats of links are those of
    as many stages; where there are others now, they are left to be chosen again.
    """
    folder = Path(config.run.folder)
    if not (folder / "config.json").exists():
        return config
    # compared, and none of its code run
    saved = load_configuration(folder, trust_code=True)
    if config.pipeline.wire == "auto" and saved.pipeline.stages == config.pipeline.stages:
        config = config.with_(pipeline__wire=saved.pipeline.wire)
    if config.data_parallel.averages_when_cheap:
        config = config.with_(data_parallel__inner_steps=saved.data_parallel.inner_steps)
    return config


def with_chosen(config: Config, chosen: Config) -> Config:
    """`config` with what "auto" took in `chosen`, for the next `chosen_before`."""
    return config.with_(
        pipeline__wire=chosen.pipeline.wire,
        data_parallel__inner_steps=chosen.data_parallel.inner_steps,
    )


def open_folder(config: Config, resume: bool) -> Path:
    """Make the run's folder, or find it. Nothing is overwritten, and nothing is made if there is no
    run to resume.

    Raises as `refuse_folder` and `refuse_links` do, and `ConfigError` if the run is under way or
    the folder cannot be written.
    """
    folder = Path(config.run.folder)
    refuse_links(folder)
    identity = refuse_folder(config, resume)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "trace").mkdir(exist_ok=True)
        # For this moment alone: rank 0 holds it again for as long as it runs.
        with _run_held(folder):
            keep_identity(folder, identity)
            return folder
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be written: {error}") from None


def refuse_links(folder: Path) -> None:
    """Raises `ConfigError` if anything that a run writes in its folder is a link, or no file: the
    folder may be a copy of somebody else's, and a link leads anywhere.
    """
    for pattern in _WRITTEN:
        for path in folder.glob(pattern):
            # Of the link itself, which may lead to a regular file.
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(
                    f"{path} is a link, or not a regular file: a run would write through it to "
                    "another place; put a copy in its place"
                )


def _run_held(folder: Path) -> AbstractContextManager[None]:
    log = folder / "logs" / "rank-0.log"
    return held(log, f"another process has the run in {folder} open ({log} says how far it is)")


@contextmanager
def held(path: Path, refusal: str) -> Iterator[None]:
    """Lock `path`, which is made if necessary, against other processes of this machine and of those
    that share the file system.

    Raises `ConfigError` with `refusal` if another has the lock, which ends with its process,
    however that ends.
    """
    # The lock is the kernel's and ends with the process: there is no file to be left behind.
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{refusal}: stop it, or wait until it has ended") from None
        except OSError as error:
            LOG.warning(
                "%s cannot be locked (%s): nothing prevents a second process from using it",
                path,
                error,
            )
        yield


def absent(folder: Path) -> list[Path]:
    """Of the folder and its parents those that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def take_back(folder: Path, made: list[Path]) -> None:
    """Remove what `open_folder` and rank 0's log made for a run that did not begin; `made` is what
    `absent` gave before.
    """
    if folder not in made or (folder / "config.json").exists():
        return
    for path in (folder / "logs" / "rank-0.log", folder / RUN_FILE):
        path.unlink(missing_ok=True)
    for path in (folder / "logs", folder / "trace", *made):  # innermost first
        with suppress(OSError):  # something else is in it
            path.rmdir()


@contextmanager
def opened(config: Config, resume: bool, rank: int) -> Iterator[Path]:
    """The run's folder, which rank 0 opens. If it was made for ranks that then could not join, it
    is removed again.
    """
    folder = Path(config.run.folder)
    if rank != 0:
        yield folder
        return
    # Before it is made: only what this process has made is taken back.
    made = absent(folder)
    open_folder(config, resume)
    with _run_held(folder):
        try:
            yield folder
        except InputError:  # exit 2, which promises that nothing was written
            take_back(folder, made)
            raise


def checkpoint_url(config: Config, folder: Path | None = None) -> str:
    """Where a run's checkpoints are: at run.checkpoint_url, otherwise in its folder, which may have
    moved to `folder`.
    """
    if config.run.checkpoint_url:
        return config.run.checkpoint_url
    return str((folder or Path(config.run.folder)) / "checkpoints")


@contextmanager
def needing_room(path: Path) -> Iterator[None]:
    """Raises `RunError` naming the file if writing it inside fails."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}; make room there") from None


def save_configuration(folder: Path, config: Config) -> None:
    """What all ranks agreed on, for commands that use the run later. Without [node]: no addresses,
    no token.
    """
    path = folder / "config.json"
    for line in changes(config).values():
        LOG.warning("resumed with another configuration: %s", line)
    # A run that is resumed writes the file again, and must not lose it meanwhile.
    temporary = path.with_suffix(".tmp")
    with needing_room(path):
        table = config.model_dump(mode="json", exclude={"node"})
        temporary.write_text(json.dumps(table, indent=1))
        os.replace(temporary, path)


def load_configuration(folder: Path, *, trust_code: bool = False) -> Config:
    """Raises `ConfigError` if `folder` is not the folder of a run, or of one that names code which
    is not trusted (`config/trust.py`).
    """
    try:
        path = folder / "config.json"
        table = parsed_json(regular_bytes(path, folder), str(path))
    except (OSError, ValueError, CheckpointError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}") from None
    try:
        config = build(table)
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{folder}/config.json is not what a run writes: {error}") from None
    refuse_untrusted(config.model.layers, trust_code=trust_code)
    return config


def keep_upload(folder: Path, rank: int, kind: str, payload: bytes) -> None:
    """Write what a rank uploaded to rank 0, such as its trace, to FOLDER/KIND/rank-N.json.

    Raises `RunError` for a kind that `UPLOADS` has not: it would be a path that the rank chose.
    """
    if kind not in UPLOADS:
        raise RunError(f"rank {rank} uploaded {kind!r}; the kinds are {', '.join(UPLOADS)}")
    path = folder / kind / f"rank-{rank}.json"
    with needing_room(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)


@contextmanager
def logging_to(folder: Path, rank: int, run: RunConfig = _TEXT) -> Iterator[None]:
    """Rank 0 logs into the folder, because its terminal shows the run live; the others log to
    standard error. `run` says in which format.
    """
    log = logging.getLogger("dpipe")
    errors = logging.StreamHandler()
    errors.setLevel(logging.WARNING if rank == 0 else logging.INFO)
    handlers: list[logging.Handler] = [errors]
    if rank == 0:
        handlers.append(_LogFile(folder / "logs" / "rank-0.log"))
    for handler in handlers:
        handler.setFormatter(_formatter(rank, run.log_format))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            with suppress(OSError):  # what could not be written before
                handler.close()


def _formatter(rank: int, log_format: str) -> logging.Formatter:
    if log_format == "json":
        return _JsonLines(rank)
    return logging.Formatter(f"%(asctime)s rank {rank} %(message)s")


class _JsonLines(logging.Formatter):
    """An object a line, whatever is in the message: what collects logs splits them at lines."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        row: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "rank": self._rank,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


class _LogFile(logging.FileHandler):
    """On a full disk it drops lines: a run fails where it writes what it must keep, and says so
    once.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
