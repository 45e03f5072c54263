"""Replicas compared with one process on the same batch: whole runs, ranks as threads over real
links.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpipe.config.load import Config
from dpipe.errors import NumericError
from dpipe.plan.run_plan import draft
from dpipe.ranks import ParallelRanks
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_steps, load_trace
from dpipe.schedule.links import neighbours
from dpipe.store import checkpoint
from dpipe.timeline.span import Lane

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
Run = Callable[..., list[BaseException | None]]

# relative: how far fp32 sums in another order move a loss within a few steps of the tiny model
ROUNDING = 2e-6
BATCH = 12  # sequences, divisible by 2, 3 and 4 replicas


@pytest.fixture
def split(tiny: Make, tmp_path: Path) -> Make:
    """`split(3, kind="sharded")`: the batch over so many replicas; over one with as many
    micro-batches.
    """

    def make(
        replicas: int, kind: str = "all-reduce", folder: str = "split", **overrides: Any
    ) -> Config:
        settings = {
            "data_parallel__kind": kind,
            "data_parallel__replicas": replicas,
            "train__batch_size": BATCH,
        }
        settings |= {
            "train__num_microbatches": BATCH // replicas,
            "run__folder": str(tmp_path / folder),
        }
        return tiny(**settings | overrides)

    return make


def parameters(config: Config) -> dict[str, torch.Tensor]:
    """The parameters in the newest checkpoint."""
    return checkpoint.load(str(Path(config.run.folder) / "checkpoints"), lambda name: True).tensors


def held_out(config: Config) -> list[float]:
    return [
        row["held_out_loss"] for row in read_rows(Path(config.run.folder)) if "held_out_loss" in row
    ]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("replicas", "overrides"),
    [
        (2, {"pipeline__stages": 2, "train__clip_norm": 0.1}),
        (3, {"kind": "sharded", "train__clip_norm": 0.1}),
        (4, {"train__clip_norm": 0.0, "data_parallel__group": "torch"}),
        (
            2,
            {
                "pipeline__stages": 2,
                "pipeline__schedule": "zero-bubble",
                "transport__connections": 2,
            },
        ),
        (
            2,
            {
                "pipeline__stages": 4,
                "pipeline__stages_per_rank": 2,
                "pipeline__schedule": "interleaved",
            },
        ),
        (2, {"pipeline__stages": 2, "model__tie_embeddings": True, "model__dropout": 0.1}),
        (3, {"model__tie_embeddings": True, "kind": "sharded", "transport__kind": "tcp"}),
        (
            2,
            {
                "pipeline__stages": 2,
                "kind": "sharded",
                "pipeline__schedule": "gpipe",
                "train__clip_norm": 0.0,
            },
        ),
    ],
)
def test_replicas_have_the_losses_of_one_process_on_their_batch(
    replicas: int, overrides: dict[str, Any], split: Make, losses: Losses
) -> None:
    one = {"pipeline__stages": 1, "pipeline__stages_per_rank": 1, "pipeline__schedule": "1f1b"}
    alone = split(1, folder="alone", train__eval_every=2, **{**overrides, **one})
    shared = split(replicas, train__eval_every=2, **overrides)
    assert losses(shared) == pytest.approx(losses(alone), rel=ROUNDING)
    assert held_out(shared) == pytest.approx(held_out(alone), rel=ROUNDING)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("all-reduce", {"data_parallel__delay": True}),
        ("sharded", {}),
        ("local-sgd", {"data_parallel__inner_steps": 3}),
        (
            "local-sgd",
            {
                "data_parallel__inner_steps": 3,
                "data_parallel__fragments": 3,
                "data_parallel__overlap": True,
            },
        ),
    ],
)
def test_copies_of_a_tied_embedding_stay_equal_to_the_last_bit(
    kind: str, settings: dict[str, Any], split: Make, losses: Losses
) -> None:
    """They are at different positions of the flat vectors of two stages."""
    tied = {
        "model__tie_embeddings": True,
        "pipeline__stages": 2,
        "train__steps": 6,
        "data_parallel__wire": "bf16",
    }
    config = split(3, kind, train__num_microbatches=2, **tied, **settings)
    losses(config)
    reached = parameters(config)
    first, last = (reached[name] for name in ("layers.0.tokens.weight", "layers.3.output.weight"))
    assert torch.equal(first, last)


@pytest.mark.slow
def test_local_sgd_resumes_between_outer_steps_to_the_last_bit(split: Make, losses: Losses) -> None:
    """Between two outer steps replicas differ: the checkpoint has each of them."""
    settings = {"pipeline__stages": 2, "train__decay": "none", "data_parallel__inner_steps": 2}
    whole = losses(split(2, "local-sgd", "whole", train__steps=6, **settings))
    losses(split(2, "local-sgd", "part", train__steps=3, **settings))
    assert losses(split(2, "local-sgd", "part", train__steps=6, **settings), resume=True) == whole
    assert whole[-1] < whole[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all-reduce", "sharded"])
def test_replicas_that_are_cut_differently_have_the_bits_of_one_cut(
    kind: str, split: Make, losses: Losses
) -> None:
    """Gradients are exchanged by layer, between whoever holds it."""
    settings = {"pipeline__stages": 2, "train__steps": 3}
    alike = split(2, kind, "alike", pipeline__split=(2, 2), **settings)
    apart = split(
        2, kind, "apart", pipeline__splits=((3, 1), (1, 3)), run__trace_steps=1, **settings
    )
    assert losses(apart) == losses(alike)
    kept = parameters(alike)
    for name, value in parameters(apart).items():
        assert torch.equal(value, kept[name]), name
    inputs = load_trace(Path(apart.run.folder)).inputs
    assert inputs.replicas is not None
    assert [part.stages for part in inputs.replicas.parts] == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.slow
def test_run_of_one_cut_goes_on_where_replicas_are_cut_differently(
    split: Make, losses: Losses
) -> None:
    settings = {"pipeline__stages": 2, "train__decay": "none"}
    whole = losses(split(2, "sharded", "whole", train__steps=4, **settings))
    losses(split(2, "sharded", "part", train__steps=2, **settings))
    apart = {"pipeline__splits": ((3, 1), (1, 3)), "train__steps": 4}
    assert losses(split(2, "sharded", "part", **apart, **settings), resume=True) == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all-reduce", "sharded"])
def test_run_of_replicas_repeats_itself_bit_for_bit(kind: str, split: Make, losses: Losses) -> None:
    again = {
        "pipeline__stages": 2,
        "data_parallel__wire": "int8",
        "train__steps": 2,
    }  # the second has error feedback
    assert losses(split(2, kind, **again)) == losses(split(2, kind, "again", **again))


def test_delayed_run_learns_a_step_later(split: Make, losses: Losses) -> None:
    steady = {"train__decay": "none", "train__steps": 4}
    prompt, late = (
        losses(split(2, **steady)),
        losses(split(2, folder="late", data_parallel__delay=True, **steady)),
    )
    assert late[0] == prompt[0]
    assert late[1] != prompt[1]
    assert late[-1] < late[0]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("before", "after", "delay"),
    [
        (("sharded", 3, 1), ("all-reduce", 2, 2), False),
        (("all-reduce", 2, 1), ("sharded", 4, 1), False),
        (
            ("all-reduce", 2, 1),
            ("all-reduce", 2, 2),
            True,
        ),  # the same number of replicas: each computes with its own gradient applied
        (("sharded", 2, 2), ("sharded", 2, 2), True),
    ],
)
def test_run_resumes_with_other_replicas_and_stages(
    before: tuple[str, int, int],
    after: tuple[str, int, int],
    delay: bool,
    split: Make,
    losses: Losses,
) -> None:
    """Against a run of one arrangement throughout; a checkpoint has the delayed gradients as
    well.
    """
    steps = {"train__decay": "none", "data_parallel__delay": delay}

    def arranged(arrangement: tuple[str, int, int], folder: str, num_steps: int) -> Config:
        kind, replicas, stages = arrangement
        return split(
            replicas, kind, folder, pipeline__stages=stages, train__steps=num_steps, **steps
        )

    whole = losses(arranged(before, "whole", 5))
    losses(arranged(before, "part", 3))
    assert losses(arranged(after, "part", 5), resume=True) == pytest.approx(whole, rel=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "apart"),
    [
        # Workers try out what is not agreed on yet; a checkpoint has what is.
        ("parameter-server", {"data_parallel__staleness": 1, "train__clip_norm": 0.0}, 2e-3),
        ("local-sgd", {"data_parallel__inner_steps": 2}, ROUNDING),
    ],
)
def test_checkpoint_amid_an_exchange_is_resumed_by_other_replicas_and_stages(
    kind: str, settings: dict[str, Any], apart: float, split: Make, losses: Losses
) -> None:
    """The held-out loss is the same after as before, and training continues."""
    settings = {"train__eval_every": 2, "train__decay": "none", **settings}
    before = split(2, kind, train__steps=4, **settings)
    losses(before)
    _, at_2, at_4 = held_out(before)
    after = split(3, kind, train__steps=6, pipeline__stages=2, **settings)
    losses(after, resume=True)
    again, at_6 = held_out(after)[-2:]
    assert again == pytest.approx(at_4, rel=apart)
    assert at_6 < at_4 < at_2


@pytest.mark.slow
def test_fp16_overflow_on_one_replica_skips_the_step_on_all(split: Make, losses: Losses) -> None:
    config = split(2, train__precision="fp16", pipeline__stages=2)
    half = losses(config)
    assert half == pytest.approx(losses(split(2, folder="full", pipeline__stages=2)), rel=0.02)
    assert [row["loss_scale"] for row in read_rows(Path(config.run.folder)) if "loss" in row] == [
        2.0**16
    ] * 3


UNUSED = """
import torch
from torch import nn
import torch.nn.functional as F


