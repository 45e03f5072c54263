"""Checkpoints: safetensors by layer-global names, so that a run may go on in any cut. Local folders
and fsspec URLs.

    URL/step-00000100/
        model-00000-1f0c..9a.safetensors       one of each a rank; the digest of the content is in the name,
        optimizer-00000-77e1..04.safetensors   so that writing never harms a checkpoint that is there
        index.json                             step, state, name -> file, file -> size and digest

    rank 0   write, sync, rename files ──┐ gather: what each wrote ┌── write, sync, rename index.json, remove old steps
    rank 1   write, sync, rename files ──┘                         └── the same

The index is the commit mark: it is there only when every file is. Each rank writes it, because on
several machines each may have a folder of its own; on one machine all write the same. Nothing is
unpickled.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dpipe.errors import CheckpointError, NumericError, RunError
from dpipe.stage.tensor_parallel import Shard

LOG = logging.getLogger("dpipe")

_INDEX = "index.json"
_STEP = re.compile(r"step-(\d{8,})")
_SLICE = re.compile(
    r"(.+)\[(\d+):(\d+)\]"
)  # elements of a flattened tensor of which several ranks hold parts
_KINDS = ("model", "optimizer")
_TABLES = ("state", "weight_map", "optimizer_map", "files")  # that every index has

_Names = Callable[[str], bool] | frozenset[str]


class Tensors(dict[str, torch.Tensor]):
    """What was loaded, by name; a name that is not there raises `CheckpointError`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __missing__(self, name: str) -> torch.Tensor:
        raise CheckpointError(
            f"{self._where} holds no {name}: it is of a model with other layers; check [model]"
        )


@dataclass(frozen=True)
class Loaded:
    """`skipped` says what was wrong with each newer checkpoint that `fallback` passed over."""

    step: int
    state: dict[str, Any]
    tensors: Tensors
    optimizer: Tensors
    skipped: tuple[str, ...] = ()


