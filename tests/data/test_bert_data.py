"""BERT's sequences, from a text in which every word has its position: w3_17 is word 3 of sentence
17.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from dpipe.data.bert_data import SentencePairs, SentenceTokenizer
from dpipe.data.corpus import Corpus, prepare
from dpipe.errors import DataError
from dpipe.stage.bert import IGNORED

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS, SENTENCES, DOCUMENT = (
    6,
    60,
    10,
)  # words per sentence, sentences in total, sentences per document
CONTEXT = 32


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sentence(number: int) -> str:
    return " ".join(f"w{word}s{number}" for word in range(WORDS))


def document(first: int) -> str:
    return "\n".join(sentence(number) for number in range(first, first + DOCUMENT))


TEXT = "\n\n".join(document(first) for first in range(0, SENTENCES, DOCUMENT)) + "\n"
VOCABULARY = [*MARKS, *(word for number in range(SENTENCES) for word in sentence(number).split())]


def save_tokenizer(path: str, marks: list[str] = MARKS) -> None:
    """A WordPiece tokenizer whose vocabulary has every word."""
    words = [word for word in VOCABULARY if word not in MARKS or word in marks]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([mark for mark in marks if mark in MARKS])
    tokenizer.save(path)


def pairs(text: str = TEXT, context: int = CONTEXT, held_out: float = 0.0) -> SentencePairs:
    Path("text.txt").write_text(text)
    save_tokenizer("words.json")
    tokenizer = SentenceTokenizer("words.json")
    return SentencePairs(
        prepare(["text.txt"], tokenizer, Path("cache"), held_out), tokenizer, context
    )


def sequences(number: int, **options: object) -> list[tuple[list[str], list[int], int, list[int]]]:
    """Words, types, length and targets of each sequence."""
    (tokens, types, lengths), targets = pairs(**options).training(0, 0, range(number))  # type: ignore[arg-type]
    words = [[VOCABULARY[i] for i in row] for row in tokens.tolist()]
    return list(zip(words, types.tolist(), lengths.tolist(), targets.tolist(), strict=True))


def restored(words: list[str], targets: list[int]) -> list[str]:
    """The words before masking."""
    return [
        word if target == IGNORED else VOCABULARY[target]
        for word, target in zip(words, targets, strict=True)
    ][1:]


def passages(words: list[str], length: int, targets: list[int]) -> tuple[list[str], list[str]]:
    """A and B as they were in the text."""
    whole = restored(words, targets)[: length - 1]
    seam = whole.index("[SEP]")
    return whole[:seam], whole[seam + 1 : -1]


def test_lines_are_sentences_and_blank_lines_end_documents() -> None:
    save_tokenizer("words.json")
    ids = SentenceTokenizer("words.json").encode("w0s1 w1s1\nw0s2\n\n\nw0s3\n")
    assert [VOCABULARY[i] for i in ids] == [
        "w0s1",
        "w1s1",
        "[SEP]",
        "w0s2",
        "[SEP]",
        "[SEP]",
        "w0s3",
        "[SEP]",
    ]


def test_special_token_in_a_text_is_plain_text() -> None:
    save_tokenizer("words.json")
    ids = SentenceTokenizer("words.json").encode("w0s1 [SEP] w1s1")
    assert [VOCABULARY[i] for i in ids].count("[SEP]") == 1  # the one at the end


def test_files_are_documents_of_their_own() -> None:
    save_tokenizer("words.json")
    for name in ("a", "b"):
        Path(f"{name}.txt").write_text(sentence(1))
    tokenizer = SentenceTokenizer("words.json")
    corpus = prepare(["a.txt", "b.txt"], tokenizer, Path("cache"), 0.0, between=b"\n\n")
    assert np.flatnonzero(corpus.tokens == tokenizer.separator).tolist() == [6, 7, 14]


def test_sequence_is_two_segments_between_special_tokens() -> None:
    for words, types, length, targets in sequences(50):
        whole = ["[CLS]", *restored(words, targets)]
        seam = whole.index("[SEP]")
        assert whole[0] == "[CLS]"
        assert [i for i, word in enumerate(whole[:length]) if word == "[SEP]"] == [seam, length - 1]
        assert set(whole[length:]) <= {"[PAD]"}
        assert types == [0] * (seam + 1) + [1] * (length - seam - 1) + [0] * (CONTEXT - length)


def test_most_sequences_are_full_and_some_are_short() -> None:
    lengths = [length for _, _, length, _ in sequences(300, text=TEXT.replace("\n\n", "\n"))]
    assert 0.02 < sum(length < CONTEXT for length in lengths) / 300 < 0.2
    assert min(lengths) >= 5


def test_second_segment_follows_the_first_if_the_target_says_so() -> None:
    """It follows A's last word, in the same document and at the start of a sentence."""
    joined = [word for line in TEXT.splitlines() for word in line.split()]
    for words, _, length, targets in sequences(200):
        a, b = passages(words, length, targets)
        follows = joined[joined.index(a[-1]) + 1 :][: len(b)] == b
        assert b[0].startswith("w0")
        if targets[0] == 0:
            assert follows
            assert joined.index(a[-1]) // (WORDS * DOCUMENT) == joined.index(b[-1]) // (
                WORDS * DOCUMENT
            )


