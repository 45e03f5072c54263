"""Tensor-parallel stages compared with one process on the same batch: whole runs, ranks as threads
over real links.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError, PeerLost, RunAborted
from dpipe.plan.run_plan import boundaries
from dpipe.ranks import ParallelRanks
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_trace
from dpipe.run import tensor_groups as tensor
from dpipe.run.tensor_groups import refuse_apart
from dpipe.timeline.span import Lane
from dpipe.wire.spec import TensorSpec

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
Run = Callable[..., list[BaseException | None]]

ROUNDING = 1e-5  # relative: fp32 sums in another order
TWO_STAGES_A_RANK = {
    "pipeline__stages": 2,
    "pipeline__stages_per_rank": 2,
    "pipeline__schedule": "interleaved",
}


@pytest.fixture
def split(tiny: Make, tmp_path: Path) -> Make:
    """`split(2, pipeline__stages=2)`: four heads, stages on so many ranks each."""

    def make(size: int, folder: str = "split", **overrides: Any) -> Config:
        settings = {
            "model__num_heads": 4,
            "tensor_parallel__size": size,
            "run__folder": str(tmp_path / folder),
        }
        return tiny(**settings | overrides)

    return make


def column(config: Config, key: str) -> list[float]:
    return [row[key] for row in read_rows(Path(config.run.folder)) if key in row]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (
            2,
            {
                "pipeline__stages": 2,
                "model__tie_embeddings": True,
                "pipeline__schedule": "zero-bubble",
            },
        ),
        (
            4,
            {
                "tensor_parallel__sequence_parallel": True,
                "pipeline__recompute": "full",
                "train__clip_norm": 0.1,
            },
        ),
        (
            2,
            {
                "pipeline__stages": 2,
                "tensor_parallel__scatter_gather": False,
                "pipeline__recompute": "selective",
            },
        ),
        (
            2,
            {
                "tensor_parallel__sequence_parallel": True,
                "train__clip_norm": 0.1,
                **TWO_STAGES_A_RANK,
            },
        ),
    ],
)
def test_tensor_parallel_stages_have_the_losses_of_one_process(
    size: int, overrides: dict[str, Any], split: Make, losses: Losses
) -> None:
    dropout = (
        0.0 if overrides.get("pipeline__recompute") == "selective" else 0.1
    )  # torch's checkpoint seeds a process
    one = {"pipeline__stages": 1, "pipeline__stages_per_rank": 1, "pipeline__schedule": "1f1b"}
    one |= {"tensor_parallel__sequence_parallel": False}
    always = {"train__eval_every": 2, "model__dropout": dropout}
    alone = split(1, "alone", **overrides | one | always)
    shared = split(size, **overrides | always)
    assert losses(shared) == pytest.approx(losses(alone), rel=ROUNDING)
    for key in ("held_out_loss", "grad_norm"):
        assert column(shared, key) == pytest.approx(column(alone, key), rel=ROUNDING)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("sharded", 2, 1, 2, True), ("none", 1, 2, 1, False)),
        (("none", 1, 2, 1, False), ("all-reduce", 2, 1, 2, False)),
        (("parameter-server", 2, 1, 2, False), ("parameter-server", 2, 2, 1, False)),
    ],
)
def test_run_resumes_with_another_tensor_parallel_size(
    before: tuple[str, int, int, int, bool],
    after: tuple[str, int, int, int, bool],
    split: Make,
    losses: Losses,
) -> None:
    """(kind, replicas, stages, ranks a stage, sequence), against a run of one process
    throughout.
    """

    always = {"train__decay": "none", "model__dropout": 0.1}

    def arranged(arrangement: tuple[str, int, int, int, bool], num_steps: int) -> Config:
        kind, replicas, stages, size, sequence = arrangement
        settings = {
            "data_parallel__kind": kind,
            "data_parallel__replicas": replicas,
            "train__steps": num_steps,
        }
        settings |= {
            "train__num_microbatches": 8 // replicas,
            "tensor_parallel__sequence_parallel": sequence,
        }
        settings |= {"data_parallel__servers": "per-stage"} if kind == "parameter-server" else {}
        return split(size, pipeline__stages=stages, **settings, **always)

    whole = losses(
        split(
            1,
            "whole",
            train__steps=4,
            train__decay="none",
            model__dropout=0.1,
            train__num_microbatches=8,
        )
    )
    losses(arranged(before, 2))
    assert losses(arranged(after, 4), resume=True) == pytest.approx(whole, rel=ROUNDING)


def test_trace_has_the_groups_exchanges_and_a_prediction_for_its_first_rank(
    split: Make, losses: Losses
) -> None:
    config = split(2, train__steps=1, train__num_microbatches=1, run__trace_steps=1)
    losses(config)
    trace = load_trace(Path(config.run.folder))
    ((_, _, measured),) = trace.steps
    exchanged = [span for span in measured.spans if span.lane is Lane.TENSOR]
    assert {(span.rank, str(span.action)) for span in exchanged} == {
        (r, a) for r in (0, 1) for a in ("0F0", "0B0")
    }
    unit = (
        8 * 16 * 16 * 4
    )  # of a micro-batch; an all-reduce between two ranks sends as much from each
    sizes = [span.num_bytes for span in exchanged if span.rank == 0 and str(span.action) == "0F0"]
    assert sizes.count(unit) == 1 + 2 * 2  # the embedding's, and two of each block
    assert (trace.predicted.num_ranks, {span.rank for span in trace.predicted.spans}) == (2, {0})
    # One rank of the schedule, which computes with a thread for each of the two.
    (host,) = trace.inputs.hosts
    assert (host.ranks, host.threads) == ((0,), 2)
    assert host.cores == len(os.sched_getaffinity(0))


def test_stage_on_two_machines_is_refused_on_every_rank(
    split: Make, run_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor, "machine", lambda: threading.current_thread().name)
    errors = run_ranks(split(2))
    assert all(isinstance(error, ConfigError) for error in errors)
    assert "tensor_parallel.size 2 puts ranks 0 to 1 on one machine" in str(errors[0])


def test_tensor_parallel_ranks_on_different_machines_are_named() -> None:
    ranks = [{"machine": place, "name": f"node-{place}"} for place in "aaab"]
    with pytest.raises(
        ConfigError,
        match="ranks 2 to 3 on one machine, but rank 2 is on node-a and rank 3.*on node-b",
    ):
        refuse_apart(ranks, 2)


def test_tensor_parallel_ranks_lose_one_that_fails(
    split: Make, run_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tensor.TensorGroup.all_reduce
    calls: dict[int, int] = {}

    def all_reduce(group: Any, *args: Any) -> Any:
        calls[group.rank] = calls.get(group.rank, 0) + 1
        if group.rank == 1 and calls[1] == 5:
            raise SystemError("rank 1 is out of order")
        return real(group, *args)

    monkeypatch.setattr(tensor.TensorGroup, "all_reduce", all_reduce)
    errors = run_ranks(split(2))
    assert isinstance(errors[0], PeerLost | RunAborted)
    assert "rank 1 failed: SystemError: rank 1 is out of order" in str(errors[0])


@pytest.mark.parametrize(
    ("rank", "place", "tensor_ranks", "row", "column_"),
    [
        (0, 0, [0, 1], [0, 2], [0, 4]),
        (3, 1, [2, 3], [1, 3], [3, 7]),
        (6, 1, [6, 7], [4, 6], [2, 6]),
    ],
)
def test_tensor_parallel_ranks_are_numbered_first(
    rank: int, place: int, tensor_ranks: list[int], row: list[int], column_: list[int]
) -> None:
    """
    replica 0    stage 0: ranks 0 1    stage 1: ranks 2 3
    replica 1    stage 0: ranks 4 5    stage 1: ranks 6 7
    """
    here = ParallelRanks(rank, pp_size=2, dp_size=2, tp_size=2)
    assert (here.pp_rank, list(here.tp_group), list(here.pp_group), list(here.dp_group)) == (
        place,
        tensor_ranks,
        row,
        column_,
    )


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (4, 16, 8)),
        ({"scatter_gather": False}, (4, 16, 16)),
        ({"sequence_parallel": True}, (4, 8, 16)),
    ],
)
def test_rank_sends_its_part_between_stages(
    options: dict[str, bool], shape: tuple[int, ...]
) -> None:
    config = build({"tensor_parallel": {"size": 2, **options}})
    lengths = TensorSpec((4,), torch.int32)
    whole = (TensorSpec((4, 16, 16), torch.float32), lengths)
    assert boundaries(config, [whole]) == ((TensorSpec(shape, torch.float32), lengths),)
