"""The glossary has the terms of the code."""

import re

import pytest
from pages import DOCS, blocks

from dpipe.timeline.span import Lane

WORDS = """
    action, bubble, coordinator, dp_rank, egress, hop, in flight, lane, link, master weights,
    membership, micro-batch, peer, pp_rank, profile, program, rank, replay, replica, run plan,
    schedule, span, stage, stage server, step time, tensor-parallel group, timeline, tp_rank, vote,
    wire format
"""


def entries() -> dict[str, str]:
    (block,) = blocks(DOCS / "glossary.md", "{glossary}")
    parts = [part.partition("\n") for part in block.text.strip().split("\n\n")]
    return {word: " ".join(text.split()) for word, _, text in parts}


@pytest.mark.parametrize("word", [word.strip() for word in WORDS.split(",")])
def test_word_is_explained(word: str) -> None:
    assert entries()[" ".join(word.split())].endswith(".")


def test_words_are_in_alphabetical_order() -> None:
    words = list(entries())
    assert words == sorted(words)


def test_lanes_are_those_of_a_timeline() -> None:
    listed = re.findall(r"\w+", entries()["lane"].partition(":")[2])
    assert listed == [lane.value for lane in Lane]
