"""Rows become samples, and samples sequences, without transformers."""

import json

import numpy as np
import pytest
import torch

from dpipe.config.load import build
from dpipe.config.model import DataConfig
from dpipe.data.feed import feed_of
from dpipe.data.samples import IGNORED, check_samples, prepare_samples, sample_of
from dpipe.errors import DataError


class Letters:
    """A chat is `u:hello|a:hi|`, and each character a token."""

    name = "letters"
    vocab_size = 128
    fingerprint = b"letters"
    start = ()
    end = ord("|")
    has_template = True

    def encode(self, text):
        return list(text.encode())

    def encode_each(self, texts):
        return map(self.encode, texts)

    def decode(self, ids):
        return bytes(ids).decode()

    def chat(self, turns, *, asks=False):
        written = "".join(f"{turn['role'][0]}:{turn['content']}|" for turn in turns)
        return written + ("a:" if asks else "")


def chat(*turns):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": each} for n, each in enumerate(turns)]
    return {"messages": messages}


def learned(sample):
    ids, mask = sample
    return "".join(chr(token) if learns else "." for token, learns in zip(ids, mask, strict=True))


def samples_of(tmp_path, rows, *, context=16, name="rows.jsonl", **data):
    path = tmp_path / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"format": "chat", "held_out": 0.0, "cache": str(tmp_path / "cache")} | data
    return prepare_samples(DataConfig(files=(str(path),), **settings), Letters(), context)


def test_answers_of_a_chat_are_learned_and_questions_are_not():
    sample = sample_of(chat("hey", "yo", "bye", "ok"), "here", "chat", Letters())
    assert bytes(sample[0]).decode() == "u:hey|a:yo|u:bye|a:ok|"
    assert learned(sample) == "........yo|........ok|"


def test_turns_behind_the_last_answer_are_left_out():
    sample = sample_of(chat("hey", "yo", "bye"), "here", "chat", Letters())
    assert bytes(sample[0]).decode() == "u:hey|a:yo|"


def test_sharegpt_and_alpaca_are_read():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert learned(sample_of(row, "here", "chat", Letters())) == "......b|"
    row = {"instruction": "a", "input": "b", "output": "c"}
    sample = sample_of(row, "here", "instruction", Letters())
    assert bytes(sample[0]).decode() == "u:a\n\nb|a:c|"
    plain = Letters()
    plain.has_template = False
    sample = sample_of({"instruction": "a", "output": "c"}, "here", "instruction", plain)
    assert bytes(sample[0]).decode() == "### Instruction:\na\n\n### Response:\nc|"
    assert learned(sample).strip(".") == "c|"


def test_text_is_learned_whole_and_that_it_ends():
    sample = sample_of({"text": "once", "id": 7}, "here", "completion", Letters())
    assert learned(sample) == "once|"


def test_text_begins_as_the_model_has_learned_it():
    begins = Letters()
    begins.start = [ord("^")]
    begins.has_template = False
    sample = sample_of({"text": "once"}, "here", "completion", begins)
    assert bytes(sample[0]) == b"^once|"
    sample = sample_of({"instruction": "a", "output": "c"}, "here", "instruction", begins)
    assert bytes(sample[0]).startswith(b"^### Instruction:")


def test_tokens_are_taken_as_they_are():
    row = {"input_ids": [5, 6, 7], "labels": [IGNORED, IGNORED, 7]}
    assert sample_of(row, "here", "tokens", Letters()) == ([5, 6, 7], [False, False, True])


