"""Fine-tuning over several epochs whose links send what a sample has changed by."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpipe.config.load import Config, build
from dpipe.plan.recurring import DeltaLinks
from dpipe.wire.deltas import SampleCache

published = pytest.importorskip("hub.published")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
BATCH = 8
STEPS_PER_EPOCH = 4
CONTEXT = 32
WIDTH = 32  # of the tiny model


def wire(forward: str) -> dict[str, str]:
    return {"forward": forward, "backward": "none"}


@pytest.fixture
def chats(tmp_path: Path) -> Make:
    """`chats("folder", wire, **overrides)`: LoRA on a tiny model in three stages, six epochs."""
    published.save("smollm2", tmp_path / "model")
    published.save_tokenizer(tmp_path / "model")
    rows = []
    for number in range(BATCH * STEPS_PER_EPOCH):
        turns = [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": "x" * (number % 4) + "y"},
        ]
        rows.append(json.dumps({"messages": turns}))
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    table = {
        "model": {"hf": str(tmp_path / "model"), "context": CONTEXT},
        "adapter": {"kind": "lora", "r": 4},
        "data": {
            "files": [str(tmp_path / "chats.jsonl")],
            "format": "chat",
            "cache": str(tmp_path / "cache"),
            "packing": False,
            "held_out": 0.0,
        },
        "train": {"steps": 24, "batch_size": BATCH, "num_microbatches": 4, "learning_rate": 1e-2},
        "pipeline": {"stages": 3},
        "run": {"tensorboard": False},
        "timeouts": {"join": 80},
    }

    def make(folder: str, wire: dict[str, str], **overrides: Any) -> Config:
        place = str(tmp_path / folder)
        return build(table).with_(pipeline__wire=wire, run__folder=place, **overrides)

    return make


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[SampleCache]]:
    """All that runs make, by hop and tensor."""
    made: dict[tuple[int, int], list[SampleCache]] = {}
    make = DeltaLinks.caches

    def remembered(links: DeltaLinks, rank: int, folder: Path) -> Any:
        own = make(links, rank, folder)
        for place, cache in own.items():
            made.setdefault(place, []).append(cache)
        return own

    monkeypatch.setattr(DeltaLinks, "caches", remembered)
    return made


def rows_of(cache: SampleCache) -> torch.Tensor:
    rows = torch.empty(cache.num_samples, CONTEXT, WIDTH)
    for sample, row in enumerate(rows):
        cache.read(sample, row)
    return rows


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"pipeline__schedule": "zero-bubble"},
        {
            "pipeline__schedule": "interleaved",
            "pipeline__stages": 4,
            "pipeline__stages_per_rank": 2,
        },
        {"data__packing": True, "data__shuffle": "none", "train__num_microbatches": 8},
    ],
    ids=str,
)
def test_both_ends_of_a_link_have_kept_the_same_bits(
    overrides: dict[str, Any], chats: Make, losses: Losses, caches: Any
) -> None:
    losses(chats("run", wire("int4+delta"), train__steps=6, **overrides))
    assert len(caches) == overrides.get("pipeline__stages", 3) - 1
    for sender, receiver in caches.values():
        assert rows_of(sender).any()
        assert torch.equal(rows_of(sender), rows_of(receiver))


@pytest.mark.slow
def test_replicas_each_remember_what_they_have_seen(
    chats: Make, losses: Losses, caches: Any
) -> None:
    replicas = {"data_parallel__replicas": 2, "data_parallel__kind": "all-reduce"}
    replicas["train__steps"] = 2 * STEPS_PER_EPOCH
    exact = losses(chats("exact", wire("none"), **replicas, pipeline__stages=2))
    close = losses(chats("close", wire("int4+delta"), **replicas, pipeline__stages=2))
    assert close == pytest.approx(exact, rel=0.02)
    assert len(caches[0, 0]) == 4


@pytest.mark.slow
def test_deltas_of_four_bits_end_closer_to_fp32_than_four_bits(chats: Make, losses: Losses) -> None:
    exact = losses(chats("exact", wire("none")))
    directly = losses(chats("direct", wire("int4")))
    deltas = losses(chats("deltas", wire("int4+delta")))
    apart = {}
    for name, each in (("int4", directly), ("int4+delta", deltas)):
        pairs = list(zip(each, exact, strict=True))[-STEPS_PER_EPOCH:]
        apart[name] = sum(abs(loss - of_exact) for loss, of_exact in pairs)
    assert exact[-1] < 0.9 * exact[0]
    assert apart["int4+delta"] < 0.5 * apart["int4"]


@pytest.mark.slow
def test_resumed_run_remembers_nothing_and_says_so(
    chats: Make, losses: Losses, caches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    steady = {"train__decay": "none", "train__steps": 2 * STEPS_PER_EPOCH}
    straight = losses(chats("straight", wire("int4+delta"), **steady))
    caches.clear()
    losses(chats("run", wire("int4+delta"), **{**steady, "train__steps": 6}))
    caches.clear()
    with caplog.at_level(logging.WARNING):
        resumed = losses(chats("run", wire("int4+delta"), **steady), resume=True)
    assert "are not those of a run that was never stopped" in caplog.text
    assert resumed[:6] == straight[:6]
    assert resumed == pytest.approx(straight, rel=0.05)
    for sender, receiver in caches.values():
        assert torch.equal(rows_of(sender), rows_of(receiver))


@pytest.mark.slow
def test_nothing_is_left_in_the_folder(chats: Make, losses: Losses, tmp_path: Path) -> None:
    losses(chats("run", wire("int4+delta"), train__steps=1))
    assert not [path.name for path in (tmp_path / "run").iterdir() if "deltas" in path.name]
