import json
import math
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dpipe.data import corpus as data
from dpipe.data.corpus import Corpus, find_files, prepare
from dpipe.errors import DataError
from dpipe.tokenizer.tokenizer import open_tokenizer, vocabulary

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str | bytes = TEXT) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def corpus(
    *files: str, tokenizer: str = "bytes", held_out: float | tuple[str, ...] = 0.1
) -> Corpus:
    return prepare(files or ("text.txt",), open_tokenizer(tokenizer), Path("cache"), held_out)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet", "data-00000.arrow"])
def test_rows_are_not_learned_as_a_text(name):
    write(name, '{"text": "once"}\n')
    with pytest.raises(DataError, match=rf'{name} holds rows.*set data.format = "completion"'):
        corpus(name)
    write("text.txt")
    with pytest.raises(DataError, match=rf"{name} holds rows"):
        corpus("text.txt", held_out=(name,))


def train_tokenizer(path: str, vocab_size: int = 300) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(path)


def test_batch_is_windows_of_the_text_with_shifted_targets() -> None:
    write("text.txt")
    text = corpus()
    inputs, targets = text.batch(seed=0, step=3, replica=0, batch_size=4, context=16)
    assert inputs.dtype is targets.dtype is torch.int64
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, after in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert text.decode(row) + text.decode(after[-1:]) in TEXT


def test_batch_is_a_function_of_seed_step_and_replica() -> None:
    write("text.txt")
    first, again = corpus(), corpus()
    key = {"seed": 1, "step": 7, "replica": 2}
    inputs, _ = first.batch(**key, batch_size=8, context=4)
    first.batch(**key | {"step": 8}, batch_size=8, context=4)
    assert torch.equal(again.batch(**key, batch_size=8, context=4)[0], inputs)
    for name in key:
        other, _ = again.batch(**key | {name: 5}, batch_size=8, context=4)
        assert not torch.equal(other, inputs), name


def test_order_of_the_text_never_changes_between_versions() -> None:
    """A run that is resumed with another numpy reads on where it was."""
    write("text.txt", bytes(range(128)) * 100)
    inputs, _ = corpus(held_out=0.0).batch(seed=0, step=0, replica=0, batch_size=6, context=1)
    assert inputs[:, 0].tolist() == [50, 104, 124, 47, 49, 2]


def test_batches_cover_the_training_text_and_no_held_out_text() -> None:
    write("text.txt", "a" * 90 + "b" * 10)
    text = corpus()
    inputs, targets = text.batch(seed=0, step=0, replica=0, batch_size=500, context=4)
    assert set(text.decode(targets.flatten().tolist())) == {"a"}
    write("ends.txt", "^" + "a" * 88 + "$" + "b" * 10)
    inputs, targets = corpus("ends.txt").batch(
        seed=0, step=0, replica=0, batch_size=2000, context=4
    )
    assert set(text.decode([*inputs[:, 0].tolist(), *targets[:, -1].tolist()])) == set("^a$")