@pytest.mark.parametrize(
    ("row", "format", "what"),
    [
        ({"messages": "hello"}, "chat", "must have \"messages\""),
        ({}, "chat", "must have \"messages\""),
        (chat("hello"), "chat", "no turn of the assistant"),
        ({"instruction": "a"}, "instruction", "must have the texts"),
        ({"content": "once"}, "completion", "must have a \"text\""),
        ({"input_ids": [1, 999]}, "tokens", "numbers below 128"),
        ({"input_ids": [1, 2], "labels": [1]}, "tokens", "1 labels do not fit 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [IGNORED] * 2}, "tokens", "has nothing to learn"),
    ],
)  # fmt: skip
def test_broken_row_is_named(row, format, what):
    with pytest.raises(DataError, match=f"chats.jsonl, line 7.*{what}"):
        sample_of(row, "chats.jsonl, line 7", format, Letters())


def test_template_that_changes_earlier_turns_is_refused():
    class Forgetful(Letters):
        def chat(self, turns, *, asks=False):
            return f"{len(turns)}" + super().chat(turns, asks=asks)

    with pytest.raises(DataError, match="changes earlier turns"):
        sample_of(chat("a", "b"), "here", "chat", Forgetful())


def test_broken_file_is_named_by_line(tmp_path):
    path = tmp_path / "chats.jsonl"
    data = DataConfig(files=(str(path),), format="chat", cache=str(tmp_path / "cache"))
    good = json.dumps(chat("a", "b"))
    for line, what in (("{", "is not JSON"), ("[1]", "must be a JSON object")):
        path.write_text(f"{good}\n\n{line}\n")
        with pytest.raises(DataError, match=f"chats.jsonl, line 3 {what}"):
            prepare_samples(data, Letters(), 16)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("rows.json", "[{", "rows.json is not JSON"),
        ("rows.json", "{", "rows.json, line 1 is not JSON"),
        ("rows.json", "[3]", "rows.json, row 1 must be a JSON object"),
        ("rows.csv", "instruction,output\na,b\nc\n", "line 3 does not have the header's columns"),
        ("rows.csv", 'instruction,output\n"a,b\n', "rows.csv, line"),
        ("rows.parquet", "nothing", "rows.parquet cannot be read"),
        ("rows.txt", "a", "holds no rows by its name"),
    ],
)
def test_file_that_is_no_table_is_refused(name, content, what, tmp_path):
    if name.endswith("parquet"):
        pytest.importorskip("datasets")
    path = tmp_path / name
    path.write_text(content)
    data = DataConfig(files=(str(path),), format="instruction", cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=what):
        prepare_samples(data, Letters(), 16)


def test_tables_are_read_in_every_format(tmp_path):
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]
    paths = [tmp_path / name for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet")]
    paths[0].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paths[1].write_text(json.dumps(rows))
    paths[2].write_text("instruction,output\na,b\nc,d\n")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).to_parquet(paths[3])
    found = []
    for path in paths:
        data = DataConfig(
            files=(str(path),), format="instruction", cache=str(tmp_path / "cache"), held_out=0.0
        )
        found.append(prepare_samples(data, Letters(), 16).tokens.tolist())
    assert found == [found[0]] * 4


def test_sample_that_is_too_long_is_refused_truncated_or_split(tmp_path):
    rows = [chat("a", "0123456789")]  # u:a|a:0123456789|
    with pytest.raises(DataError, match=r"line 1 has 17 tokens.*takes 13.*\"truncate\""):
        samples_of(tmp_path, rows, context=12)
    cut = samples_of(tmp_path, rows, context=12, too_long="truncate")
    assert bytes(cut.tokens.tolist()).decode() == "u:a|a:0123456"
    split = samples_of(tmp_path, rows, context=12, too_long="split")
    texts = np.split(split.tokens, split.ends[:-1])
    # The last token of a part is the first of the next: it is learned once, as a target.
    assert [bytes(text.tolist()).decode() for text in texts] == ["u:a|a:0123456", "6789|"]


