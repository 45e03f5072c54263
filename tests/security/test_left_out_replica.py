"""One replica poisons a step: with data_parallel.reject the others continue without it."""

import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dpipe.config.load import Config, build
from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.sharded import Sharded
from dpipe.errors import ConfigError, NumericError
from dpipe.report.display import Display
from dpipe.report.metrics import read_rows
from dpipe.stage.stage import Stage

Make = Callable[..., Config]
Run = Callable[..., list[BaseException | None]]

STEPS = 5
BAD_STEP = 2
ROUNDING = 2e-6


def rank_here() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))


class Poison:
    """Multiplies the gradients of some ranks in `BAD_STEP`, when replicas begin to exchange them,
    and keeps every rank's stages.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factors: dict[int, float] = {}
        self.stages: dict[tuple[int, int], Stage] = {}
        self._steps: dict[int, int] = {}
        begin_step = Stage.begin_step

        def begin(stage: Stage, step: int, loss_scale: float = 1.0) -> None:
            self._steps[rank_here()] = step
            self.stages[rank_here(), stage.index] = stage
            begin_step(stage, step, loss_scale)

        monkeypatch.setattr(Stage, "begin_step", begin)
        for kind in (AllReduce, Sharded):
            monkeypatch.setattr(kind, "start", self._poisoned(kind.start))

    def _poisoned(self, start: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        def poisoned(kind: Any, index: int) -> None:
            rank = rank_here()
            if self._steps[rank] == BAD_STEP and rank in self.factors:
                for _, parameter in self.stages[rank, index].named_parameters():
                    assert parameter.grad is not None
                    # a new one: the other end of a tied weight may still be reading this one
                    parameter.grad = parameter.grad * self.factors[rank]
            start(kind, index)

        return poisoned


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    return Poison(monkeypatch)


@pytest.fixture
def replicated(tiny: Make, tmp_path: Path) -> Make:
    def make(folder: str, replicas: int, **overrides: Any) -> Config:
        settings = {
            "data_parallel__kind": "all-reduce",
            "data_parallel__replicas": replicas,
            "data_parallel__reject": "nonfinite",
            "train__batch_size": 12,
            "train__num_microbatches": 12 // replicas,
            "train__steps": STEPS,
            "run__folder": str(tmp_path / folder),
        }
        return tiny(**settings | overrides)

    return make


def losses(config: Config) -> list[float]:
    return [row["loss"] for row in read_rows(Path(config.run.folder))]


def check_equal(poison: Poison, config: Config) -> None:
    """All replicas, and both ends of a tied weight, are equal to the last bit."""
    per_replica = config.world_size // config.data_parallel.replicas
    for (rank, index), stage in poison.stages.items():
        first = poison.stages[rank % per_replica, index]
        for (_, ours), (_, theirs) in zip(
            stage.named_parameters(), first.named_parameters(), strict=True
        ):
            assert ours.isfinite().all()
            assert torch.equal(ours, theirs)
    if config.model.tie_embeddings:
        last = config.model.num_layers + 1
        tied = ("layers.0.tokens.weight", f"layers.{last}.output.weight")
        named = [pair for stage in poison.stages.values() for pair in stage.named_parameters()]
        ends = [parameter for name, parameter in named if name in tied]
        assert len(ends) == 2 * config.data_parallel.replicas
        assert all(torch.equal(end, ends[0]) for end in ends)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("replicas", "overrides"),
    [
        (3, {"train__clip_norm": 1e9}),
        (3, {"data_parallel__kind": "sharded"}),
        (3, {"data_parallel__group": "torch"}),
        (2, {"pipeline__stages": 2, "model__tie_embeddings": True}),
        (
            2,
            {
                "pipeline__stages": 2,
                "model__tie_embeddings": True,
                "data_parallel__kind": "sharded",
            },
        ),
        (2, {"tensor_parallel__size": 2}),
        (2, {"train__precision": "bf16", "train__parameters": "bf16"}),
    ],
    ids=["all-reduce", "sharded", "torch", "tied", "tied-sharded", "tensor-parallel", "bf16"],
)
def test_poisoned_step_is_the_mean_of_the_rest(
    replicas: int, overrides: dict[str, Any], replicated: Make, run_ranks: Run, poison: Poison
) -> None:
    """The reference takes the same step: there the replica gives zeros and the others more, so that
    the mean over all is that of the rest.
    """
    config = replicated("poisoned", replicas, **overrides)
    bad_rank = config.world_size // replicas  # the first of replica 1
    poison.factors = {bad_rank: float("nan")}
    assert run_ranks(config) == [None] * config.world_size
    check_equal(poison, config)
    rows = read_rows(Path(config.run.folder))
    assert [row.get("left_out") for row in rows] == [None, None, [1], None, None]
    log = (Path(config.run.folder) / "logs/rank-0.log").read_text()
    assert f"step {BAD_STEP} left out replica 1, whose gradient or loss was not finite" in log

    per_replica = config.world_size // replicas
    of_rest = replicas / (replicas - 1)
    poison.factors = {
        rank: 0.0 if rank // per_replica == 1 else of_rest for rank in range(config.world_size)
    }
    poison.stages.clear()
    reference = replicated("reference", replicas, **overrides)
    assert run_ranks(reference) == [None] * config.world_size
    ours = losses(config)
    theirs = losses(reference)
    del ours[BAD_STEP], theirs[BAD_STEP]  # one is the mean of two replicas, the other of all
    rounding = 2e-3 if config.train.precision == "bf16" else ROUNDING
    assert ours == pytest.approx(theirs, rel=rounding)

    poison.factors = {}
    plain = replicated("plain", replicas, **overrides)
    assert run_ranks(plain) == [None] * config.world_size
    assert losses(plain)[: BAD_STEP + 1] != losses(config)[: BAD_STEP + 1]
    assert losses(plain)[:BAD_STEP] == losses(config)[:BAD_STEP]


def test_step_that_is_bad_on_all_replicas_ends_the_run(
    replicated: Make, run_ranks: Run, poison: Poison
) -> None:
    config = replicated("all", 2)
    poison.factors = {0: float("inf"), 1: float("nan")}
    errors = run_ranks(config)
    assert all(isinstance(error, NumericError) for error in errors)
    assert "is not finite; lower train.learning_rate" in str(errors[0])


def test_poisoned_step_ends_the_run_without_the_key(
    replicated: Make, run_ranks: Run, poison: Poison
) -> None:
    config = replicated("unset", 2, data_parallel__reject=None)
    poison.factors = {1: float("nan")}
    errors = run_ranks(config)
    assert all(isinstance(error, NumericError) and "rank 1" in str(error) for error in errors)


def test_step_is_shown_and_logged_though_no_row_is_due(
    replicated: Make, run_ranks: Run, poison: Poison
) -> None:
    config = replicated("rare", 2, run__log_every=100)
    poison.factors = {0: float("inf")}
    assert run_ranks(config) == [None, None]
    rows = read_rows(Path(config.run.folder))
    assert [(row["step"], row.get("left_out")) for row in rows] == [
        (0, None),
        (BAD_STEP, [0]),
        (STEPS - 1, None),
    ]
    shown = StringIO()
    with Display(Console(file=shown), 0, STEPS) as display:
        display.show(rows[1])
    assert "left out replica 0" in shown.getvalue()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"data_parallel": {"kind": "local-sgd"}},
            r'needs data_parallel\.kind "all-reduce" or "sharded", not \'local-sgd\'',
        ),
        (
            {"data_parallel": {"kind": "parameter-server"}},
            r'needs data_parallel\.kind "all-reduce" or "sharded"',
        ),
        ({"data_parallel": {"delay": True}}, r"needs data_parallel\.delay = false"),
        ({"data_parallel": {"wire": "int8"}}, r'needs data_parallel\.wire other than "int8"'),
        ({"train": {"clip_norm": 0.0}}, r"set train\.clip_norm above 0"),
        ({"train": {"precision": "fp16"}}, r'does not go with train\.precision = "fp16"'),
    ],
)
def test_configurations_without_support_for_reject_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    replicas = {"kind": "all-reduce", "replicas": 2, "reject": "nonfinite"}
    table = {**settings, "data_parallel": replicas | settings.get("data_parallel", {})}
    with pytest.raises(ConfigError, match=said):
        build(table)
