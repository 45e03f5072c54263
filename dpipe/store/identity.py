"""Which run a checkpoint is of: a random id, made with the run's folder.

FOLDER/run.json                 the run in this folder
URL/run.json                    the run whose checkpoints are here: any other is refused
URL/start                       which start of it writes here: the last one
URL/step-00000100/index.json    "run": the one that wrote this step

Checkpoints from before runs had an id carry none. They are those of the folder that they are in;
at a `run.checkpoint_url` elsewhere, of the run whose configuration they hold (`run_folder.py`).
"""

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.errors import CheckpointError, RunError, TransferError
from dpipe.store.storage import INDEX, Storage, parsed_json, regular_bytes
from dpipe.wire.schema import Schema, Shape, Text

RUN_FILE = "run.json"
START_FILE = "start"
_START_BYTES = 8
_MAX_TEXT = 1000  # of the folder's name, as ranks may share it
_ID = re.compile(r"[0-9a-f]{16}")


class _SharedRun(Shape):
    id: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    folder: Text
    host: Text
    start: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


RUN = Schema[_SharedRun | None](_SharedRun | None)  # None from all but rank 0


@dataclass(frozen=True)
class RunIdentity:
    """A run, however its folder is called: the id decides, the rest is for people."""

    id: str
    folder: str  # where it was made
    host: str
    # Of processes that have this run open, each time anew: two copies of a folder have one id.
    start: str = ""

    def __str__(self) -> str:
        # From a file that somebody else may have written: no control characters.
        where = repr(f"{self.host}:{self.folder}")[1:-1]
        return f"run {self.id} ({where})"

    def as_table(self) -> dict[str, str]:
        return {"id": self.id, "folder": self.folder, "host": self.host}


def from_table(table: Any, path: str) -> RunIdentity:
    """Raises `CheckpointError` naming `path` if `table` is not what `as_table` gives."""
    if isinstance(table, dict) and table.keys() == {"id", "folder", "host"}:
        is_text = all(isinstance(value, str) for value in table.values())
        if is_text and _ID.fullmatch(table["id"]):
            return RunIdentity(**table)
    raise CheckpointError(f"{path} is damaged: it does not say which run it is of")


