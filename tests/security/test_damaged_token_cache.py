"""A flipped byte in the token cache does not change the training text: the cache is rebuilt."""

import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dpipe.data import corpus as module
from dpipe.data.corpus import Corpus, prepare
from dpipe.tokenizer.tokenizer import open_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 200


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)


def corpus() -> Corpus:
    return prepare(["text.txt"], open_tokenizer("bytes"), Path("cache"), 0.1)


def cached(name: str) -> Path:
    (path,) = Path("cache").glob(f"*/{name}")
    return path


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tokens.bin", "corpus.json"])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_flipped_byte_is_noticed_and_mended(
    name: str, part: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1000)
    whole = corpus()
    tokens = whole.tokens.copy()
    content = cached(name).read_bytes()
    flip(cached(name), round(part * (len(content) - 1)))
    with caplog.at_level(logging.WARNING, "dpipe"):
        again = corpus()
    assert np.array_equal(again.tokens, tokens)
    assert again.facts == whole.facts
    assert "is damaged" in caplog.text
    assert "it is made again" in caplog.text
    assert cached(name).read_bytes() == content
    assert len(list(Path("cache").iterdir())) == 1
    caplog.clear()
    corpus()
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("size", [0, 1, 17, 100_000])
def test_cache_of_another_length_is_made_anew(size: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = corpus().tokens.copy()  # a process that has a shrinking file mapped is killed
    os.truncate(cached("tokens.bin"), size)
    assert np.array_equal(corpus().tokens, expected)
    assert "it is made again" in caplog.text


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "1", '{"sha256": 1}', "\0"])
def test_description_that_is_none_is_made_anew(text: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = corpus()
    cached("corpus.json").write_text(text)
    assert corpus().facts == whole.facts
    assert "it is made again" in caplog.text


def test_half_of_a_cache_is_made_anew() -> None:
    whole = corpus()
    cached("tokens.bin").unlink()
    assert np.array_equal(corpus().tokens, whole.tokens)


def test_disk_that_gives_other_bytes_than_it_got_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = module._write
    monkeypatch.setattr(module, "_write", lambda path, content: write(path, content[:-2]))
    tokens = corpus().tokens
    assert bytes(tokens.astype(np.uint8)) == TEXT.encode()
    assert "cannot be read back" in caplog.text


def test_who_reads_a_cache_that_is_replaced_keeps_it() -> None:
    """Several processes may rebuild it at the same time."""
    whole = corpus()
    before = whole.tokens.copy()
    flip(cached("corpus.json"), 20)
    mended: list[Corpus] = []
    threads = [threading.Thread(target=lambda: mended.append(corpus())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(mended) == 4
    assert all(np.array_equal(one.tokens, before) for one in (*mended, whole))


def test_opening_stays_fast() -> None:
    """12 MB of text take some 15 ms; the bound is one that a busy machine keeps."""
    Path("text.txt").write_text("0123456789ab" * 1_000_000)
    tokenizer = open_tokenizer("bytes")
    corpus()
    (folder,) = Path("cache").iterdir()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        module._open(folder, tokenizer)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.25
