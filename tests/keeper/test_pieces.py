"""Pieces of a state: how they are numbered, named, and put together again."""

import pytest
import torch

from dpipe.errors import CheckpointError
from dpipe.keeper.copies import PieceCopy, check, pack, unpack
from dpipe.keeper.pieces import WHOLE_LAYERS, Pieces
from dpipe.ranks import ParallelRanks

HALVES = Pieces(2)


def test_piece_is_named_by_its_layer() -> None:
    assert HALVES.of([1, 2], part=1) == [3, 5]
    assert [HALVES.layer_of(piece) for piece in (3, 5)] == [1, 2]
    assert HALVES.name(5) == "part 1 of layer 2"
    assert WHOLE_LAYERS.name(5) == "layer 5"


def test_replicas_that_differ_keep_their_parts_and_need_all() -> None:
    """Two stages of two replicas of tensor-parallel groups of two."""
    pieces = Pieces(4)
    kept = []
    for rank in range(8):
        here = ParallelRanks(rank, pp_size=2, dp_size=2, tp_size=2)
        layers = [[0, 1], [2]][here.pp_rank]
        kept += pieces.kept_by(here, layers)
        needed = pieces.needed_by(here, layers)
        assert {piece % 4 % 2 for piece in needed} == {here.tp_rank}
        assert {pieces.layer_of(piece) for piece in needed} == set(layers)
        assert len(needed) == 2 * len(layers)
    assert sorted(kept) == list(range(12)), "each is kept once"


def test_replicas_that_are_alike_keep_the_same() -> None:
    here = [ParallelRanks(rank, pp_size=1, dp_size=2) for rank in range(2)]
    assert [WHOLE_LAYERS.kept_by(each, [3]) for each in here] == [[3], [3]]
    assert [WHOLE_LAYERS.needed_by(each, [3]) for each in here] == [[3], [3]]


def halves(moments: list[str]) -> list[PieceCopy]:
    """Of layer 1, with the values of its moment that each name says."""
    whole = torch.arange(6.0)
    copies = []
    for part, name in enumerate(moments):
        start, stop = map(int, name.split(":"))
        optimizer = {f"layers.1.w.exp_avg[{name}]": whole[start:stop]}
        buffer = {"layers.1.mean": torch.full((2,), float(part))}
        copies += pack(4, buffer, optimizer, {"num_updates": 4}, [1], part, HALVES)
    return copies


def test_moments_of_several_replicas_are_put_together() -> None:
    copies = halves(["0:4", "4:6"])
    assert [copy.piece for copy in copies] == [2, 3]
    loaded = unpack(copies, HALVES)
    assert torch.equal(loaded.optimizer["layers.1.w.exp_avg"], torch.arange(6.0))
    assert torch.equal(loaded.tensors["layers.1.mean"], torch.ones(2)), "that of the last one"


def test_moments_of_which_a_part_is_missing_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the copy in memory holds .*not all of it"):
        unpack(halves(["0:3", "4:6"]), HALVES)


def test_piece_of_another_layer_is_refused_by_its_name() -> None:
    first, second = halves(["0:4", "4:6"])
    check(first, HALVES)
    with pytest.raises(CheckpointError, match="the copy of part 1 of layer 2 holds"):
        check(PieceCopy(4, 5, second.content), HALVES)
