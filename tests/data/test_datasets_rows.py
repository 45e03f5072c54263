"""Rows of folders that datasets has written, and of data sets on the hub."""

import json

import numpy as np
import pytest
from data.test_samples import Letters, chat, samples_of
from fakes.hub import FakeHub, Repository

from dpipe.config.load import build
from dpipe.config.model import DataConfig
from dpipe.data import samples as samples_module
from dpipe.data.samples import prepare_samples
from dpipe.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub.constants")
ROWS = [chat("hey", "yo"), chat("bye", "ok"), chat("one", "two")]


def prepared(tmp_path, name="cache", **data):
    settings = {"format": "chat", "held_out": 0.0, "cache": str(tmp_path / name)} | data
    return prepare_samples(DataConfig(**settings), Letters(), 16)


def text(samples):
    return bytes(np.asarray(samples.tokens, np.uint8)).decode()


def test_folder_of_datasets_has_the_rows_that_were_saved(tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder, num_shards=2)
    assert text(prepared(tmp_path, files=(str(folder),))) == text(samples_of(tmp_path, ROWS))


def test_folder_of_splits_asks_for_one(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="name a split: .*saved/test, .*saved/train"):
        prepared(tmp_path, files=(str(tmp_path / "saved"),))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match="not a folder that Dataset.save_to_disk has written, or name"
    ):
        prepared(tmp_path, files=(str(tmp_path / "empty"),))


def test_rows_in_parts_are_those_at_once(tmp_path, monkeypatch):
    """Parts of a few tokens, as of rows that do not fit in memory."""
    whole = samples_of(tmp_path, ROWS)
    monkeypatch.setattr(samples_module, "_PART", 1)
    (tmp_path / "again").mkdir()
    parts = samples_of(tmp_path / "again", ROWS)
    assert text(parts) == text(whole)
    assert parts.ends.tolist() == whole.ends.tolist()
    assert parts.learned.tolist() == whole.learned.tolist()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """org/chats with two splits."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    folder = tmp_path / "chats"
    (folder / "data").mkdir(parents=True)
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    lines = "".join(f"{json.dumps(row)}\n" for row in ROWS[:1])
    (folder / "test.jsonl").write_text(lines)
    (folder / "testing.jsonl").write_text("broken")
    with FakeHub({"org/chats": Repository(folder)}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield server


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a library's own session
def test_split_of_the_hub_is_fetched_alone(hub, tmp_path):
    found = prepared(tmp_path, hub="org/chats:train")
    assert text(found) == text(samples_of(tmp_path, ROWS))
    assert not any("test.jsonl" in path for path in hub.asked if "resolve" in path)
    few = prepared(tmp_path, hub=f"org/chats@{'1' * 40}:test")
    assert text(few) == "u:hey|a:yo|"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/chats:valid", "no file of org/chats begins with 'valid'"),
        ("org/none:train", "does not have it, and the cache not all of it"),
        ("chats", 'must be "org/name:split"'),
    ],
)
def test_split_that_is_not_there_is_refused(name, message, hub, tmp_path):
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, hub=name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"hub": "a/b:train", "files": ["x.jsonl"], "format": "chat"}, "exclude each other"),
        ({"hub": "a/b:train"}, "data.hub holds rows: set data.format"),
    ],
)
def test_hub_that_does_not_go_with_the_rest_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        build({"model": {"hf": "a/b"}, "data": data})


def test_file_without_rows_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    empty = prepared(tmp_path, files=(str(tmp_path / "rows.jsonl"),))
    with pytest.raises(DataError, match="hold no rows to train on"):
        samples_module.check_samples(empty, need_held_out=False)


def test_damaged_cache_is_named(tmp_path):
    samples_of(tmp_path, ROWS)
    (column,) = (tmp_path / "cache").glob("samples-*/tokens")
    column.write_bytes(column.read_bytes()[:-4])
    with pytest.raises(DataError, match="is damaged .*: remove it to have it remade"):
        samples_of(tmp_path, ROWS)