def test_samples_share_sequences_and_every_epoch_has_all_of_them(tmp_path):
    rows = [chat("a", "bc"), chat("d", "e"), chat("f", "ghij"), chat("k", "l")]
    samples = samples_of(tmp_path, rows, context=16)  # of 8, 7, 10 and 7 positions
    seen = []
    number = 0
    while len(seen) < 8:
        sequence = samples.sequence(3, number, 16)
        assert 1 <= len(sequence) <= 2
        seen += sequence.tolist()
        number += 1
    assert sorted(seen[:4]) == sorted(seen[4:]) == [0, 1, 2, 3]
    apart = samples_of(tmp_path, rows, context=16, packing=False)
    assert [len(apart.sequence(3, number, 16)) for number in range(8)] == [1] * 8


def test_row_of_two_samples_and_padding(tmp_path):
    samples = samples_of(tmp_path, [chat("a", "b"), chat("c", "d")], context=17)
    inputs, positions, targets = samples.rows(np.array([0, 1]), 17)
    assert bytes(inputs.tolist()).decode() == "u:a|a:bu:c|a:d\0\0\0"
    assert positions.tolist() == [*range(7), *range(7), 0, 0, 0]
    shown = "".join("." if token == IGNORED else chr(token) for token in targets)
    assert shown == ".....b|.....d|..."


def test_feed_is_cut_alike_for_replicas_and_resumes_at_the_sample(tmp_path):
    rows = [chat(f"{n}", "x" * (n % 5 + 1)) for n in range(20)]
    samples = samples_of(tmp_path, rows, held_out=0.2)
    assert samples.num_held_out == 4
    config = build(
        {
            "model": {"hf": "a/b", "context": 16},
            "data": {"format": "chat"},
            "train": {"batch_size": 4, "num_microbatches": 2},
            "data_parallel": {"replicas": 2, "kind": "all-reduce"},
        }
    )
    whole = feed_of(config, samples).training(5)
    again = feed_of(config, samples_of(tmp_path, rows, held_out=0.2)).training(5)
    assert all(map(torch.equal, whole.targets, again.targets))
    parts = [feed_of(config, samples, replica, 2).training(5) for replica in range(2)]
    tokens = torch.cat([inputs[0] for part in parts for inputs in part.inputs])
    assert torch.equal(tokens, torch.cat([inputs[0] for inputs in whole.inputs]))
    # The last column counts what the whole batch learns, in every part of it.
    counts = {int(row[-1]) for part in (whole, *parts) for each in part.targets for row in each}
    together = torch.cat(list(whole.targets))
    assert counts == {int((together[:, :-1] != IGNORED).sum())}
    held_out = feed_of(config, samples).held_out(3)
    assert held_out.inputs[0][0].shape == (2, 16)


def test_rows_of_files_of_their_own_are_held_out(tmp_path):
    kept = tmp_path / "kept.jsonl"
    kept.write_text("".join(f"{json.dumps(chat('q', 'KEPT'))}\n" for _ in range(3)))
    rows = [chat("q", "y") for _ in range(5)]
    samples = samples_of(tmp_path, rows, held_out=(str(kept),))
    assert samples.num_held_out == 3
    held_out = {int(sample) for n in range(3) for sample in samples.held_out_sequence(n, 16)}
    trained = {int(sample) for n in range(5) for sample in samples.sequence(0, n, 16)}
    assert held_out == {5, 6, 7} and trained == {0, 1, 2, 3, 4}
    inputs, _, _ = samples.rows(np.array([5]), 16)
    assert b"KEPT" in bytes(inputs.tolist())


def test_rows_that_are_trained_on_cannot_be_held_out(tmp_path):
    path = str(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="is in data.files and in data.held_out"):
        samples_of(tmp_path, [chat("a", "b")], held_out=(path,))


def test_too_few_rows_are_refused(tmp_path):
    one = samples_of(tmp_path, [chat("a", "b")], held_out=0.9)
    with pytest.raises(DataError, match="hold no rows to train on"):
        check_samples(one, need_held_out=False)
    one = samples_of(tmp_path, [chat("a", "b")])
    with pytest.raises(DataError, match="no rows are held out"):
        check_samples(one, need_held_out=True)
