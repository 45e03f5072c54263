import json
import logging
import math
import os
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from dpipe.errors import CheckpointError, NumericError, RunError
from dpipe.store import checkpoint, storage
from dpipe.store.checkpoint import latest, load, save

LAYERS = 4
TIMEOUT_S = 30.0


def everything(name: str) -> bool:
    return True


def alone(part: Any) -> list[Any]:
    return [json.loads(json.dumps(part))]


def parameters(layers: Sequence[int], step: int) -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.weight": torch.full((3, 2), 100.0 * step + layer) for layer in layers}


def moments(layers: Sequence[int], step: int) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}.weight.exp_avg": torch.full((3, 2), -100.0 * step - layer)
        for layer in layers
    }


def save_alone(url: str, step: int, keep: int = 2, **state: Any) -> None:
    layers = range(LAYERS)
    save(url, step, 0, parameters(layers, step), moments(layers, step), state, alone, keep)


def save_together(
    urls: Sequence[str], cut: Sequence[Sequence[int]], step: int, keep: int = 2
) -> None:
    """One thread per rank, each with its own URL and layers."""
    barrier, payloads = threading.Barrier(len(cut), timeout=TIMEOUT_S), [""] * len(cut)

    def rank(index: int) -> None:
        def share(part: Any) -> list[Any]:
            payloads[index] = json.dumps(part)
            barrier.wait()
            return [json.loads(payload) for payload in payloads]

        layers = cut[index]
        save(
            urls[index],
            step,
            index,
            parameters(layers, step),
            moments(layers, step),
            {"step": step},
            share,
            keep,
        )

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(cut))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)


def files(url: str | Path) -> list[str]:
    """The files as paths below `url`, without digests."""
    paths = sorted(path for path in Path(url).rglob("*") if path.is_file())
    return [
        "/".join([p.parent.name, *p.name.rsplit("-", 1)[:1]]) if "-0" in p.name else str(p.name)
        for p in paths
    ]


def only(url: str | Path, pattern: str) -> Path:
    (path,) = Path(url).glob(pattern)
    return path


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "checkpoints")
        return
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def test_what_was_saved_is_loaded(url: str) -> None:
    save_alone(url, 7, loss_scale=2.0, configuration={"train.steps": 9})
    loaded = load(url, everything)
    assert (loaded.step, loaded.state) == (
        7,
        {"loss_scale": 2.0, "configuration": {"train.steps": 9}},
    )
    assert same(loaded.tensors, parameters(range(LAYERS), 7))
    assert same(loaded.optimizer, moments(range(LAYERS), 7))


@pytest.mark.parametrize("after", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]]])
def test_any_split_is_loaded_in_any_other(url: str, after: list[list[int]]) -> None:
    save_together([url] * 2, [[0, 1], [2, 3]], step=5)
    for layers in after:
        own_layers = set(layers)
        loaded = load(url, lambda name, own=own_layers: int(name.split(".")[1]) in own)
        assert same(loaded.tensors, parameters(layers, 5))
        assert same(loaded.optimizer, moments(layers, 5))


def test_only_files_that_hold_what_is_asked_for_are_read(folder: str) -> None:
    save_together([folder] * 2, [[0, 1], [2, 3]], step=5)
    for path in Path(folder).rglob("*-00001-*"):
        path.unlink()
    assert list(load(folder, ["layers.1.weight"]).tensors) == ["layers.1.weight"]
    assert load(folder, ()).state == {"step": 5}


def test_ranks_on_several_machines_have_a_folder_each(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in ("one", "two")]
    save_together(urls, [[0, 1], [2, 3]], step=5)
    assert [latest(url) for url in urls] == [5, 5]
    assert same(
        load(urls[1], ["layers.2.weight", "layers.3.weight"]).tensors, parameters([2, 3], 5)
    )
    with pytest.raises(
        CheckpointError,
        match=r"one/step-00000005/model-00001-\w+.safetensors is missing; several mach",
    ):
        load(urls[0], everything)