def test_held_out_batches_spread_over_the_held_out_text_alone() -> None:
    write("text.txt", "a" * 900 + "".join(chr(ord("b") + i // 10) for i in range(100)))
    text = corpus()
    starts = [text.decode(text.held_out_batch(index, 5, 4)[0][:, 0].tolist()) for index in range(4)]
    assert "a" not in "".join(starts)
    assert len(set("".join(starts))) >= 9, "20 windows should start in nearly all of the ten parts"
    assert starts[1] == text.decode(text.held_out_batch(1, 5, 4)[0][:, 0].tolist())


def test_files_are_taken_in_sorted_order_and_once() -> None:
    for name in ("b/2.txt", "b/10.txt", "a.txt", "c.md"):
        write(name, f"<{name}>")
    found = find_files(["*.txt", "b/*.txt", "**/2.txt"])
    assert [str(path) for path in found] == ["a.txt", "b/10.txt", "b/2.txt"]
    text = corpus("b/*.txt", "a.txt", held_out=0.0)
    assert text.decode(text.tokens.tolist()) == "<a.txt>\n<b/10.txt>\n<b/2.txt>"


def test_package_files_are_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write("site/speeches/__init__.py", "raise ImportError('a dependency is missing')")
    write("site/speeches/data/one.txt")
    monkeypatch.syspath_prepend("site")
    assert [path.name for path in find_files(["package:speeches/data/*.txt"])] == ["one.txt"]
    assert "speeches" not in sys.modules


def test_bytes_survive_tokenization() -> None:
    write("text.txt", "naïve ∑ \n" * 30)
    text = corpus(held_out=0.5)
    assert text.vocab_size == 256
    assert text.decode(text.tokens.tolist()) == "naïve ∑ \n" * 30
    assert text.decode(text.encode("∑x")) == "∑x"
    assert text.bytes_per_token("train") == text.bytes_per_token("held_out") == 1.0


def test_tokenizer_file_makes_fewer_tokens_of_the_same_text() -> None:
    write("text.txt")
    train_tokenizer("tokenizer.json")
    text = corpus(tokenizer="tokenizer.json")
    assert text.vocab_size == Tokenizer.from_file("tokenizer.json").get_vocab_size()
    assert text.decode(text.tokens.tolist()) == TEXT
    assert text.bytes_per_token("train") == pytest.approx(
        0.9 * len(TEXT) / text.num_train_tokens, rel=0.01
    )
    assert text.bytes_per_token("train") > 2


def test_long_text_is_tokenised_in_pieces_that_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "_PIECE", 10)
    lines = "one\ntwo three\nand a line that is longer than a piece\n\nend"
    write("text.txt", lines)
    text = corpus(held_out=0.2)
    assert text.decode(text.tokens.tolist()) == lines


def test_vocabulary_is_as_large_as_its_largest_number() -> None:
    """Token numbers may have gaps, and the model needs a row for each number."""
    write("text.txt", "a b " * 50)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 500}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save("gaps.json")
    assert corpus(tokenizer="gaps.json").vocab_size == vocabulary("gaps.json") == 501


def test_wide_vocabulary_takes_wide_tokens() -> None:
    write("text.txt", "zz " * 50)
    wide = {f"w{i}": i for i in range(70_000)} | {"zz": 70_000}
    tokenizer = Tokenizer(models.WordLevel(wide, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save("wide.json")
    text = corpus(tokenizer="wide.json")
    assert set(text.tokens.tolist()) == {70_000}


@pytest.mark.parametrize(
    ("text", "bits"),
    [("ab" * 1000, 0.0), ("abac" * 500, 0.5), ("aabb" * 1000, 1.0)],
)
def test_bigram_entropy_is_conditional_on_the_previous_byte(text: str, bits: float) -> None:
    """In the second text `a` is followed by b or c, and each of those by `a`: one bit half of the
    time.
    """
    write("text.txt", text)
    assert math.isclose(corpus().bigram_entropy(), bits, abs_tol=2e-3)


def test_second_time_the_tokens_come_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    write("text.txt")
    first = corpus()
    monkeypatch.setattr(data, "_tokenise", pytest.fail)
    again = corpus()
    assert again.facts == first.facts
    assert np.array_equal(again.tokens, first.tokens)


@pytest.mark.parametrize("change", ["text", "held_out", "tokenizer"])
def test_cache_is_not_used_for_anything_else(change: str) -> None:
    write("text.txt")
    train_tokenizer("tokenizer.json")
    corpus()
    if change == "text":
        write("text.txt", TEXT + "!")
    corpus(
        held_out=0.2 if change == "held_out" else 0.1,
        tokenizer="tokenizer.json" if change == "tokenizer" else "bytes",
    )
    assert len(list(Path("cache").iterdir())) == 2


def test_processes_may_fill_the_cache_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write("text.txt")
    meet = threading.Barrier(4, timeout=30)
    rename = os.rename
    monkeypatch.setattr(data.os, "rename", lambda a, b: (meet.wait(), rename(a, b)))
    made: list[Corpus] = []
    threads = [threading.Thread(target=lambda: made.append(corpus())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(made) == 4
    assert len(list(Path("cache").iterdir())) == 1


def test_crash_while_writing_leaves_no_half_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    write("text.txt")
    with monkeypatch.context() as faulty:
        faulty.setattr(data.os, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            corpus()
    assert list(Path("cache").iterdir()) == []
    assert corpus().num_train_tokens > 0


def crash(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("blocked", ["cache", "rename"])
def test_cache_that_cannot_be_written_is_named(
    blocked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("text.txt")
    if blocked == "cache":
        write("cache", "a file where the folder should be")
    else:
        monkeypatch.setattr(data.os, "rename", refuse)
    with pytest.raises(DataError, match=r"token cache .* cannot be written: .*set data.cache"):
        corpus()


def refuse(*args: object) -> None:
    raise PermissionError("not yours")


def test_nothing_is_written_where_the_corpus_is_not_accepted() -> None:
    write("text.txt", "short")

    def accept(found: Corpus) -> None:
        found.check_length(100, need_held_out=False)

    with pytest.raises(DataError, match="training text has"):
        prepare(["text.txt"], open_tokenizer("bytes"), Path("cache"), 0.1, accept)
    assert not Path("cache").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "data.files is empty"),
        (("no/*.txt",), r"'no/\*.txt' matches no file in /"),
        (
            ("package:no_such_speeches/*.txt",),
            "no package 'no_such_speeches' is installed; try pip install no_such",
        ),
        (("package:../etc/*",), "no package '..' is installed"),
        (("package:json/*.txt",), r"'package:json/\*.txt' matches no file in .*json"),
    ],
)
def test_pattern_that_finds_nothing_is_named(files: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_files(files)


def test_empty_text_is_refused() -> None:
    write("text.txt", "")
    with pytest.raises(DataError, match="1 files hold no text"):
        corpus()


def test_text_that_is_not_utf8_is_refused_with_file_and_offset() -> None:
    write("a.txt", "fine")
    write("b.txt", "Zür".encode() + "ich è".encode("latin-1"))
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8 at byte 8"):
        corpus("*.txt")
    assert not Path("cache").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{}", "is not a Hugging Face tokenizer.json"),
        (b"\xff\xfe garbage", "is not a Hugging Face tokenizer.json"),
    ],
)
def test_tokenizer_that_cannot_be_read_is_named(content: bytes | None, message: str) -> None:
    write("text.txt")
    if content is not None:
        write("tokenizer.json", content)
    with pytest.raises(DataError, match=f"data.tokenizer tokenizer.json {message}"):
        corpus(tokenizer="tokenizer.json")


def test_tokenizer_that_makes_no_tokens_is_refused() -> None:
    write("text.txt")
    Path("empty.json").write_text(json.dumps(json.loads(Tokenizer(models.BPE()).to_str())))
    with pytest.raises(DataError, match=r"empty.json makes no token"):
        corpus(tokenizer="empty.json")


def test_text_shorter_than_the_context_is_refused() -> None:
    write("text.txt", "x" * 100)
    text = corpus()
    text.check_length(89, need_held_out=False)
    with pytest.raises(DataError, match=r"training text has 90 tokens, model.context 90 needs 91"):
        text.check_length(90, need_held_out=False)
    text.check_length(9, need_held_out=True)
    with pytest.raises(
        DataError,
        match=r"held-out text has 10 tokens, model.context 10 needs 11; raise data.held_out",
    ):
        text.check_length(10, need_held_out=True)


def test_files_of_their_own_are_held_out() -> None:
    write("text.txt", "abcdef")
    write("kept.txt", "UVWXYZ")
    text = corpus(held_out=("kept.txt",))
    inputs, _ = text.held_out_batch(0, 3, 4)
    assert "".join(map(text.decode, inputs.tolist())).isupper()
    inputs, _ = text.batch(0, 0, 0, 8, 4)
    assert "".join(map(text.decode, inputs.tolist())).islower()
    assert text.num_train_tokens == text.num_held_out_tokens == 6
    write("kept.txt", "TUVWXYZ")  # what was cached is of other files
    assert corpus(held_out=("kept.txt",)).num_held_out_tokens == 7


def test_file_that_is_trained_on_cannot_be_held_out() -> None:
    write("text.txt")
    with pytest.raises(DataError, match=r"text.txt is in data.files and in data.held_out"):
        corpus(held_out=("./*.txt",))
    with pytest.raises(DataError, match=r"data.held_out 'none.txt' matches no file"):
        corpus(held_out=("none.txt",))


def test_nothing_held_out_has_no_bytes_a_token() -> None:
    write("text.txt")
    assert corpus(held_out=0.0).bytes_per_token("held_out") == 0.0
