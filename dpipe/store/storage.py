"""The folder or URL in which checkpoints are: its steps, its files, and how one is written whole.

    URL/step-00000100/index.json    exists only when every file of the step does
    URL/step-00000100/...

A local file is written under a temporary name, synced, and renamed. An object store shows a file
only when it is complete.

Who reads a checkpoint may have it from somebody else: only regular files are read, and only inside
its folder, wherever links lead.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError

from dpipe.disk import sync
from dpipe.errors import CheckpointError, RunError

INDEX = "index.json"
MAX_JSON_BYTES = 1 << 28  # an index has some 200 bytes for each tensor
_STEP = re.compile(r"step-(\d{8,})")


class Storage:
    """The folder of a run's checkpoints, on any file system that fsspec knows."""

    def __init__(self, url: str, remedy: str = "") -> None:
        self._remedy = remedy
        try:
            self._fs, self.root = fsspec.url_to_fs(url)
        # A file system that is not installed, or a scheme that none has.
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"run.checkpoint_url {url} cannot be used: {error}") from None
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def path(self, step: int, name: str = "") -> str:
        return f"{self.root}/step-{step:08d}/{name}".rstrip("/")

    def steps(self) -> list[int]:
        """Steps whose checkpoint is committed, in order."""
        return [step for step in self.folders() if self._fs.exists(self.path(step, INDEX))]

    def folders(self) -> list[int]:
        """Steps of which anything is there, in order."""
        matches = [_STEP.fullmatch(name) for name in self.names()]
        return sorted(int(match[1]) for match in matches if match)

    def write(
        self, step: int, name: str, rank: int, fill: Callable[[Path], object]
    ) -> tuple[str, dict[str, Any]]:
        """Fill a temporary file, sync it, and rename it to `name`, where `{}` becomes the digest.

        Returns the name, and the file's size and digest. Raises `RunError` if that fails.
        """
        try:
            self._fs.makedirs(self.path(step), exist_ok=True)
            if self.is_local:
                # A link in the place of the step's folder would have this write where it leads.
                _refuse_way_out(Path(self.path(step)), Path(self.root))
            with self._scratch(step) as folder:
                temporary = folder / f".{rank}.tmp"
                temporary.unlink(missing_ok=True)  # of a rank that was killed while it wrote
                temporary.touch()
                # As the user's umask says; safetensors makes its own files private.
                mode = temporary.stat().st_mode
                fill(temporary)
                temporary.chmod(mode)
                digest = digest_of(temporary)
                facts = {"size": temporary.stat().st_size, "sha256": digest}
                name = name.format(digest[:16])
                self._place(temporary, self.path(step, name))
        except (OSError, SafetensorError) as error:  # safetensors raises its own on a full disk
            path = self.path(step, name.replace("{}", "*"))
            raise RunError(f"cannot write {path}: {error}; {self._remedy}") from error
        return name, facts

    @contextmanager
    def fetched(self, path: str, num_bytes: int) -> Iterator[str]:
        """`path` as a local file. Raises `CheckpointError` if it does not have `num_bytes`, or is
        not a regular file in the folder that its name says.
        """
        size = self._checked_size(path)
        # Before it is fetched and hashed, which takes as long as it is large.
        if size != num_bytes:
            raise CheckpointError(f"{path} is truncated: {size} of {num_bytes} bytes")
        if self.is_local:
            yield path
            return
        with tempfile.TemporaryDirectory() as folder:
            self._fs.get_file(path, f"{folder}/file")
            yield f"{folder}/file"

    def read(self, path: str) -> bytes:
        """A small file. Raises as `fetched` does, and for one of more than `MAX_JSON_BYTES`."""
        if self.is_local:
            return regular_bytes(Path(path), Path(self.root))
        _refuse_large(path, self._checked_size(path))
        return bytes(self._fs.cat_file(path))

    def _checked_size(self, path: str) -> int:
        """Raises `FileNotFoundError` if there is no `path`."""
        if self.is_local:
            return regular_size(Path(path), Path(self.root))
        info = self._fs.info(path)
        if info["type"] != "file":
            raise CheckpointError(f"{path} is a {info['type']}, not a regular file")
        return int(info["size"])

    @property
    def protocols(self) -> tuple[str, ...]:
        """By which names fsspec knows this kind of file system."""
        known = self._fs.protocol
        return (known,) if isinstance(known, str) else tuple(known)

    def names(self) -> list[str]:
        """Of what lies there, steps and other files."""
        # fsspec remembers listings, and other processes write here too.
        self._fs.invalidate_cache()
        if not self._fs.isdir(self.root):
            return []
        paths = self._fs.ls(self.root, detail=False)
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def read_newest(self, name: str) -> bytes:
        """What lies beside the steps, and others write again and again. Raises as `read` does."""
        self._fs.invalidate_cache()
        return self.read(f"{self.root}/{name}")

    def create(self, name: str, content: bytes) -> None:
        """Write `name` beside the steps, unless it exists. Raises `RunError` if that fails."""
        path = f"{self.root}/{name}"
        try:
            self._fs.makedirs(self.root, exist_ok=True)
            if self.is_local:
                self._create_local(Path(path), content)
            else:
                self._fs.pipe_file(path, content, mode="create")
        except OSError as error:
            # Somebody may have been first: who reads it back sees who. Of a condition that was not
            # met s3fs says no more than that an argument is invalid.
            self._fs.invalidate_cache()
            if isinstance(error, FileExistsError) or self._fs.exists(path):
                return
            raise RunError(f"cannot write {path}: {error}; set run.checkpoint_url") from error

    def replace(self, name: str, content: bytes) -> None:
        """Write `name` beside the steps, over one that exists. Raises `RunError` if that fails."""
        path = f"{self.root}/{name}"
        try:
            if self.is_local:
                temporary = Path(self.root) / f".{secrets.token_hex(8)}.tmp"
                temporary.write_bytes(content)
                os.replace(temporary, path)
            else:
                self._fs.pipe_file(path, content)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error}; {self._remedy}") from error

    def remove_file(self, name: str) -> None:
        """Other ranks may do the same at the same time."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self.root}/{name}")

    def remove(self, step: int) -> None:
        """Remove the index first, so that what is left is no checkpoint. Other ranks may do the
        same at the same time.
        """
        if self.is_local and os.path.islink(self.path(step)):
            raise RunError(
                f"{self.path(step)} is a link: what it leads to is not removed; delete the link"
            )
        for path in (self.path(step, INDEX), self.path(step)):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise RunError(f"cannot remove {path}: {error}; delete it") from error

    @contextmanager
    def _scratch(self, step: int) -> Iterator[Path]:
        if self.is_local:
            yield Path(self.path(step))
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)

    def _place(self, temporary: Path, path: str) -> None:
        """An object store shows a file only when it is complete; a local file is synced, then
        renamed.
        """
        if not self.is_local:
            self._fs.put_file(str(temporary), path)
            return
        # The content before its name, then the folder that has the name, then the one that has the
        # step's: a power failure leaves whole files, or none.
        sync(temporary)
        os.replace(temporary, path)
        sync(temporary.parent)
        sync(temporary.parent.parent)

    def _create_local(self, path: Path, content: bytes) -> None:
        """All of it or nothing, also for who reads it meanwhile. The first one wins."""
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content)
            sync(temporary)
            _link_or_copy(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def regular_size(path: Path, root: Path) -> int:
    """The bytes of a file below `root`. Raises `CheckpointError` if it is not a regular file, or if
    links lead out of its folder or of `root`.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:  # such as a link to itself
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if path.parent != root:
        _refuse_way_out(path.parent, root)
    _refuse_way_out(path, path.parent)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file: nothing is read from it")
    return status.st_size


def regular_bytes(path: Path, root: Path, most: int | None = None) -> bytes:
    """The content of a small file below `root`. Raises as `regular_size` does, and for one of more
    than `most` bytes, by default `MAX_JSON_BYTES`.
    """
    _refuse_large(path, regular_size(path, root), most)
    return path.read_bytes()


def _refuse_large(path: str | Path, size: int, most: int | None = None) -> None:
    if size > (most or MAX_JSON_BYTES):
        raise CheckpointError(f"{path} has {size} bytes: a run writes no such file")


def _refuse_way_out(path: Path, folder: Path) -> None:
    real = path.resolve()
    if not real.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{path} leads out of {folder}, to {real}: a checkpoint has all of its files inside; "
            "put a copy in its place"
        )


def _link_or_copy(temporary: Path, path: Path) -> None:
    """Raises `FileExistsError` if there is a `path`. Some file systems have no hard links."""
    try:
        # A link fails where the name is taken; a rename would take it over.
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        with path.open("xb") as file:
            file.write(temporary.read_bytes())


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parsed_json(content: bytes, path: str) -> Any:
    """Raises `CheckpointError` naming `path` if it is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