def test_files_are_standard_safetensors_with_an_index(folder: str) -> None:
    save_together([folder] * 2, [[0, 1], [2, 3]], step=5)
    assert files(folder) == [
        "index.json",
        "step-00000005/model-00000",
        "step-00000005/model-00001",
        "step-00000005/optimizer-00000",
        "step-00000005/optimizer-00001",
    ]
    index = json.loads((Path(folder) / "step-00000005" / "index.json").read_text())
    assert set(index["weight_map"]) == set(parameters(range(LAYERS), 5))
    assert set(index["files"]) == set(index["weight_map"].values()) | set(
        index["optimizer_map"].values()
    )


def test_newest_is_taken_unless_a_step_is_named(url: str) -> None:
    assert latest(url) is None
    for step in (5, 10, 100_000_000):
        save_alone(url, step, keep=3)
    assert latest(url) == 100_000_000
    assert load(url, everything).step == 100_000_000
    assert load(url, everything, step=5).step == 5


def test_newest_checkpoints_stay(url: str) -> None:
    for step in (1, 2, 3, 4):
        save_alone(url, step, keep=2)
    assert storage.Storage(url).folders() == [3, 4]


def test_steps_of_an_abandoned_course_are_removed(url: str) -> None:
    """The run resumed from step 10, and must not come back to steps 20 and 30."""
    for step in (10, 20, 30):
        save_alone(url, step, keep=3)
    save_alone(url, 15, keep=3)
    assert storage.Storage(url).steps() == [10, 15]


def test_files_of_a_faster_rank_are_left_alone(folder: str) -> None:
    save_alone(folder, 1)
    later = Path(folder) / "step-00000003"
    later.mkdir()
    save_alone(folder, 2)
    assert later.exists()


def test_remains_of_a_crash_are_removed_with_the_next_checkpoint(folder: str) -> None:
    unfinished = Path(folder) / "step-00000001"
    unfinished.mkdir(parents=True)
    (unfinished / ".0.tmp").write_bytes(b"half")
    save_alone(folder, 2)
    assert not unfinished.exists()


def test_step_may_be_saved_again(url: str) -> None:
    save_alone(url, 3, attempt=1)
    save_alone(url, 3, attempt=2)
    loaded = load(url, everything)
    assert loaded.state == {"attempt": 2}
    assert same(loaded.tensors, parameters(range(LAYERS), 3))


def test_parts_of_a_moment_are_loaded_as_one(folder: str) -> None:
    whole, name = torch.arange(12.0), "layers.0.weight.exp_avg"
    parts = {
        f"{name}[{start}:{stop}]": whole[start:stop] for start, stop in ((8, 12), (0, 3), (3, 8))
    }
    save(folder, 1, 0, parameters([0], 1), parts, {}, alone, keep=2)
    assert torch.equal(load(folder, everything).optimizer[name], whole)


def test_part_of_a_moment_that_is_missing_is_named(folder: str) -> None:
    parts = {f"layers.0.weight.exp_avg[{start}:{start + 4}]": torch.zeros(4) for start in (0, 8)}
    save(folder, 1, 0, parameters([0], 1), parts, {}, alone, keep=2)
    with pytest.raises(
        CheckpointError, match=r"layers.0.weight.exp_avg in parts from \[0, 8\], not all of it"
    ):
        load(folder, everything)


def test_checkpoint_before_the_first_update_has_no_moments(url: str) -> None:
    save(url, 0, 0, parameters(range(LAYERS), 0), {}, {}, alone, 1)
    assert load(url, everything).optimizer == {}


class Crash(BaseException):
    """Not an `Exception`, so that nothing catches it and cleans up, as after a power cut."""


def _crash(*args: Any, **kwargs: Any) -> Any:
    raise Crash