def identity_of(folder: Path) -> RunIdentity | None:
    """The run in `folder`; None if it was begun before runs had an id, or never."""
    path = folder / RUN_FILE
    try:
        content = regular_bytes(path, folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return from_table(parsed_json(content, str(path)), str(path))


def keep_identity(folder: Path, identity: RunIdentity | None) -> None:
    """Write `identity`, or that of a new run, into `folder`, unless it has one."""
    if identity_of(folder) is not None:
        return
    if identity is None:
        identity = RunIdentity(
            secrets.token_hex(8), str(folder.absolute())[:_MAX_TEXT], socket.gethostname()
        )
    # Renamed into place: with a file that was cut short the folder could not be resumed.
    temporary = folder / f"{RUN_FILE}.tmp"
    temporary.write_text(json.dumps(identity.as_table(), indent=1), encoding="utf-8")
    os.replace(temporary, folder / RUN_FILE)


def owner_of(url: str) -> RunIdentity | None:
    """The run whose checkpoints are at `url`; None if there is none, or nothing says whose."""
    storage = Storage(url)
    path = f"{storage.root}/{RUN_FILE}"
    try:
        return from_table(parsed_json(storage.read(path), path), path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    # Without the mark, as in a copy of some steps alone.
    for step in reversed(storage.steps()):
        owner = writer_of(storage, step)
        if owner is not None:
            return owner
    return None


def writer_of(storage: Storage, step: int) -> RunIdentity | None:
    """The run that wrote `step`; None if its index does not say, or is damaged."""
    path = storage.path(step, INDEX)
    try:
        index = parsed_json(storage.read(path), path)
        return from_table(index.get("run"), path)
    except (AttributeError, CheckpointError, FileNotFoundError):
        return None


def claim(url: str, identity: RunIdentity, *, takes_unmarked: bool) -> None:
    """Mark `url` as the place of this run's checkpoints. Every rank calls it before it trains.

    Raises `CheckpointError` if they are another run's, also one that begins at the same moment; or
    if nothing says whose they are, unless this run `takes_unmarked`.
    """
    storage = Storage(url)
    owner = owner_of(url)
    if owner is None:
        if storage.steps() and not takes_unmarked:
            raise unmarked(url)
        storage.create(RUN_FILE, json.dumps(identity.as_table(), indent=1).encode())
        # Read back, whoever was first. On an object store that cannot refuse to write over a file,
        # the last one has it.
        owner = owner_of(url)
    if owner is None or owner.id != identity.id:
        raise of_another(url, owner, identity)
    # The last start wins: a run that was killed must be able to go on.
    if identity.start:
        storage.replace(START_FILE, identity.start.encode())


def refuse_superseded(storage: Storage, identity: RunIdentity) -> None:
    """Raises `RunError` if another process has begun to write the run's checkpoints: it goes on
    from a copy of its folder, or was told to resume while this one still ran.
    """
    path = f"{storage.root}/{START_FILE}"
    try:
        newest = storage.read(path).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return
    if identity.start and newest != identity.start:
        raise RunError(
            f"another process has continued {identity} and writes its checkpoints to "
            f"{storage.root}: this one has written none since; stop one of them, or give it a "
            "run.folder and a run.checkpoint_url of its own"
        )


def release(url: str, identity: RunIdentity) -> None:
    """Undo the claim of a run that has ended without a checkpoint."""
    storage = Storage(url)
    owner = owner_of(url)
    # Not if there is a checkpoint, also an unfinished one: then somebody may still want it.
    if owner is not None and owner.id == identity.id and not storage.folders():
        storage.remove_file(RUN_FILE)
        storage.remove_file(START_FILE)


@contextmanager
def claimed(url: str, identity: RunIdentity, *, takes_unmarked: bool) -> Iterator[None]:
    """`claim`, and `release` at the end."""
    claim(url, identity, takes_unmarked=takes_unmarked)
    try:
        yield
    finally:
        release(url, identity)


def agreed_identity(key: str, config: Config, coordinator: Coordination) -> RunIdentity:
    """The run, as the folder of rank 0 says. All ranks call it, each time with another `key`."""
    # Rank 0 alone knows; the others share nothing, because a gather needs every rank's part.
    identity = None
    if coordinator.rank == 0:
        identity = identity_of(Path(config.run.folder))
        assert identity is not None, "rank 0 has opened the folder"
    table = None
    if identity is not None:
        table = {**identity.as_table(), "start": secrets.token_hex(_START_BYTES)}
    by_rank = coordinator.share(key, table, config.timeouts.transfer, RUN)
    if by_rank[0] is None:
        raise TransferError("rank 0 does not say which run this is")
    return RunIdentity(**by_rank[0].model_dump())


def check_writer(url: str, writer: RunIdentity | None, identity: RunIdentity) -> None:
    """Raises `CheckpointError` if the `writer` of a checkpoint at `url` is another run.

    Rank 0 has decided before it joined whether checkpoints without an id are this run's.
    """
    if writer is not None and writer.id != identity.id:
        raise of_another(url, writer, identity)


def of_another(
    url: str, owner: RunIdentity | None, identity: RunIdentity | None
) -> CheckpointError:
    this = "this is a new run" if identity is None else f"this is {identity}"
    return CheckpointError(
        f"the checkpoints in {url} are of {owner or 'another run'}, and {this}; set another "
        f"run.checkpoint_url, or, if that run is no longer needed, delete {url}"
    )


def unmarked(url: str) -> CheckpointError:
    return CheckpointError(
        f"{url} holds checkpoints that do not say of which run they are; set another "
        "run.checkpoint_url, or continue the run that wrote them: --resume FOLDER"
    )