class Head(nn.Linear):
    def __init__(self):
        super().__init__(8, 256)
        self.unused = nn.Parameter(torch.ones(3, 3))


def layers():
    return [nn.Embedding(256, 8), Head()], loss


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_run_with_a_parameter_that_nothing_uses_goes_on(
    stored: str,
    replicas: int,
    split: Make,
    losses: Losses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no gradient, also with master weights."""
    (tmp_path / "unused_parameter.py").write_text(UNUSED)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"model__layers": "unused_parameter:layers", "train__decay": "none"}
    own |= {"train__precision": stored, "train__parameters": stored}
    whole = split(replicas, folder="whole", train__steps=4, **own)
    expected = losses(whole)
    losses(split(replicas, folder="part", train__steps=2, **own))
    after = split(replicas, folder="part", train__steps=4, **own)
    assert losses(after, resume=True) == expected
    assert torch.equal(parameters(after)["layers.1.unused"], parameters(whole)["layers.1.unused"])


TRANSPOSED = """
import torch
from torch import nn
import torch.nn.functional as F


def layers():
    head = nn.Linear(8, 256)
    head.weight = nn.Parameter(torch.randn(8, 256).t())
    return [nn.Embedding(256, 8), head], loss


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_sharded_replicas_train_a_transposed_parameter(
    split: Make, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transposed_weight.py").write_text(TRANSPOSED)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"model__layers": "transposed_weight:layers"}
    assert losses(split(2, "sharded", **own)) == pytest.approx(
        losses(split(1, folder="alone", **own)), rel=ROUNDING
    )


EXPLODING = """
import torch
from torch import nn
import torch.nn.functional as F


class Exploding(torch.autograd.Function):
    @staticmethod
    def forward(context, x, tokens):
        context.factor = torch.where((tokens[:, 0] == {culprit}).any(), float("inf"), 1.0)
        return x.clone()

    @staticmethod
    def backward(context, grad):
        return grad * context.factor, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(Exploding.apply(self.embedding(tokens), tokens))


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def layers():
    return [Layer()], loss
"""


@pytest.mark.parametrize(("precision", "skips"), [("fp32", False), ("fp16", True)])
def test_gradient_that_is_not_finite_names_rank_and_parameter(
    precision: str,
    skips: bool,
    split: Make,
    run_ranks: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the second replica sees the token that makes its gradient explode."""
    config = split(
        2, model__layers=f"exploding_{precision}:layers", train__precision=precision, train__steps=1
    )
    corpus = draft(split(2)).corpus
    assert corpus is not None
    inputs, _ = corpus.batch(config.train.seed, 0, 0, BATCH, config.model.context)
    firsts = [set(half[:, 0].tolist()) for half in inputs.chunk(2)]
    culprit = min(firsts[1] - firsts[0])
    (tmp_path / f"exploding_{precision}.py").write_text(EXPLODING.format(culprit=culprit))
    monkeypatch.syspath_prepend(tmp_path)
    errors = run_ranks(config)
    if skips:
        assert errors == [None, None]
        assert (
            "layers.0.embedding.weight on rank 1"
            in (Path(config.run.folder) / "logs/rank-0.log").read_text()
        )
    else:
        assert all(
            isinstance(e, NumericError) and "layers.0.embedding.weight on rank 1" in str(e)
            for e in errors
        )


def test_rows_and_spans_have_the_exchange(split: Make, losses: Losses) -> None:
    config = split(2, pipeline__stages=2, run__trace_steps=1)
    losses(config)
    row = read_rows(Path(config.run.folder))[-1]
    assert set(row["mb_per_s"]) == {"0->1", "1->0", "2->3", "3->2", "0->2", "2->0", "1->3", "3->1"}
    spans = load_steps((Path(config.run.folder) / "trace/rank-3.json").read_bytes(), 3)[-1].spans
    reduced = [span for span in spans if span.lane is Lane.REDUCE]
    assert {str(span.action) for span in reduced} == {"1REDUCE_GRAD"}
    last = draft(config)
    size = sum(
        p.numel()
        for name, p in parameters(config).items()
        if int(name.split(".")[1]) in last.layers_of(1)
    )
    assert sum(span.num_bytes for span in reduced) == pytest.approx(
        4 * size, abs=8
    )  # 2 (R - 1) / R, R = 2


def test_sharded_optimizer_uses_less_memory_and_reports_it(split: Make, losses: Losses) -> None:
    held = {}
    for kind in ("all-reduce", "sharded"):
        config = split(3, kind, kind, train__steps=1)
        losses(config)
        held[kind] = read_rows(Path(config.run.folder))[-1]["optimizer_mb"]
    assert held["sharded"]["0"] == pytest.approx(held["all-reduce"]["0"] / 3, rel=0.01)


@pytest.mark.parametrize(
    ("tied", "peers"),
    [
        (False, [{1}, {0, 2}, {1, 3}, {2}]),
        (
            True,
            [{1, 3}, {0, 2}, {1, 3}, {0, 2}],
        ),  # first and last stage exchange the gradient of the tied weight
    ],
)
def test_peers_are_the_neighbours(tiny: Make, tied: bool, peers: list[set[int]]) -> None:
    schedule = draft(tiny(pipeline__stages=4, model__tie_embeddings=tied)).forecast.schedule
    assert [
        ParallelRanks(rank, pp_size=4).peers(neighbours(schedule, rank)) for rank in range(4)
    ] == peers


def test_peers_of_a_replica_are_the_neighbours_in_its_row_and_its_column(tiny: Make) -> None:
    """
    replica 0    0 1 2
    replica 1    3 4 5
    """
    schedule = draft(tiny(pipeline__stages=3)).forecast.schedule
    ranks = [ParallelRanks(rank, pp_size=3, dp_size=2) for rank in range(6)]
    peers = [here.peers(neighbours(schedule, here.pp_rank)) for here in ranks]
    assert peers == [{1, 3}, {0, 2, 4}, {1, 5}, {0, 4}, {1, 3, 5}, {2, 4}]