def test_half_of_the_second_segments_are_random() -> None:
    elsewhere = sum(targets[0] for _, _, _, targets in sequences(400))
    assert 160 < elsewhere < 280  # half, and those at the end of their document


def test_tokens_are_masked_as_in_devlin_2018() -> None:
    masked = kept = other = among = 0
    for words, _, length, targets in sequences(400):
        chosen = [i for i, target in enumerate(targets) if target != IGNORED and i > 0]
        assert len(chosen) == max(1, round(0.15 * length))
        assert not {i for i in chosen if VOCABULARY[targets[i]] in MARKS}
        among += len(chosen)
        masked += sum(words[i] == "[MASK]" for i in chosen)
        kept += sum(words[i] == VOCABULARY[targets[i]] for i in chosen)
    other = among - masked - kept
    assert (masked / among, kept / among, other / among) == pytest.approx((0.8, 0.1, 0.1), abs=0.03)


def test_sequence_is_a_function_of_seed_step_and_number() -> None:
    made = pairs()
    (first, *_), targets = made.training(1, 7, range(4))
    (again, *_), _ = made.training(1, 7, range(2, 4))
    assert torch.equal(first[2:], again)
    for other in (
        made.training(2, 7, range(4)),
        made.training(1, 8, range(4)),
        made.training(1, 7, range(1, 5)),
    ):
        assert not torch.equal(other[0][0], first)
    assert torch.equal(made.training(1, 7, range(4))[1], targets)


def test_draws_never_change_between_versions() -> None:
    """A run that is resumed with another numpy reads on where it was."""
    (tokens, types, lengths), targets = pairs().training(0, 0, range(2))
    assert tokens[:, 1:4].tolist() == [[95, 96, 97], [239, 240, 241]]
    assert (lengths.tolist(), types.sum(1).tolist(), targets[:, 0].tolist()) == (
        [32, 32],
        [18, 24],
        [0, 1],
    )


def test_held_out_sequences_are_from_the_held_out_text_alone() -> None:
    made = pairs(held_out=0.5)
    cut = [VOCABULARY[i] for i in made.corpus.tokens[made.corpus.num_train_tokens :]]
    (tokens, _, _), targets = made.held_out(range(40))
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        words = restored([VOCABULARY[i] for i in row], target)
        known = {w for w, t in zip(words, target[1:], strict=True)}
        assert (
            len(known - set(cut) - set(MARKS)) <= 0.15 * CONTEXT
        )  # one masked word in ten is a random word
    assert torch.equal(made.held_out(range(5, 6))[0][0], tokens[5:6])


def test_sentence_longer_than_the_context_is_kept() -> None:
    made = pairs(text=" ".join(sentence(n) for n in range(SENTENCES)) + "\n", context=8)
    (tokens, _, lengths), _ = made.training(0, 0, range(20))
    assert int(lengths.min()) >= 5
    assert tokens.shape == (20, 8)


@pytest.mark.parametrize(
    "text",
    [
        "\n\n".join(sentence(n) for n in range(SENTENCES)),
        " ".join(sentence(n) for n in range(SENTENCES)),
    ],
    ids=["a blank line behind every sentence", "all in one line"],
)
def test_text_without_sentence_breaks_is_refused(text: str) -> None:
    with pytest.raises(
        DataError, match=r"only \d have a sentence that follows.*one sentence a line"
    ):
        pairs(text=text, context=16).check(need_held_out=False)


def test_text_with_sentences_is_accepted() -> None:
    pairs(held_out=0.5).check(need_held_out=True)


@pytest.mark.parametrize(
    ("context", "held_out", "message"),
    [
        (
            4,
            0.5,
            "model.context 4 has no room for two passages and 3 special tokens; raise it to 5",
        ),
        (200, 0.5, "training text has .* tokens, BERT with model.context 200 needs more than 800"),
        (32, 0.1, "held-out text has .* tokens, BERT with model.context 32 needs more than 128"),
    ],
)
def test_part_that_is_too_short_is_refused(context: int, held_out: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pairs(context=context, held_out=held_out).check(need_held_out=True)


def test_tokenizer_without_special_tokens_is_refused() -> None:
    save_tokenizer("bare.json", ["[UNK]", "[SEP]"])
    with pytest.raises(
        DataError, match=r"bare.json has no \[CLS\] \[MASK\], which BERT needs; give a WordPiece"
    ):
        SentenceTokenizer("bare.json")


def test_bytes_are_refused() -> None:
    with pytest.raises(DataError, match=r'"bytes" has no \[CLS\] \[SEP\] \[MASK\]'):
        SentenceTokenizer("bytes")


def test_cache_of_sentences_is_not_that_of_plain_text() -> None:
    made = pairs()
    assert isinstance(made.corpus, Corpus)
    assert made.tokenizer.fingerprint != Path("words.json").read_bytes()
