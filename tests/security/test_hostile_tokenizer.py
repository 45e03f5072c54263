"""A foreign tokenizer.json can only harm the process that applies it."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.bounds import quickly
from tokenizers import Tokenizer, models, pre_tokenizers

from dpipe.data.corpus import prepare
from dpipe.errors import ConfigError, DataError
from dpipe.tokenizer import process as tokenizer_process
from dpipe.tokenizer.process import MAX_FILE_BYTES
from dpipe.tokenizer.tokenizer import FileTokenizer, open_tokenizer, vocabulary


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, Any]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table: dict[str, Any] = json.loads(tokenizer.to_str())
    return table


def saved(folder: Path, table: dict[str, Any]) -> str:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(table))
    return str(path)


def refused(name: str, text: str) -> str:
    """The error, in one line."""
    with quickly(), pytest.raises(DataError, match=r"data\.tokenizer ") as caught:
        open_tokenizer(name).encode(text)
    assert str(caught.value).isprintable()
    return str(caught.value)


def split_at(regex: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


def replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def test_harmless_tokenizer_is_applied(tmp_path: Path, plain: dict[str, Any]) -> None:
    tokenizer = open_tokenizer(saved(tmp_path, plain))
    assert tokenizer.encode("b a x") == [1, 0, 2]
    assert list(tokenizer.encode_each(["a", "", "b"])) == [[0], [], [1]]
    assert tokenizer.decode([0, 1]) == "a b"
    assert tokenizer.vocab_size == vocabulary(tokenizer.name) == 3


def test_pattern_that_backtracks_without_end_is_given_up(
    tmp_path: Path, plain: dict[str, Any]
) -> None:
    """A panic of Rust, which is no Exception to Python."""
    plain["pre_tokenizer"] = split_at("(a|a|aa)+$")
    message = refused(saved(tmp_path, plain), "a" * 60 + "b")
    assert "cannot be applied to this text" in message


def test_pattern_that_takes_too_long_is_given_up(
    tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(saved(tmp_path, plain))
    monkeypatch.setattr(tokenizer_process, "ANSWER_S", 0.001)
    assert "it took longer than 0.001 s" in refused(tokenizer.name, "a b " * 100_000)


def test_id_that_the_vocabulary_does_not_have_is_refused(
    tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(saved(tmp_path, plain))
    monkeypatch.setattr(tokenizer, "vocab_size", 1)
    with pytest.raises(DataError, match="it makes id 1, of 1 entries"):
        tokenizer.encode("b")


def test_text_that_grows_without_end_is_not_taken(
    tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "ANSWER_BYTES", 1000)
    assert "more than 1000 bytes" in refused(saved(tmp_path, plain), "a b " * 1000)


def test_replacement_that_grows_without_end_is_given_up(
    tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 3.5 GB, and the process."""
    monkeypatch.setattr(tokenizer_process, "MEMORY_BYTES", 1 << 29)
    growing = [replaced("a", "a" * 64) for _ in range(6)]
    plain["normalizer"] = {"type": "Sequence", "normalizers": growing}
    message = refused(saved(tmp_path, plain), "a" * 1000)
    assert "its process ended" in message


def test_padding_without_end_is_given_up(tmp_path: Path, plain: dict[str, Any]) -> None:
    """512 GB were asked for."""
    plain["padding"] = {
        "strategy": {"Fixed": 1 << 36},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    message = refused(saved(tmp_path, plain), "a")
    assert "cannot be applied to this text" in message


@pytest.mark.parametrize("number", [1 << 24, (1 << 32) - 1])
def test_absurd_id_is_refused_before_a_model_has_a_row_for_it(
    tmp_path: Path, plain: dict[str, Any], number: int
) -> None:
    plain["model"]["vocab"]["b"] = number
    name = saved(tmp_path, plain)
    assert f"its largest id is {number}, and a model has 16777216 rows" in refused(name, "a")
    with quickly(), pytest.raises(ConfigError, match=f"its largest id is {number}"):
        vocabulary(name)


@pytest.mark.parametrize("number", [-1, 1 << 32, 1e300, None, "1", 10**400])
def test_id_of_another_type_is_refused(tmp_path: Path, plain: dict[str, Any], number: Any) -> None:
    plain["model"]["vocab"]["b"] = number
    assert "tokenizer.json that can be used" in refused(saved(tmp_path, plain), "a")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "[" * 100_000, '{"a": ' * 100_000, "\0", "{}", '{"version": "9"}'],
    ids=lambda text: ascii(text)[:12],
)
def test_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    assert "tokenizer.json that can be used" in refused(str(path), "a")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    assert "utf-8" in refused(str(tmp_path / "tokenizer.json"), "a")


def test_invalid_pattern_is_refused(tmp_path: Path, plain: dict[str, Any]) -> None:
    plain["pre_tokenizer"] = split_at("(")
    assert "tokenizer.json that can be used" in refused(saved(tmp_path, plain), "a")


def test_vocabulary_larger_than_any_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with quickly(), pytest.raises(DataError, match="more than 67108864 bytes"):
        FileTokenizer(str(path))


def test_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    for name in ("zero", "fifo"):
        with quickly(), pytest.raises(DataError, match="not a regular file"):
            FileTokenizer(str(tmp_path / name))
        with quickly(), pytest.raises(ConfigError, match="not a regular file"):
            vocabulary(str(tmp_path / name))


def test_text_of_the_file_cannot_control_the_terminal(
    tmp_path: Path, plain: dict[str, Any]
) -> None:
    evil = copy.deepcopy(plain)
    evil["model"]["unk_token"] = "\x1b[2J"
    assert "\x1b" not in refused(saved(tmp_path, evil), "zzz")


def test_text_that_a_tokenizer_fails_on_leaves_no_cache(
    tmp_path: Path, plain: dict[str, Any]
) -> None:
    plain["pre_tokenizer"] = split_at("(a|a|aa)+$")
    (tmp_path / "text.txt").write_text("a" * 60 + "b")
    tokenizer = open_tokenizer(saved(tmp_path, plain))
    with pytest.raises(DataError, match="cannot be applied to this text"):
        prepare([str(tmp_path / "text.txt")], tokenizer, tmp_path / "cache", 0.0)
    assert not (tmp_path / "cache").exists()
