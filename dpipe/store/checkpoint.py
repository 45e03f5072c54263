"""Checkpoints: safetensors with names of the whole model, so that a run can be resumed with any
cut. In local folders and at fsspec URLs.

    URL/step-00000100/
        model-00000-1f0c..9a.safetensors       one of each a rank; the name has a digest of the
        optimizer-00000-77e1..04.safetensors   content, so that writing never harms a checkpoint
        index.json                             step, state, name -> file, file -> size and digest

    rank 0   write, sync, rename files ──┐ share: what    ┌── write, sync, rename index.json,
    rank 1   write, sync, rename files ──┘ each one wrote └── remove old steps

The index commits a checkpoint: it exists only when every file does. Each rank writes it, because on
several machines each may have a folder of its own; on one machine all write the same content.
Nothing is unpickled.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dpipe.errors import CheckpointError, NumericError
from dpipe.stage.tensor_parallel import Shard
from dpipe.store.identity import RunIdentity, from_table, refuse_superseded, writer_of
from dpipe.store.storage import INDEX, Storage, digest_of, parsed_json
from dpipe.wire.text import visible

LOG = logging.getLogger("dpipe")

_SLICE = re.compile(r"(.+)\[(\d{1,18}):(\d{1,18})\]")
_KINDS = ("model", "optimizer")  # in files of their own: to generate text needs no moments
_PLAIN = re.compile(r"\w[\w.-]{0,254}", re.ASCII)  # a file's name: no folder, nothing hidden
_TABLES = ("state", "weight_map", "optimizer_map", "files")  # every index has them

_Names = Callable[[str], bool] | frozenset[str]


class Tensors(dict[str, torch.Tensor]):
    """What was loaded, by name. A missing name raises `CheckpointError`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __missing__(self, name: str) -> torch.Tensor:
        raise CheckpointError(
            f"{self._where} holds no {name}: it is of a model with other layers; check [model]"
        )


def parse_slice(name: str) -> tuple[str, int, int] | None:
    """Tensor, start and stop of "TENSOR[start:stop]", a range of elements of a flattened tensor of
    which several ranks hold parts; None if `name` is that of a whole tensor.
    """
    match = _SLICE.fullmatch(name)
    if match is None:
        return None
    return match[1], int(match[2]), int(match[3])


@dataclass(frozen=True)
class Loaded:
    """What `load` found."""

    step: int
    state: dict[str, Any]
    tensors: Tensors
    optimizer: Tensors
    skipped: tuple[str, ...] = ()  # what was wrong with each newer checkpoint
    run: RunIdentity | None = None  # that wrote it; None: before runs had an id


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
    run: RunIdentity | None = None,
    best: int | None = None,
) -> None:
    """Write this rank's part of the checkpoint of `step`. Every rank calls it with its own part and
    the same `state`.

    `share` exchanges JSON with all ranks; when it returns, all files are written. `layouts` are of
    those tensors of `optimizer` that are rows of several ranks' parts (`tensor_shards.py`).
    `buffers` are saved with `tensors`.

    The newest `keep` checkpoints stay, and that of step `best`. Steps later than `step` are
    removed: the run went back. Those of a run other than `run` are never removed.
    Whatever fails, earlier checkpoints stay whole. Raises `RunError`, which ends in the `remedy`,
    if something cannot be written, or if another process writes this run's checkpoints now; and
    `NumericError` if one of `tensors` is not finite, because no run could go on from it.
    """
    store = Storage(url, remedy)
    if run is not None:
        refuse_superseded(store, run)
    part = dict[str, Any]()
    # Every rank shares, also one that has found something: the others wait for it.
    part["bad"] = _first_not_finite(tensors)
    if part["bad"] is None:
        contents = ({**tensors, **buffers}, optimizer)
        for kind, content in zip(_KINDS, contents, strict=True):
            part[kind] = _write_part(store, step, rank, kind, content)
    part["layouts"] = _as_tables(layouts)
    parts = share(part)
    _refuse(parts, step)
    text = json.dumps(_index_of(parts, step, state, run), indent=1)
    store.write(step, INDEX, rank, lambda path: path.write_text(text))
    # Last: until the new checkpoint is committed, the old ones are all there is.
    _prune(store, step, keep, run, best)


def _as_tables(layouts: Mapping[str, Shard]) -> dict[str, dict[str, Any]]:
    return {name: asdict(shard) for name, shard in layouts.items()}


def _first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            return name
    return None


def _index_of(
    parts: Sequence[dict[str, Any]], step: int, state: Mapping[str, Any], run: RunIdentity | None
) -> dict[str, Any]:
    """`parts` by rank, as `save` shares them."""
    return {
        "step": step,
        "run": None if run is None else run.as_table(),
        "state": dict(state),
        "weight_map": _merged(parts, "model", "names"),
        "optimizer_map": _merged(parts, "optimizer", "names"),
        "files": _merged(parts, "model", "files") | _merged(parts, "optimizer", "files"),
        "layouts": {name: layout for part in parts for name, layout in part["layouts"].items()},
    }


