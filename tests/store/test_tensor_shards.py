"""The checkpoint of a tensor-parallel group of two, and the part that each rank reads from it."""

import json
from pathlib import Path
from typing import Any

import torch

from dpipe.ranks import ParallelRanks
from dpipe.stage.stage import Stage
from dpipe.stage.tensor_parallel import Shard
from dpipe.store import checkpoint
from dpipe.store.checkpoint import Tensors
from dpipe.store.tensor_shards import as_slices, take_parts

NAME, NORM = "layers.1.mlp_out.weight", "layers.1.norm.weight"
WHOLE = torch.arange(12.0).view(3, 4)
SHARD = Shard((3, 4), dim=1, parts=1, size=2)


def ranks_of(rank: int) -> ParallelRanks:
    return ParallelRanks(rank, tp_size=2)


def stages() -> dict[int, Any]:
    """A stage of which only the split is used."""
    stage: Any = Stage.__new__(Stage)
    stage.split = type("Split", (), {"shards": {NAME: SHARD}})()
    return {0: stage}


def moments(rank: int, halves: bool) -> dict[str, torch.Tensor]:
    """The moments of one rank: whole, or in two ranges, as replicas with sharded optimizers have
    them.
    """
    mine = SHARD.take(WHOLE, rank)
    norm = {f"{NORM}.exp_avg": torch.ones(4)}
    if not halves:
        return {f"{NAME}.exp_avg": mine} | norm
    flat = mine.flatten()
    return {f"{NAME}.exp_avg[0:2]": flat[:2], f"{NAME}.exp_avg[2:6]": flat[2:]} | norm


def written(folder: Path, *, halves: bool) -> Tensors:
    """The moments of both ranks through a checkpoint."""
    parts = [as_slices(stages(), moments(rank, halves), ranks_of(rank)) for rank in (0, 1)]
    payloads: list[bytes] = []

    def remember(payload: bytes) -> list[bytes]:
        payloads.append(payload)
        return [payload]

    for rank, (slices, layouts) in enumerate(parts):
        checkpoint.save(str(folder / "first"), 1, rank, {}, slices, {}, remember, 1, layouts)
    for rank, (slices, layouts) in enumerate(parts):
        checkpoint.save(
            str(folder / "both"), 1, rank, {}, slices, {}, lambda _: payloads, 1, layouts
        )
    return checkpoint.load(str(folder / "both"), lambda name: True).optimizer


def test_moments_of_both_ranks_are_read_as_a_whole(tmp_path: Path) -> None:
    for halves in (False, True):
        read = written(tmp_path / str(halves), halves=halves)
        assert torch.equal(read[f"{NAME}.exp_avg"], WHOLE)
        assert set(read) == {f"{NAME}.exp_avg", f"{NORM}.exp_avg"}


def test_replicated_parameter_is_written_by_the_first_rank() -> None:
    names = [
        set(as_slices(stages(), moments(rank, halves=False), ranks_of(rank))[0]) for rank in (0, 1)
    ]
    assert names == [{f"{NAME}.exp_avg[0:6]", f"{NORM}.exp_avg"}, {f"{NAME}.exp_avg[6:12]"}]


def test_rank_reads_its_part_of_a_parameter_and_of_its_moments() -> None:
    read = Tensors("here")
    read |= {NAME: WHOLE.clone(), f"{NAME}.exp_avg_sq": WHOLE.flatten(), NORM: torch.ones(4)}
    take_parts(read, stages(), ranks_of(1))
    assert torch.equal(read[NAME], WHOLE[:, 2:])
    assert torch.equal(read[f"{NAME}.exp_avg_sq"], WHOLE[:, 2:])
    assert torch.equal(read[NORM], torch.ones(4))


def test_layout_survives_the_index(tmp_path: Path) -> None:
    written(tmp_path, halves=False)
    index = json.loads((tmp_path / "both/step-00000001/index.json").read_text())
    assert index["layouts"] == {
        f"{NAME}.exp_avg": {"shape": [3, 4], "dim": 1, "parts": 1, "size": 2}
    }
