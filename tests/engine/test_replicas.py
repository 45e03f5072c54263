"""Replicas against one process on the same batch: whole runs, ranks as threads over real links."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpipe.config import Config
from dpipe.engine.blueprint import draft
from dpipe.engine.replicas import Seat

Make = Callable[..., Config]
Losses = Callable[..., list[float]]

ROUNDING = 2e-6  # relative, of a loss after a few steps in fp32


def replicated(replicas: int, **overrides: Any) -> dict[str, Any]:
    settings = {"data_parallel__kind": "all-reduce", "data_parallel__replicas": replicas, "train__batch_size": 12}
    return settings | {"train__num_microbatches": 12 // replicas} | overrides


@pytest.mark.parametrize(
    ("replicas", "overrides"),
    [
        (2, {"pipeline__stages": 2}),
        (3, {}),
        (2, {"pipeline__stages": 2, "model__tie_embeddings": True, "model__dropout": 0.1}),
    ],
)
def test_replicas_learn_as_one_process_does_on_their_batch(
    replicas: int, overrides: dict[str, Any], tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    alone = tiny(**replicated(1, **overrides | {"pipeline__stages": 1, "data_parallel__kind": "none"}))
    whole = losses(alone)
    assert losses(tiny(**replicated(replicas, **overrides, run__folder=str(tmp_path / "split")))) == pytest.approx(
        whole, rel=ROUNDING
    )


@pytest.mark.parametrize(
    ("tied", "peers"),
    [
        (False, [{1}, {0, 2}, {1, 3}, {2}]),
        (True, [{1, 3}, {0, 2}, {1, 3}, {0, 2}]),  # first and last exchange the gradient of what they share
    ],
)
def test_peers_are_the_neighbours(tiny: Make, tied: bool, peers: list[set[int]]) -> None:
    schedule = draft(tiny(pipeline__stages=4, model__tie_embeddings=tied)).forecast.schedule
    assert [Seat(rank, num_ranks=4).peers(schedule) for rank in range(4)] == peers


def test_peers_of_a_replica_are_the_neighbours_in_its_row_and_its_column(tiny: Make) -> None:
    """
    replica 0    0 1 2
    replica 1    3 4 5
    """
    schedule = draft(tiny(pipeline__stages=3)).forecast.schedule
    peers = [Seat(rank, num_ranks=3, num_replicas=2).peers(schedule) for rank in range(6)]
    assert peers == [{1, 3}, {0, 2, 4}, {1, 5}, {0, 4}, {1, 3, 5}, {2, 4}]