def load(
    url: str,
    names: Iterable[str] | Callable[[str], bool],
    step: int | None = None,
    fallback: bool = False,
) -> Loaded:
    """The tensors in `names`, or whose name passes that test, from the newest checkpoint or that of
    `step`.

    Only files that hold some of them are read, and each is checked against its digest. Raises
    `CheckpointError` naming what is missing or damaged; with `fallback` it tries the checkpoint
    before first.
    """
    store = Storage(url)
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
                hint = ""
                if len(steps) > 1:
                    hint = f"; --fallback uses the one of step {steps[-2]}"
                raise CheckpointError(f"{error}{hint}") from None
            LOG.warning("skipping the checkpoint of step %d: %s", candidate, error)
            skipped.append(str(error))
    raise CheckpointError(f"no checkpoint in {url} is complete: " + "; ".join(skipped))


def check_url(url: str) -> None:
    """Raises `CheckpointError` if checkpoints cannot be written to `url`, as far as that shows
    without writing.
    """
    store = Storage(url)
    if not store.is_local:
        return
    root = Path(store.root)
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise CheckpointError(
            f"run.checkpoint_url {url} cannot be used: {existing} is not a writable folder"
        )


def saved_configuration(url: str) -> dict[str, Any]:
    """The configuration, as `section.key` -> value, that the newest checkpoint holds; {} if none
    does. Raises `CheckpointError` if its index is damaged.
    """
    store = Storage(url)
    steps = store.steps()
    if not steps:
        return {}
    saved = _read_index(store, steps[-1])["state"].get("configuration")
    return dict(saved) if isinstance(saved, dict) else {}


def latest(url: str) -> int | None:
    """The step of the newest checkpoint; None if there is none."""
    return max(Storage(url).steps(), default=None)


def best(url: str) -> int:
    """The step before which the held-out loss was lowest. Raises `CheckpointError` where its
    checkpoint was not kept.
    """
    store = Storage(url)
    steps = store.steps()
    state = _read_index(store, steps[-1])["state"] if steps else {}
    step = state.get("best_step")
    if step not in steps:
        raise CheckpointError(
            f"{url} holds no checkpoint of the lowest held-out loss: train with run.keep_best and "
            "train.eval_every, or take the newest"
        )
    return int(step)


def _write_part(
    store: Storage, step: int, rank: int, kind: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    if not tensors:
        return {"names": {}, "files": {}}
    # safetensors takes no views with gaps.
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    template = f"{kind}-{rank:05d}-{{}}.safetensors"  # `write` puts the digest between the braces
    file, facts = store.write(
        step, template, rank, lambda path: save_file(content, path, {"format": "pt"})
    )
    return {"names": dict.fromkeys(tensors, file), "files": {file: facts}}


def _refuse(parts: Sequence[dict[str, Any]], step: int) -> None:
    for rank, part in enumerate(parts):
        if part["bad"] is not None:
            raise NumericError(
                f"{part['bad']} on rank {rank} is not finite before step {step}, which was not "
                "saved; lower train.learning_rate, clip with train.clip_norm, or resume from the "
                "last checkpoint"
            )


def _merged(parts: Sequence[dict[str, Any]], kind: str, key: str) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part[kind][key].items()}


def _prune(store: Storage, step: int, keep: int, run: RunIdentity | None, best: int | None) -> None:
    """Leave the newest `keep` steps, and the `best`. A later step without an index is left alone: a
    faster rank may be writing it. So is what another run wrote.
    """
    committed = [s for s in store.steps() if not _is_of_another(store, s, run)]
    kept = [s for s in committed if s <= step][-keep:]
    kept += [s for s in committed if s == best]
    # Left behind by a rank that died while it wrote: nobody finishes an earlier step any more.
    unfinished = {s for s in store.folders() if s < step} - set(store.steps())
    for old in (set(committed) | unfinished) - set(kept):
        store.remove(old)


def _is_of_another(store: Storage, step: int, run: RunIdentity | None) -> bool:
    writer = writer_of(store, step)
    return writer is not None and (run is None or writer.id != run.id)


