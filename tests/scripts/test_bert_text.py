from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpipe.data.bert_data import SentencePairs, SentenceTokenizer
from dpipe.data.corpus import prepare

SPEECH = (
    "My fellow citizens, we met. Did you hear? It cost 3.5 dollars.\n\n"
    "The end is\tnear! (Not yet.)\nSo be it"
)


@pytest.fixture
def bert_text(script):
    return script("bert_text")


def run(bert_text, *words: object) -> Result:
    return CliRunner().invoke(bert_text.main, [*map(str, words)])


def test_sentences_end_where_a_capital_follows(bert_text):
    assert bert_text.sentences(SPEECH) == [
        "My fellow citizens, we met.",
        "Did you hear?",
        "It cost 3.5 dollars.",
        "The end is near!",
        "(Not yet.)",
        "So be it",
    ]


def test_output_is_readable_by_bert_data(bert_text, tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(SPEECH * 20)
    result = run(bert_text, tmp_path / "*.txt", "--folder", tmp_path / "out", "--vocab-size", 80)
    assert result.exit_code == 0, result.output
    assert "2 documents" in result.output
    tokenizer = SentenceTokenizer(str(tmp_path / "out/tokenizer.json"))
    corpus = prepare([str(tmp_path / "out/sentences.txt")], tokenizer, tmp_path / "cache", 0.0)
    SentencePairs(corpus, tokenizer, 32).check(need_held_out=False)


def test_files_that_are_not_there_are_named(bert_text, tmp_path: Path):
    result = run(bert_text, tmp_path / "no.txt", "--folder", tmp_path / "out")
    assert result.exit_code == 2
    assert "no.txt' matches no file" in result.output


def test_file_that_is_not_utf8_is_named_before_anything_is_written(bert_text, tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 one. Two.")
    result = run(bert_text, tmp_path / "latin.txt", "--folder", tmp_path / "out")
    assert result.exit_code == 2
    assert "latin.txt is not UTF-8 at byte 3; convert it" in result.output
    assert not (tmp_path / "out").exists()


def test_files_without_a_sentence_are_refused_before_anything_is_written(bert_text, tmp_path: Path):
    (tmp_path / "empty.txt").write_text(" \n")
    result = run(bert_text, tmp_path / "empty.txt", "--folder", tmp_path / "out")
    assert result.exit_code == 2
    assert "no sentence in" in result.output and "empty.txt" in result.output
    assert not (tmp_path / "out").exists()