def _after(number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real` for the first `number` calls, then a crash in its place."""
    calls = iter(range(number))

    def run(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if next(calls, None) is not None else _crash()

    return run


# Three files are written, in this order: model, optimizer, index. Each is filled, its digest taken,
# synced with its two folders, and renamed between.
POINTS = [
    *(("save_file", "checkpoint", n) for n in (0, 1)),
    *(("digest_of", "storage", n) for n in (0, 1, 2)),
    *(("sync", "storage", n) for n in range(9)),
    *(("replace", "os", n) for n in (0, 1, 2)),
]


@pytest.mark.parametrize(("function", "where", "calls"), POINTS)
@pytest.mark.parametrize("step", [5, 6])
def test_crash_anywhere_leaves_a_whole_checkpoint(
    folder: str, monkeypatch: pytest.MonkeyPatch, function: str, where: str, calls: int, step: int
) -> None:
    """For a new step and for one that is written again."""
    save_alone(folder, 5)
    target = {"checkpoint": checkpoint, "storage": storage, "os": os}[where]
    with monkeypatch.context() as faulty:
        faulty.setattr(target, function, _after(calls, getattr(target, function)))
        with pytest.raises(Crash):
            save_alone(folder, step)
    loaded = load(folder, everything)
    assert same(loaded.tensors, parameters(range(LAYERS), loaded.step))
    assert same(loaded.optimizer, moments(range(LAYERS), loaded.step))
    save_alone(folder, 7)
    assert load(folder, everything).step == 7


def test_crash_of_another_rank_commits_nothing(folder: str) -> None:
    save_alone(folder, 5)
    with pytest.raises(Crash):
        save(folder, 6, 0, parameters([0], 6), {}, {}, _crash, 2)
    assert latest(folder) == 5


def test_crash_while_old_steps_are_removed_leaves_the_new_one(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_alone(folder, 5, keep=1)
    with monkeypatch.context() as faulty:
        faulty.setattr(shutil, "rmtree", _crash)
        with pytest.raises(Crash):
            save_alone(folder, 6, keep=1)
    assert storage.Storage(folder).steps() == [6]


def test_two_ranks_may_remove_one_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone(folder, 5)
    store = storage.Storage(folder)
    real = shutil.rmtree

    def somebody_was_first(path: str) -> None:
        real(path)
        real(path)

    monkeypatch.setattr(shutil, "rmtree", somebody_was_first)
    store.remove(5)
    assert store.folders() == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = [
    (
        "model-*",
        truncate,
        r"step-00000006/model-00000-\w+.safetensors is truncated: \d+ of \d+ bytes",
    ),
    (
        "model-*",
        flip,
        r"model-00000-\w+.safetensors is damaged: its content does not have the digest",
    ),
    ("model-*", Path.unlink, r"model-00000-\w+.safetensors is missing"),
    ("optimizer-*", flip, r"optimizer-00000-\w+.safetensors is damaged"),
    ("index.json", truncate, r"step-00000006/index.json is damaged"),
]


@pytest.mark.parametrize(("pattern", "damage", "message"), DAMAGE)
def test_damaged_file_is_named(
    folder: str, pattern: str, damage: Callable[[Path], None], message: str
) -> None:
    for step in (5, 6):
        save_alone(folder, step)
    damage(only(folder, f"step-00000006/{pattern}"))
    with pytest.raises(CheckpointError, match=f"{message}.*; --fallback uses the one of step 5"):
        load(folder, everything)


@pytest.mark.parametrize(("pattern", "damage", "message"), DAMAGE)
def test_fallback_uses_the_previous_checkpoint_and_reports_it(
    folder: str,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    for step in (5, 6):
        save_alone(folder, step)
    damage(only(folder, f"step-00000006/{pattern}"))
    with caplog.at_level(logging.WARNING, "dpipe"):
        loaded = load(folder, everything, fallback=True)
    assert loaded.step == 5
    assert same(loaded.tensors, parameters(range(LAYERS), 5))
    (skipped,) = loaded.skipped
    assert re.search(message, skipped)
    assert "skipping the checkpoint of step 6" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda index: {},
        lambda index: [],
        lambda index: index | {"weight_map": []},
        lambda index: index | {"files": {}},
        lambda index: index | {"files": {name: {} for name in index["files"]}},
    ],
    ids=["{}", "[]", "map", "no files", "no digest"],
)
def test_json_that_is_no_index_is_reported_as_damage(
    folder: str, change: Callable[[Any], object]
) -> None:
    for step in (3, 6):
        save_alone(folder, step)
    index = Path(folder) / "step-00000006" / "index.json"
    index.write_text(json.dumps(change(json.loads(index.read_text()))))
    with pytest.raises(
        CheckpointError, match=r"00006/index.json is damaged: it is JSON.*uses the one of step 3"
    ):
        load(folder, everything)
    assert load(folder, everything, fallback=True).step == 3


def test_fallback_gives_up_where_nothing_is_whole(folder: str) -> None:
    for step in (5, 6):
        save_alone(folder, step)
        truncate(only(folder, f"step-0000000{step}/model-*"))
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* is complete: .*step-00000006.*; .*step-00000005",
    ):
        load(folder, everything, fallback=True)


def test_file_that_is_no_safetensors_is_named(folder: str) -> None:
    """The file was replaced and the index changed to match."""
    save_alone(folder, 5)
    path = only(folder, "step-00000005/model-*")
    path.write_bytes(b"not tensors")
    index_path = path.with_name("index.json")
    index = json.loads(index_path.read_text())
    index["files"][path.name] = {"size": 11, "sha256": storage.digest_of(path)}
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged"):
        load(folder, everything)


def test_folder_without_a_checkpoint_is_named(url: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint in .*; has the run written one yet"
    ):
        load(url, everything)


def test_step_that_was_never_finished_is_named(folder: str) -> None:
    save_alone(folder, 5)
    (Path(folder) / "step-00000006").mkdir()
    assert latest(folder) == 5
    with pytest.raises(
        CheckpointError, match=r"step-00000006/index.json is missing: .* never finished"
    ):
        load(folder, everything, step=6)


def test_layer_that_is_not_there_is_named(folder: str) -> None:
    save_alone(folder, 5)
    with pytest.raises(
        CheckpointError, match=r"step-00000005 holds no layers.9.weight: .*check \[model\]"
    ):
        load(folder, ["layers.9.weight"])
    loaded = load(folder, everything)
    with pytest.raises(CheckpointError, match=r"holds no layers.9.weight.exp_avg"):
        loaded.optimizer["layers.9.weight.exp_avg"]


def test_url_that_cannot_be_used_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"run.checkpoint_url no-such-protocol://bucket/run cannot be used"
    ):
        latest("no-such-protocol://bucket/run")


def test_unwritable_url_is_named(folder: str) -> None:
    Path(folder).write_text("a file where the folder should be")
    with pytest.raises(
        RunError, match=r"cannot write .*step-00000005.*; make room, or set run.checkpoint_url"
    ):
        save_alone(folder, 5)


def test_nothing_is_unpickled(folder: str) -> None:
    """A pickle in place of a file is reported as damage and not executed."""
    save_alone(folder, 5)
    torch.save(parameters(range(LAYERS), 5), only(folder, "step-00000005/model-*"))
    with pytest.raises(CheckpointError, match=r"is truncated|is damaged"):
        load(folder, everything)


def test_all_files_have_the_permissions_of_the_index(folder: str) -> None:
    save_alone(folder, 5)
    modes = {path.name: path.stat().st_mode for path in (Path(folder) / "step-00000005").iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {modes["index.json"]}


def test_disk_that_takes_no_more_is_named(folder: str) -> None:
    """safetensors then raises its own error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(
            RunError,
            match=r"cannot write .*/model-00000-\*.safetensors.*File too large.*; make room",
        ):
            save_alone(folder, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_parameters_that_are_not_finite_are_not_saved(url: str) -> None:
    """A step may break them with gradients whose norm was not measured."""
    save_alone(url, 1)
    broken = parameters(range(LAYERS), 2) | {"layers.1.weight": torch.tensor([1.0, math.inf])}
    with pytest.raises(
        NumericError, match=r"layers\.1\.weight on rank 0 is not finite before step 2"
    ):
        save(url, 2, 0, broken, moments(range(LAYERS), 2), {}, alone, 1)
    assert load(url, ["layers.1.weight"]).step == 1
