"""A foreign checkpoint cannot read, write or remove anything outside its folder, or hang its
reader.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from dpipe.config.load import Config
from dpipe.errors import CheckpointError, RunError
from dpipe.run.generate import generate_text
from dpipe.store.checkpoint import load, save
from dpipe.store.storage import MAX_JSON_BYTES, Storage

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
RunRanks = Callable[..., list[BaseException | None]]

STEP = "step-00000003"


def everything(name: str) -> bool:
    return True


def save_alone(url: str, step: int) -> None:
    weight = {"layers.0.weight": torch.ones(2, 3)}
    save(url, step, 0, weight, {}, {}, lambda part: [part], keep=1)


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def rename_to(folder: Path, name: str, kind: str = "model") -> None:
    """Change the file's name in the index to `name`, with its true size and digest."""

    def change(index: dict[str, Any]) -> None:
        table = index["weight_map" if kind == "model" else "optimizer_map"]
        (old,) = set(table.values())
        index["files"][name] = index["files"].pop(old)
        for tensor in table:
            table[tensor] = name

    change_index(folder, change)


def only(folder: Path, kind: str = "model") -> Path:
    (path,) = folder.glob(f"{kind}-*")
    return path


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save_alone(str(tmp_path / "checkpoints"), 3)
    return tmp_path / "checkpoints" / STEP


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("name", ["../../x.safetensors", "/ABSOLUTE/x.safetensors"])
def test_run_does_not_follow_names_out_of_its_checkpoint(
    tiny: Make, losses: Losses, run_ranks: RunRanks, tmp_path: Path, name: str, kind: str
) -> None:
    """Both were read if size and digest matched the index."""
    name = name.replace("/ABSOLUTE", str(tmp_path))
    config = tiny()
    losses(config)
    folder = tmp_path / "run/checkpoints" / STEP
    os.rename(only(folder, kind), folder / name)
    rename_to(folder, name, kind)
    (error,) = run_ranks(config.with_(train__steps=5), resume=True)
    assert isinstance(error, CheckpointError)
    assert f"index.json names the file {name!r}: only plain names" in str(error)
    with pytest.raises(CheckpointError, match=r"index\.json names the file .*: only plain names"):
        generate_text(tmp_path / "run", "The ", tokens=2, temperature=0.0, seed=0)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\\b", ".hidden", "a\0b", "x\n", "\x1b[2J", "é", "x" * 300, "-rf"],
    ids=ascii,
)
@pytest.mark.parametrize("place", ["local", "memory"])
def test_only_plain_names_are_read(tmp_path: Path, name: str, place: str) -> None:
    url = f"memory://{tmp_path.name}" if place == "memory" else str(tmp_path)
    save_alone(url, 3)
    fs, root = fsspec.url_to_fs(url)
    index = json.loads(fs.cat_file(f"{root}/{STEP}/index.json"))
    (facts,) = index["files"].values()
    index["files"] = {name: facts}
    index["weight_map"] = {"layers.0.weight": name}
    fs.pipe_file(f"{root}/{STEP}/index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match="only plain names") as caught:
        load(url, everything)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_link_out_of_the_folder_is_not_followed(step: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.safetensors"
    path = only(step)
    os.rename(path, outside)
    path.symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"leads out of .*{STEP}, to {outside}"):
        load(str(step.parent), everything)


def test_link_within_the_folder_is_followed(step: Path) -> None:
    path = only(step)
    os.rename(path, step / "kept")
    path.symlink_to("kept")
    assert load(str(step.parent), everything).step == 3


def test_link_to_itself_is_named(step: Path) -> None:
    path = only(step)
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(CheckpointError, match=r"model-.* cannot be read: Too many levels"):
        load(str(step.parent), everything)


def test_step_that_is_a_link_out_of_the_checkpoints_is_not_read(step: Path, tmp_path: Path) -> None:
    os.rename(step, tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{STEP} leads out of .*checkpoints, to .*elsewhere"):
        load(str(step.parent), everything)


def test_checkpoints_may_be_a_link_of_the_user(step: Path, tmp_path: Path) -> None:
    """Such as to a larger disk."""
    (tmp_path / "link").symlink_to(step.parent)
    assert load(str(tmp_path / "link"), everything).step == 3


def test_nothing_is_written_through_a_step_that_is_a_link(step: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (step.parent / "step-00000004").symlink_to(victim)
    with pytest.raises(CheckpointError, match="step-00000004 leads out of"):
        save_alone(str(step.parent), 4)
    assert not list(victim.iterdir())


def test_nothing_is_removed_through_a_step_that_is_a_link(step: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    os.rename(step, victim)
    before = sorted(victim.iterdir())
    step.symlink_to(victim)
    with pytest.raises(RunError, match=f"{STEP} is a link: what it leads to is not removed"):
        Storage(str(step.parent)).remove(3)
    assert sorted(victim.iterdir()) == before


def test_links_in_a_step_are_removed_without_what_they_lead_to(step: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    (step / "index.json").unlink()
    (step / "index.json").symlink_to(tmp_path / "victim")
    (step / "more").symlink_to(tmp_path / "victim")
    Storage(str(step.parent)).remove(3)
    assert (tmp_path / "victim" / "file").exists()
    assert not step.exists()


def test_step_that_cannot_be_removed_is_named(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(RunError, match=f"cannot remove .*{STEP}: not yours; delete it"):
        Storage(str(step.parent)).remove(3)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [make_fifo, make_endless, make_folder])
@pytest.mark.parametrize("name", ["model-*", "index.json"])
def test_only_regular_files_are_opened(step: Path, make: Callable[[Path], None], name: str) -> None:
    """The first two hung forever."""
    (path,) = step.glob(name)
    path.unlink()
    make(path)
    with pytest.raises(CheckpointError, match=f"{path.name} (is not a regular|leads out of)"):
        load(str(step.parent), everything)


@pytest.mark.parametrize("make", [make_fifo, make_endless])
@pytest.mark.parametrize("name", ["run.json", "checkpoints/run.json"])
def test_identity_is_read_from_a_regular_file(
    tiny: Make, losses: Losses, run_ranks: RunRanks, tmp_path: Path, name: str, make: Any
) -> None:
    config = tiny()
    losses(config)
    (tmp_path / "run" / name).unlink()
    make(tmp_path / "run" / name)
    (error,) = run_ranks(config.with_(train__steps=5), resume=True)
    assert isinstance(error, CheckpointError)
    assert re.search(r"run\.json (is not a regular|leads out of)", str(error))


def test_folder_in_place_of_a_file_of_an_object_store_is_named(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    save_alone(url, 3)
    fs, root = fsspec.url_to_fs(url)
    (path,) = fs.glob(f"{root}/{STEP}/model-*")
    fs.rm_file(path)
    fs.pipe_file(f"{path}/inner", b"")
    with pytest.raises(CheckpointError, match="is a directory, not a regular file"):
        load(url, everything)


@pytest.mark.parametrize("place", ["local", "memory"])
def test_index_of_a_terabyte_is_not_read(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}" if place == "memory" else str(tmp_path)
    save_alone(url, 3)
    if place == "local":
        os.truncate(tmp_path / STEP / "index.json", MAX_JSON_BYTES + 1)
    else:
        monkeypatch.setattr("dpipe.store.storage.MAX_JSON_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"index\.json has \d+ bytes: a run writes no such"):
        load(url, everything)


def test_file_that_is_not_in_the_index_is_not_read(step: Path) -> None:
    """Its digest is not known."""
    save_file({"layers.0.weight": torch.zeros(2, 3)}, step / "other.safetensors")

    def change(index: dict[str, Any]) -> None:
        index["weight_map"]["layers.0.weight"] = "other.safetensors"

    change_index(step, change)
    with pytest.raises(CheckpointError, match="not the index of a checkpoint"):
        load(str(step.parent), everything)


def test_whole_checkpoint_passes(step: Path) -> None:
    path = only(step)
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] in path.name
    assert torch.equal(
        load(str(step.parent), everything).tensors["layers.0.weight"], torch.ones(2, 3)
    )