def _load_step(store: Storage, step: int, names: _Names, skipped: tuple[str, ...]) -> Loaded:
    index = _read_index(store, step)
    wanted = names if callable(names) else names.__contains__
    model = _read_tensors(store, step, index, _filtered(index["weight_map"], wanted))
    optimizer = _read_tensors(store, step, index, _filtered(index["optimizer_map"], wanted))
    if not callable(names):
        for name in names:
            model[name]  # raises if it is missing
    joined = with_slices_joined(optimizer, f"the checkpoint {store.path(step)}")
    for name, layout in index.get("layouts", {}).items():
        if name in joined:
            joined[name] = _in_order(joined[name], layout, name, store.path(step, INDEX))
    run = None
    if index.get("run") is not None:
        run = from_table(index["run"], store.path(step, INDEX))
    return Loaded(step, index["state"], model, joined, skipped, run)


def _in_order(row: torch.Tensor, layout: Mapping[str, Any], name: str, path: str) -> torch.Tensor:
    """`row`, the parts of all ranks, in the order of the whole tensor. Raises `CheckpointError` if
    `layout` is not one of a tensor of that size.
    """
    try:
        # Whatever the numbers of a damaged file are, they end in one of the errors below.
        shard = Shard(**layout)
        return shard.join(row.chunk(shard.size))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: the layout of {name!a:.200}: {error}") from None


def _filtered(names: Mapping[str, str], wanted: Callable[[str], bool]) -> dict[str, str]:
    return {name: file for name, file in names.items() if wanted(name)}


def with_slices_joined(tensors: Tensors, where: str) -> Tensors:
    """`NAME[0:8]` and `NAME[8:12]` become a flat NAME of 12 elements. Raises `CheckpointError` if a
    part between is missing.
    """
    joined = Tensors(where)
    parts = dict[str, dict[int, torch.Tensor]]()  # by name: the elements from each start on
    for name, tensor in tensors.items():
        part = parse_slice(name)
        if part is None:
            joined[name] = tensor
            continue
        whole, start, _ = part
        parts.setdefault(whole, {})[start] = tensor.reshape(-1)
    for name, by_start in parts.items():
        starts = sorted(by_start)
        pieces = [by_start[start] for start in starts]
        ends = [0, *accumulate(piece.numel() for piece in pieces)]
        # Each begins where the one before ends. That the last one reaches the end, whoever takes
        # the tensor sees by its size.
        if ends[:-1] != starts:
            raise CheckpointError(f"{where} holds {name} in parts from {starts}, not all of it")
        try:
            joined[name] = torch.cat(pieces)
        except RuntimeError as error:  # of dtypes that do not go together
            raise CheckpointError(f"{where} holds {name!a:.200} damaged: {error}") from None
    return joined


def _read_index(store: Storage, step: int) -> dict[str, Any]:
    path = store.path(step, INDEX)
    try:
        index = parsed_json(store.read(path), path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint was never finished") from None
    if not _is_index(index):
        raise CheckpointError(f"{path} is damaged: it is JSON, but not the index of a checkpoint")
    # A checkpoint may come from somebody else: no name in it leads anywhere.
    for file in index["files"]:
        if not _PLAIN.fullmatch(file):
            raise CheckpointError(
                f"{path} names the file {file!a:.200}: only plain names of files in its own folder "
                "are read"
            )
    return dict(index)


def _is_index(content: object) -> bool:
    """Whether it has what `save` writes, as far as loading relies on it."""
    if not isinstance(content, dict):
        return False
    if not all(isinstance(content.get(key), dict) for key in _TABLES):
        return False
    if not isinstance(content.get("layouts", {}), dict):  # older checkpoints have none
        return False
    files = content["files"]
    named = [*content["weight_map"].values(), *content["optimizer_map"].values()]
    if not all(isinstance(file, str) and file in files for file in named):
        return False
    return all(_are_facts(facts) for facts in files.values())


def _are_facts(facts: object) -> bool:
    if not isinstance(facts, dict):
        return False
    size = facts.get("size")
    return type(size) is int and size >= 0 and isinstance(facts.get("sha256"), str)


def _read_tensors(
    store: Storage, step: int, index: Mapping[str, Any], names: Mapping[str, str]
) -> Tensors:
    """The tensors of `names`, each in the file that it names."""
    tensors = Tensors(f"the checkpoint {store.path(step)}")
    for file in sorted(set(names.values())):
        path = store.path(step, file)
        inside = [name for name, its_file in names.items() if its_file == file]
        # File by file: only what is needed of each is in memory, and of a URL on the disk.
        try:
            with store.fetched(path, index["files"][file]["size"]) as local:
                if digest_of(Path(local)) != index["files"][file]["sha256"]:
                    raise CheckpointError(
                        f"{path} is damaged: its content does not have the digest that {INDEX} "
                        "gives"
                    )
                with safe_open(local, "pt") as content:
                    for name in inside:
                        tensors[name] = content.get_tensor(name)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing; several machines need a run.checkpoint_url in common"
            ) from None
        # A name that is not UTF-8 is a ValueError. Both show names, which may be anybody's.
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {visible(str(error)):.300}") from None
    return tensors