def save(
    url: str,
    step: int,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    share: Callable[[Any], Sequence[Any]],
    keep: int,
    layouts: Mapping[str, Shard] = MappingProxyType({}),
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
    remedy: str = "make room, or set run.checkpoint_url",
) -> None:
    """Write this rank's part of the checkpoint of `step`; every rank calls it with its own part and
    the same `state`.

    `layouts` are those of the tensors of the optimizer that are rows of several ranks' parts
    (`shards.py`).

    `share` exchanges JSON with all ranks and is the barrier behind which all files are there. The
    newest `keep` stay; newer steps than `step` are of a course that was given up, and go. Whatever
    fails, earlier checkpoints stay whole. `buffers` are saved with `tensors`. Raises `RunError`,
    which ends in the `remedy`, where it cannot be written, and `NumericError` where one of
    `tensors` is not finite: nobody can go on from such a one.
    """
    store = _Store(url, remedy)
    part = dict[str, Any]()
    part["bad"] = next(
        (name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None
    )
    if part["bad"] is None:
        for kind, content in zip(_KINDS, ({**tensors, **buffers}, optimizer), strict=True):
            part[kind] = _write_part(store, step, rank, kind, content)
    part["layouts"] = {name: asdict(shard) for name, shard in layouts.items()}
    parts = share(part)
    _refuse(parts, step)
    index = {
        "step": step,
        "state": dict(state),
        "weight_map": _merged(parts, "model", "names"),
        "optimizer_map": _merged(parts, "optimizer", "names"),
        "files": _merged(parts, "model", "files") | _merged(parts, "optimizer", "files"),
        "layouts": {name: layout for part in parts for name, layout in part["layouts"].items()},
    }
    text = json.dumps(index, indent=1)
    store.write(step, _INDEX, rank, lambda path: path.write_text(text))
    _prune(store, step, keep)


def load(
    url: str,
    names: Iterable[str] | Callable[[str], bool],
    step: int | None = None,
    fallback: bool = False,
) -> Loaded:
    """The tensors asked for, by name or by a test of the name, from the newest checkpoint or that
    of `step`.

    Only files that hold some of them are read, and each is checked against its digest. Raises
    `CheckpointError` naming what is missing or damaged; with `fallback` the one before is tried
    then.
    """
    store = _Store(url)
    steps = store.steps() if step is None else [step]
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {url}; has the run written one yet?")
    wanted = names if callable(names) else frozenset(names)
    skipped: list[str] = []
    for candidate in reversed(steps):
        try:
            return _load_step(store, candidate, wanted, tuple(skipped))
        except CheckpointError as error:
            if not fallback:
                hint = f"; --fallback uses the one of step {steps[-2]}" if len(steps) > 1 else ""
                raise CheckpointError(f"{error}{hint}") from None
            LOG.warning("skipping the checkpoint of step %d: %s", candidate, error)
            skipped.append(str(error))
    raise CheckpointError(f"no checkpoint in {url} is whole: " + "; ".join(skipped))


def check_url(url: str) -> None:
    """Raises `CheckpointError` where no checkpoint could be written to `url`, as far as can be told
    without writing.
    """
    store = _Store(url)
    if store.is_local:
        there = next(
            path for path in (Path(store.root), *Path(store.root).parents) if path.exists()
        )
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise CheckpointError(
                f"run.checkpoint_url {url} cannot be used: {there} is no folder that can be written"
            )


def latest(url: str) -> int | None:
    """The step of the newest checkpoint; None where there is none."""
    return max(_Store(url).steps(), default=None)


class _Store:
    """The folder of a run's checkpoints, on any file system that fsspec knows."""

    def __init__(self, url: str, remedy: str = "") -> None:
        self._remedy = remedy
        try:
            self._fs, self.root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"run.checkpoint_url {url} cannot be used: {error}") from None
        self.is_local = isinstance(self._fs, LocalFileSystem)

    def path(self, step: int, name: str = "") -> str:
        return f"{self.root}/step-{step:08d}/{name}".rstrip("/")

    def steps(self) -> list[int]:
        """Steps whose checkpoint was committed, in order."""
        return [step for step in self.folders() if self._fs.exists(self.path(step, _INDEX))]

    def folders(self) -> list[int]:
        """Steps for which something was written."""
        self._fs.invalidate_cache()
        paths = self._fs.ls(self.root, detail=False) if self._fs.isdir(self.root) else []
        found = (_STEP.fullmatch(path.rstrip("/").rpartition("/")[2]) for path in paths)
        return sorted(int(match[1]) for match in found if match)

    def write(
        self, step: int, name: str, rank: int, fill: Callable[[Path], object]
    ) -> tuple[str, dict[str, Any]]:
        """Fill a temporary file, sync it and give it its name, of which `{}` becomes the digest.

        Returns the name, and size and digest.
        """
        try:
            self._fs.makedirs(self.path(step), exist_ok=True)
            with self._scratch(step) as folder:
                temporary = folder / f".{rank}.tmp"
                temporary.unlink(missing_ok=True)
                temporary.touch()
                mode = (
                    temporary.stat().st_mode
                )  # as the user wants files to be; safetensors makes its own private
                fill(temporary)
                temporary.chmod(mode)
                digest = _digest(temporary)
                facts = {"size": temporary.stat().st_size, "sha256": digest}
                name = name.format(digest[:16])
                self._place(temporary, self.path(step, name))
        except (
            OSError,
            SafetensorError,
        ) as error:  # the second is what safetensors makes of a full disk
            path = self.path(step, name.replace("{}", "*"))
            raise RunError(f"cannot write {path}: {error}; {self._remedy}") from error
        return name, facts

    @contextmanager
    def fetched(self, path: str) -> Iterator[str]:
        """`path` as a local file."""
        if self.is_local:
            yield path
            return
        with tempfile.TemporaryDirectory() as folder:
            self._fs.get_file(path, f"{folder}/file")
            yield f"{folder}/file"

    def read(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(path))

    def remove(self, step: int) -> None:
        """The index first, so that what is half gone is no checkpoint. Other ranks may be at it as
        well.
        """
        for path in (self.path(step, _INDEX), self.path(step)):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                continue

    @contextmanager
    def _scratch(self, step: int) -> Iterator[Path]:
        if self.is_local:
            yield Path(self.path(step))
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)

    def _place(self, temporary: Path, path: str) -> None:
        """An object store makes a file visible when it is whole; a local one by renaming what has
        been synced.
        """
        if not self.is_local:
            self._fs.put_file(str(temporary), path)
            return
        _sync(temporary)
        os.replace(temporary, path)
        _sync(temporary.parent)
        _sync(temporary.parent.parent)


