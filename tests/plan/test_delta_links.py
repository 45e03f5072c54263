"""Which runs may send deltas, and what they keep."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpipe.config.load import Config, build
from dpipe.data.feed import feed_of
from dpipe.data.samples import Samples
from dpipe.errors import ConfigError
from dpipe.plan.deltas import check_deltas
from dpipe.plan.forecast import forecast
from dpipe.plan.recurring import DeltaLinks, RecurringFeed, RecurringSequences
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

FORWARD = {"forward": "int4+delta", "backward": "int8"}
ROWS = {"model": {"hf": "some/model"}, "data": {"files": ["rows.jsonl"], "format": "chat"}}
ACTIVATION = TensorSpec((2, 16, 8), torch.bfloat16)
POSITIONS = TensorSpec((2, 16), torch.int32)


def job(**overrides: Any) -> Config:
    stated = {"pipeline__stages": 3, "pipeline__wire": FORWARD, "data__packing": False}
    return build(ROWS).with_(**{**stated, **overrides})


def test_samples_in_sequences_of_their_own_may_come_again() -> None:
    check_deltas(job())
    check_deltas(job(data__packing=True, data__shuffle="none"))
    check_deltas(job(pipeline__stages=1, pipeline__wire="int4+delta", data__packing=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__packing": True}, "the same in each epoch: set data.packing = false"),
        ({"data__packing": True, "data__shuffle": 100}, 'or data.shuffle = "none"'),
        ({"data__streaming": True, "data__held_out": 0.0}, "data.streaming = false"),
        ({"pipeline__schedule": "2bw"}, 'another pipeline.schedule than "2bw"'),
        ({"pipeline__wire": "int4+delta"}, "to be of activations alone, such as {forward"),
        (
            {"pipeline__wire": "auto", "pipeline__wire_allowed": ("none", "int4+delta")},
            'pipeline.wire to name it: "auto" does not know',
        ),
    ],
)
def test_samples_that_would_not_be_known_again_are_refused(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_deltas(job(**overrides))


def test_windows_of_a_text_are_refused_before_the_run(tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="not windows of a text; or leave"):
        forecast(tiny(pipeline__stages=2, pipeline__wire=FORWARD))


@pytest.mark.parametrize(
    "kept", [{"packing": False}, {"packing": True, "shuffle": "none"}], ids=str
)
def test_sequence_has_one_number_in_all_epochs(kept: dict[str, Any]) -> None:
    """Ten samples of three tokens, of which eight are trained on; two fit a sequence."""
    tokens = np.arange(30, dtype=np.int32)
    ends = np.arange(3, 33, 3)
    samples = Samples(tokens, np.ones(30, bool), ends, 2, Any, **kept)
    sequences = RecurringSequences(samples, seed=7, context=4)
    count = 8 if not kept["packing"] else 4
    assert sequences.count == count
    numbers = [sequences.of(number) for number in range(3 * count)]
    assert numbers[:count] == list(range(count))
    assert sorted(numbers[count : 2 * count]) == list(range(count))
    read = [samples.training_row(7, number, 4)[0].tolist() for number in range(3 * count)]
    assert [read[number] for number in numbers] == read
    if not kept["packing"]:
        assert numbers[count : 2 * count] != numbers[:count]


def test_each_replica_has_the_numbers_of_its_own_rows() -> None:
    tokens = np.arange(24, dtype=np.int32)
    samples = Samples(tokens, np.ones(24, bool), np.arange(3, 27, 3), 0, Any, False)
    sequences = RecurringSequences(samples, seed=1, context=2)
    train = {"batch_size": 8, "num_microbatches": 2, "seed": 1}
    config = build({"model": {"context": 2}, "train": train})
    read = []
    for replica in range(2):
        feed = feed_of(config, samples, replica, 2)
        recurring = RecurringFeed(feed, sequences, 8, 2, replica, 2)
        batch = recurring.training(1)
        assert [len(rows) for rows in batch.samples] == [2, 2]
        for (inputs, _), numbers in zip(batch.inputs, batch.samples, strict=True):
            read += zip(inputs.tolist(), numbers, strict=True)
    assert len(read) == 8
    for row, number in read:
        assert row == samples.training_row(1, number, 2)[0].tolist()


def links(formats: tuple[str, ...], rank_of_stage: tuple[int, ...]) -> DeltaLinks:
    boundaries = [(ACTIVATION, POSITIONS)] * len(formats)
    both = HopFormats(formats, ("none",) * len(formats))
    return DeltaLinks(both, rank_of_stage, boundaries, num_rows=2, num_sequences=100)


def test_rank_keeps_what_crosses_its_links_with_deltas(tmp_path: Path) -> None:
    mixed = links(("int4+delta", "int4", "int3+delta"), (0, 1, 2, 3))
    kept = [sorted(mixed.caches(rank, tmp_path)) for rank in range(4)]
    assert kept == [[(0, 0)], [(0, 0)], [(2, 0)], [(2, 0)]]


def test_hop_inside_a_rank_needs_no_cache(tmp_path: Path) -> None:
    there_and_back = links(("int4+delta",) * 3, (0, 1, 1, 0))
    assert sorted(there_and_back.caches(0, tmp_path)) == [(0, 0), (2, 0)]


def test_more_than_the_disk_may_hold_is_refused_with_the_rank() -> None:
    """A hundred sequences of 256 bytes on either side of rank 1."""
    two = links(("int4+delta",) * 2, (0, 1, 2))
    two.check_room(100 * 256 * 2 / 1e9)
    with pytest.raises(ConfigError, match="of 100 sequences on rank 1 .*pipeline.delta_cache_gb"):
        two.check_room(100 * 256 * 1.9 / 1e9)