def _write_part(
    store: _Store, step: int, rank: int, kind: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    if not tensors:
        return {"names": {}, "files": {}}
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    template = f"{kind}-{rank:05d}-{{}}.safetensors"
    file, facts = store.write(
        step, template, rank, lambda path: save_file(content, path, {"format": "pt"})
    )
    return {"names": dict.fromkeys(tensors, file), "files": {file: facts}}


def _refuse(parts: Sequence[dict[str, Any]], step: int) -> None:
    for rank, part in enumerate(parts):
        if part["bad"] is not None:
            raise NumericError(
                f"{part['bad']} on rank {rank} is not finite before step {step}, which was not "
                "saved; lower "
                "train.learning_rate, clip with train.clip_norm, or resume from the last checkpoint"
            )


def _merged(parts: Sequence[dict[str, Any]], kind: str, key: str) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part[kind][key].items()}


def _prune(store: _Store, step: int, keep: int) -> None:
    """A faster rank may be writing a later step already, which has no index yet: that one is left
    alone.
    """
    committed = store.steps()
    kept = [s for s in committed if s <= step][-keep:]
    unfinished = {s for s in store.folders() if s < step} - set(committed)
    for old in (set(committed) | unfinished) - set(kept):
        store.remove(old)


def _load_step(store: _Store, step: int, names: _Names, skipped: tuple[str, ...]) -> Loaded:
    index = _read_index(store, step)
    wanted = names if callable(names) else names.__contains__
    model, optimizer = (
        _read_tensors(store, step, index, {n: f for n, f in index[key].items() if wanted(n)})
        for key in ("weight_map", "optimizer_map")
    )
    for name in () if callable(names) else names:
        model[name]  # raises where it is missing
    joined = _with_slices_joined(optimizer, store.path(step))
    for name, layout in index.get("layouts", {}).items():
        if name in joined:
            shard = Shard(**layout)
            joined[name] = shard.join(joined[name].chunk(shard.size))
    return Loaded(step, index["state"], model, joined, skipped)


def _with_slices_joined(tensors: Tensors, where: str) -> Tensors:
    """`NAME[0:8]` and `NAME[8:12]` become a flat NAME of 12; raises `CheckpointError` where one is
    missing between.
    """
    into = Tensors(f"the checkpoint {where}")
    parts = dict[str, dict[int, torch.Tensor]]()
    for name, tensor in tensors.items():
        if (match := _SLICE.fullmatch(name)) is None:
            into[name] = tensor
        else:
            parts.setdefault(match[1], {})[int(match[2])] = tensor.reshape(-1)
    for name, pieces in parts.items():
        into[name] = torch.cat([pieces[start] for start in sorted(pieces)])
        ends = [0, *accumulate(pieces[start].numel() for start in sorted(pieces))]
        if ends[:-1] != sorted(pieces):
            raise CheckpointError(
                f"the checkpoint {where} holds {name} in parts from {sorted(pieces)}, not all of it"
            )
    return into


def _read_index(store: _Store, step: int) -> dict[str, Any]:
    path = store.path(step, _INDEX)
    try:
        index = json.loads(store.read(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was never finished") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not _is_index(index):
        raise CheckpointError(f"{path} is damaged: it is JSON, but not the index of a checkpoint")
    return dict(index)


def _is_index(found: object) -> bool:
    """Whether it has what `save` writes, as far as loading relies on it."""
    if not (isinstance(found, dict) and all(isinstance(found.get(key), dict) for key in _TABLES)):
        return False
    files = found["files"]
    named = [*found["weight_map"].values(), *found["optimizer_map"].values()]
    return all(isinstance(file, str) and file in files for file in named) and all(
        isinstance(facts, dict) and {"size", "sha256"} <= facts.keys() for facts in files.values()
    )


def _read_tensors(
    store: _Store, step: int, index: Mapping[str, Any], names: Mapping[str, str]
) -> Tensors:
    """`names` says which file holds each."""
    into = Tensors(f"the checkpoint {store.path(step)}")
    for file in sorted(set(names.values())):
        path = store.path(step, file)
        try:
            with store.fetched(path) as local:
                _verify(path, local, index["files"][file])
                with safe_open(local, "pt") as content:
                    into.update(
                        {name: content.get_tensor(name) for name, f in names.items() if f == file}
                    )
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing; several machines need a run.checkpoint_url in common"
            ) from None
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
    return into


def _verify(path: str, local: str, facts: Mapping[str, Any]) -> None:
    size = os.path.getsize(local)
    if size != facts["size"]:
        raise CheckpointError(f"{path} is truncated: {size} of {facts['size']} bytes")
    if _digest(Path(local)) != facts["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its content does not have the digest that {_INDEX} gives"
        )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
