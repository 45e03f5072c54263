"""The central promise: stages, schedule and transport never change the result by one bit."""

import gc
import json
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpipe.config.load import Config
from dpipe.data.sampling import continue_ids
from dpipe.engine.trainer import Trainer
from dpipe.errors import CheckpointError, ConfigError, DataError, NumericError, RunAborted, RunError
from dpipe.plan.run_plan import draft
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_inputs, load_trace, write_chrome
from dpipe.run.generate import generate_text, load_all_layers
from dpipe.run.results import sample_text
from dpipe.schedule.generate import generate
from dpipe.schedule.schedule import Schedule
from dpipe.stage.stage import Stage
from dpipe.store import checkpoint
from dpipe.store.checkpoint import latest
from dpipe.store.run_folder import checkpoint_url
from dpipe.timeline.span import Lane

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
Run = Callable[..., list[BaseException | None]]

# difference from one stage with everything off | overrides
CUTS: dict[str, dict[str, Any]] = {
    "two stages, gpipe": {"pipeline__stages": 2, "pipeline__schedule": "gpipe"},
    "two stages, 1f1b": {"pipeline__stages": 2},
    "four stages, 1f1b": {"pipeline__stages": 4},
    "four stages, zero-bubble": {"pipeline__stages": 4, "pipeline__schedule": "zero-bubble"},
    "two ranks, interleaved": {
        "pipeline__stages": 4,
        "pipeline__stages_per_rank": 2,
        "pipeline__schedule": "interleaved",
    },
    "two ranks, zb-v": {
        "pipeline__stages": 4,
        "pipeline__stages_per_rank": 2,
        "pipeline__schedule": "zb-v",
    },
    "two stages, auto": {"pipeline__stages": 2, "pipeline__schedule": "auto"},
    "two ranks, auto": {
        "pipeline__stages": 4,
        "pipeline__stages_per_rank": 2,
        "pipeline__schedule": "auto",
    },
    "uneven split": {"pipeline__stages": 2, "pipeline__split": (1, 3)},
    "measured split": {"pipeline__stages": 2, "pipeline__split": "measured"},
    "recompute": {"pipeline__recompute": "full"},
    "recompute, two stages": {"pipeline__stages": 2, "pipeline__recompute": "full"},
    "recompute attention, two stages": {"pipeline__stages": 2, "pipeline__recompute": "selective"},
    "two connections": {"pipeline__stages": 2, "transport__connections": 2},
    "two connections, tcp": {
        "pipeline__stages": 2,
        "transport__connections": 2,
        "transport__kind": "tcp",
    },
}


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("cut", CUTS)
def test_losses_are_the_same_bit_for_bit(
    cut: str, tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    settings = {"model__dropout": 0.1, "train__clip_norm": 0.1}
    whole = losses(tiny(**settings))
    assert losses(tiny(**settings, run__folder=str(tmp_path / "cut"), **CUTS[cut])) == whole
    assert len(whole) == 3


def test_rows_say_what_a_sample_takes(tiny: Make, losses: Losses, tmp_path: Path) -> None:
    config = tiny(run__folder=str(tmp_path / "run"))
    losses(config)
    for row in read_rows(tmp_path / "run"):
        assert row["ms_per_sample"] * config.train.batch_size == pytest.approx(row["step_s"] * 1e3)


@pytest.mark.parametrize("stages", [2, 4])
def test_tied_embeddings_are_the_same_bit_for_bit(
    stages: int, tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    whole = losses(tiny(model__tie_embeddings=True))
    cut = tiny(
        model__tie_embeddings=True, pipeline__stages=stages, run__folder=str(tmp_path / "cut")
    )
    assert losses(cut) == whole


def test_both_ends_of_a_tied_embedding_may_live_on_one_rank(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    whole = losses(tiny(model__tie_embeddings=True))
    cut = tiny(
        model__tie_embeddings=True,
        pipeline__stages=4,
        pipeline__stages_per_rank=2,
        pipeline__schedule="zb-v",
        run__folder=str(tmp_path / "cut"),
    )
    assert losses(cut) == whole


def test_dropout_changes_the_result(tiny: Make, losses: Losses, tmp_path: Path) -> None:
    """Otherwise the bit-for-bit tests above would prove nothing about it."""
    assert losses(tiny(model__dropout=0.1)) != losses(tiny(run__folder=str(tmp_path / "other")))


def test_rank_0_alone_searches_the_schedule_that_all_run(
    tiny: Make, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def search(*sizes: Any, **limits: Any) -> Schedule:
        searched.append(threading.current_thread().name)
        return replace(generate("zero-bubble", 2, 4), name="found once")

    monkeypatch.setattr("dpipe.plan.forecast.search", search)
    losses(tiny(pipeline__stages=2, pipeline__schedule="auto", run__trace_steps=1))
    assert searched == ["rank 0"]
    assert load_inputs(tmp_path / "run/trace").schedule.name == "found once"


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_like_fp32(
    precision: str, tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    full = losses(tiny(pipeline__stages=2))
    half = losses(
        tiny(pipeline__stages=2, train__precision=precision, run__folder=str(tmp_path / "half"))
    )
    assert half == pytest.approx(full, rel=0.02)
    assert half != full


MIXED = {"forward": "int6+feedback", "backward": "int8"}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8", MIXED], ids=str)
def test_lossy_wire_learns_like_fp32(wire: Any, tiny: Make, losses: Losses, tmp_path: Path) -> None:
    exact = losses(tiny(pipeline__stages=2))
    lossy = losses(
        tiny(pipeline__stages=2, pipeline__wire=wire, run__folder=str(tmp_path / "lossy"))
    )
    assert lossy == pytest.approx(exact, rel=0.02)
    assert lossy != exact


def test_formats_that_auto_takes_are_those_of_every_rank(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    """Only forward, where a slow link would hold up the step, something is rounded."""
    profile = tmp_path / "one-way.toml"
    slow = "{from = 0, to = 1, delay_ms = 1, bandwidth_gbps = 0.001}"
    fast = "{from = 1, to = 0, delay_ms = 1, bandwidth_gbps = 10}"
    profile.write_text(f"link = [{slow}, {fast}]")
    auto = tiny(
        pipeline__stages=2,
        pipeline__wire="auto",
        pipeline__wire_allowed=("none", "int6"),
        predict__network=str(profile),
    )
    stated = tiny(
        pipeline__stages=2,
        pipeline__wire={"forward": "int6", "backward": "none"},
        run__folder=str(tmp_path / "stated"),
    )
    assert losses(auto) == losses(stated)


def test_held_out_loss_is_measured_at_both_ends_and_between(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2, train__eval_every=2, train__eval_batches=2)
    losses(config)
    rows = [row for row in read_rows(Path(config.run.folder)) if "held_out_loss" in row]
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]


def test_held_out_loss_may_be_that_of_the_model_without_the_wire(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    def held_out(name: str, **keys: object) -> float:
        keys |= {"train__eval_every": 3, "train__eval_batches": 1}
        config = tiny(pipeline__stages=2, run__folder=str(tmp_path / name), **keys)
        losses(config)
        return float(read_rows(Path(config.run.folder))[0]["held_out_loss"])

    rough = {"forward": "int2", "backward": "none"}
    whole = held_out("whole")
    assert held_out("rounded", pipeline__wire=rough) != whole
    assert held_out("trained", pipeline__wire=rough, train__eval_wire="none") == whole


def test_run_that_had_finished_keeps_its_last_held_out_loss_when_it_is_resumed(
    tiny: Make, losses: Losses
) -> None:
    config = tiny(train__eval_every=3, train__eval_batches=1)
    losses(config)
    rows = read_rows(Path(config.run.folder))
    losses(config, resume=True)
    assert read_rows(Path(config.run.folder)) == rows


def test_run_killed_after_its_last_checkpoint_ends_normally_when_resumed(
    tiny: Make, losses: Losses
) -> None:
    """No step is left to train, and there is no trace."""
    config = tiny(run__trace_steps=1)
    whole = losses(config)
    shutil.rmtree(Path(config.run.folder) / "trace")
    assert losses(config, resume=True) == whole


def test_run_that_is_stopped_saves_and_does_not_evaluate_first(
    tiny: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops it, such as Slurm, may kill it soon; the resumed run evaluates."""
    monkeypatch.setattr("dpipe.run.build.stop_on_signals", lambda: nullcontext(lambda: True))
    config = tiny(train__eval_every=1, train__eval_batches=1)
    assert len(losses(config)) == 1
    assert [
        row["step"] for row in read_rows(Path(config.run.folder)) if "held_out_loss" in row
    ] == [0]
    assert latest(checkpoint_url(config)) == 1


def test_last_step_is_logged_whatever_log_every_says(tiny: Make, losses: Losses) -> None:
    config = tiny(train__steps=4, run__log_every=2)
    losses(config)
    assert [row["step"] for row in read_rows(Path(config.run.folder))] == [0, 2, 3]


def test_rows_have_rates_by_link(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2)
    losses(config)
    row = read_rows(Path(config.run.folder))[-1]
    assert set(row["mb_per_s"]) == {"0->1", "1->0"}
    assert 0 <= row["bubble"] < 1
    assert set(row["memory_mb"]) == {"0", "1"}


def test_folder_of_another_run_is_not_written_over(
    tiny: Make, losses: Losses, run_ranks: Run
) -> None:
    losses(tiny())
    (error,) = run_ranks(tiny())
    assert isinstance(error, ConfigError)
    assert "already holds a run" in str(error)


def test_text_that_is_too_short_is_refused_before_anything_is_written(
    tiny: Make, run_ranks: Run
) -> None:
    config = tiny(model__context=100_000)
    (error,) = run_ranks(config)
    assert isinstance(error, DataError)
    assert not Path(config.run.folder).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "sees no CUDA GPU"),
        ("abacus", "is no device"),
        ("mps", 'computes on "cpu" and on "cuda"'),
    ],
)
def test_missing_device_is_refused(device: str, message: str, tiny: Make, run_ranks: Run) -> None:
    (error,) = run_ranks(tiny(node__device=device))
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_fewer_layers_than_stages_are_refused_before_anything_is_written(
    tiny: Make, run_ranks: Run
) -> None:
    config = tiny(pipeline__stages=5, timeouts__join=2)
    assert all("4 layers cannot make 5 stages" in str(error) for error in run_ranks(config))
    assert not Path(config.data.cache).exists()
    assert not Path(config.run.folder).exists()


def test_vocabulary_smaller_than_the_tokenizers_is_refused(tiny: Make, run_ranks: Run) -> None:
    (error,) = run_ranks(tiny(model__vocab_size=100))
    assert isinstance(error, DataError)
    assert "256 entries, but model.vocab_size is 100" in str(error)


def test_rank_with_another_configuration_is_refused_and_the_key_named(
    tiny: Make, run_ranks: Run
) -> None:
    errors = run_ranks(
        tiny(pipeline__stages=2), of_rank={1: tiny(pipeline__stages=2, train__seed=7)}
    )
    assert all("train.seed" in str(error) for error in errors)


def test_run_over_mutual_tls_gives_the_same_losses(
    tiny: Make, losses: Losses, authority, tmp_path: Path
) -> None:
    security = authority().security()
    pems = {"cert": security.cert, "key": security.key, "ca": security.ca}
    for name, pem in pems.items():
        (tmp_path / f"{name}.pem").write_bytes(pem)
    paths = {f"node__tls_{name}": str(tmp_path / f"{name}.pem") for name in pems}
    over_tls = tiny(pipeline__stages=2, run__folder=str(tmp_path / "tls")).with_(**paths)
    assert losses(over_tls) == losses(tiny())


USER_MODEL = """
from torch import nn
import torch.nn.functional as F


class Doubled(nn.Module):
    # Gives two tensors: what it makes, and a mask of integers that carries no gradient.

    def __init__(self, width):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(256, width), nn.Linear(width, width)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens)), tokens % 2


class Masked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 256)

    def forward(self, x, mask):
        return self.linear(x * mask.unsqueeze(-1))


def layers(width):
    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return [Doubled(width), Masked(width)], loss
"""


def test_users_own_layers_with_two_tensors_between_stages(
    tiny: Make, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_layers.py").write_text(USER_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    mine = {"model__layers": "my_layers:layers", "model__options": {"width": 8}}
    whole = losses(tiny(**mine))
    assert losses(tiny(**mine, pipeline__stages=2, run__folder=str(tmp_path / "cut"))) == whole
    assert whole[-1] < whole[0]
    text = generate_text(tmp_path / "cut", "The", tokens=3, temperature=0, seed=0, trust_code=True)
    assert text.startswith("The")


def test_tokens_unknown_to_the_tokenizer_are_never_generated(tiny: Make, losses: Losses) -> None:
    config = tiny(model__vocab_size=300, train__steps=1)
    losses(config)
    assert generate_text(
        Path(config.run.folder), "The", tokens=60, temperature=100, seed=0
    ).startswith("The")


def damage(folder: Path) -> None:
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    file = next(newest.glob("model-*"))
    file.write_bytes(file.read_bytes()[:-8] + b"garbage!")


def test_step_that_was_not_finite_is_not_saved(tiny: Make, run_ranks: Run) -> None:
    """Without clipping only the checkpoint waits for the verdict on a step."""
    far_too_high = {
        "train__learning_rate": 1e30,
        "train__clip_norm": 0.0,
        "run__checkpoint_every": 1,
    }
    config = tiny(pipeline__stages=2, **far_too_high)
    assert {type(error) for error in run_ranks(config)} <= {NumericError, RunAborted}
    kept = checkpoint.load(checkpoint_url(config), lambda name: True)
    assert all(bool(tensor.isfinite().all()) for tensor in kept.tensors.values())


def test_resumed_run_frees_the_loaded_checkpoint(
    tiny: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(tiny(run__checkpoint_every=2))
    train, held = Trainer.run, list[checkpoint.Loaded]()

    def looking(trainer: Trainer) -> bool:
        held.extend(found for found in gc.get_objects() if type(found) is checkpoint.Loaded)
        return train(trainer)

    monkeypatch.setattr(Trainer, "run", looking)
    losses(tiny(train__steps=4), resume=True)
    assert not held


def test_damaged_checkpoint_is_named_and_nothing_is_lost(
    tiny: Make, losses: Losses, run_ranks: Run
) -> None:
    config = tiny(pipeline__stages=2, run__checkpoint_every=2)
    losses(config)
    damage(Path(config.run.folder))
    before = sorted(Path(config.run.folder).rglob("*"))
    again = run_ranks(config.with_(train__steps=5, timeouts__join=1), resume=True)
    errors = [error for error in again if isinstance(error, CheckpointError)]
    assert "step-00000003/model-" in str(errors[0])
    assert "--fallback" in str(errors[0])
    assert sorted(Path(config.run.folder).rglob("*")) == before


def test_fallback_resumes_the_previous_checkpoint_on_every_rank(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    longer = {
        "pipeline__stages": 2,
        "run__checkpoint_every": 2,
        "train__steps": 5,
        "train__decay": "none",
    }
    whole = losses(tiny(**longer, run__folder=str(tmp_path / "whole")))
    shorter = tiny(**{**longer, "train__steps": 3})
    losses(shorter)
    damage(Path(shorter.run.folder))
    assert losses(tiny(**longer), resume=True, fallback=True) == whole


def test_prompt_is_continued_from_the_checkpoint(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2)
    losses(config)
    text = generate_text(Path(config.run.folder), "The quick", tokens=5, temperature=0, seed=0)
    assert text.startswith("The quick")
    assert len(text) > len("The quick")
    with pytest.raises(DataError, match=r"the prompt 'na\\udcefve' is not UTF-8"):
        generate_text(Path(config.run.folder), "na\udcefve", tokens=5, temperature=0, seed=0)


def test_layers_to_continue_with_are_read_from_the_checkpoint_and_not_drawn(
    tiny: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(pipeline__stages=2)
    losses(config)
    url = checkpoint_url(config)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(torch.Tensor, "normal_", refuse)
    monkeypatch.setattr(torch.Tensor, "uniform_", refuse)
    saved = checkpoint.load(url, lambda name: name.startswith("layers.")).tensors
    for index, layer in enumerate(load_all_layers(config, url)):
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, saved[f"layers.{index}.{name}"])


class Heavy(nn.Flatten):
    """Fits on no GPU."""

    def to(self, device: str) -> "Heavy":
        if device != "cpu":
            raise torch.OutOfMemoryError("no room")
        return self


def test_text_is_written_on_the_cpu_where_a_gpu_has_no_room(
    tiny: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(train__steps=1)
    losses(config)
    on_gpu = config.with_(node__device="cuda")
    layers = [nn.Embedding(256, 256), Heavy(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nn.Embedding, "to", lambda self, _: self)
    monkeypatch.setattr("dpipe.run.generate.load_configuration", lambda *_, **__: on_gpu)
    monkeypatch.setattr("dpipe.run.generate.load_all_layers", lambda *_, **__: layers)
    text = generate_text(Path(config.run.folder), "The", tokens=3, temperature=0, seed=0)
    assert text.startswith("The")
    assert "cuda has no room for the whole model: the text is written on the CPU" in caplog.text


@pytest.mark.parametrize("seed", [2**80, -1])
@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e300])
def test_any_temperature_and_seed_continue_a_text(temperature: float, seed: int) -> None:
    layers = [nn.Embedding(8, 8)]
    ids = continue_ids(layers, [1], 3, context=4, vocab_size=8, temperature=temperature, seed=seed)
    assert len(ids) == 4
    likeliest = continue_ids(layers, [1], 3, context=4, vocab_size=8, temperature=0, seed=0)
    assert temperature > 1 or ids == likeliest


def test_prompt_is_continued_without_the_training_text(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2)
    losses(config)
    for name in config.data.files:
        Path(name).unlink()
    assert generate_text(
        Path(config.run.folder), "The", tokens=3, temperature=0, seed=0
    ).startswith("The")


def test_sample_is_left_out_where_a_part_of_the_model_is_on_another_machine(
    tiny: Make, losses: Losses, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(pipeline__stages=2)
    losses(config)
    corpus, url = draft(config).corpus, checkpoint_url(config)
    assert corpus is not None
    assert sample_text(config, corpus, url, "The") is not None
    next(Path(url).glob("*/model-00001-*")).unlink()
    assert sample_text(config, corpus, url, "The") is None
    assert "run.sample is left out" in caplog.text


def test_sample_is_left_out_where_the_model_continues_no_text(
    tiny: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(train__steps=1, run__sample="The")
    monkeypatch.setattr(
        "dpipe.run.generate.load_all_layers", lambda *_, **__: [nn.Embedding(256, 4), nn.Flatten()]
    )
    assert len(losses(config)) == 1
    with pytest.raises(ConfigError, match="model.layers 'gpt' cannot continue a text"):
        generate_text(Path(config.run.folder), "The", tokens=1, temperature=0, seed=0)


def test_text_is_continued_by_the_checkpoint_before_a_damaged_one(
    tiny: Make, losses: Losses
) -> None:
    config = tiny(train__steps=4, run__checkpoint_every=2)
    losses(config)
    damage(Path(config.run.folder))
    continued = partial(
        generate_text, Path(config.run.folder), "The", tokens=5, temperature=0, seed=0
    )
    with pytest.raises(CheckpointError, match="--fallback uses the one of step 2"):
        continued()
    assert continued(fallback=True).startswith("The")


def test_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        generate_text(tmp_path, "The quick", tokens=5, temperature=0, seed=0)


def test_checkpoint_of_a_model_of_another_width_is_refused(
    tiny: Make, losses: Losses, run_ranks: Run
) -> None:
    losses(tiny())
    (error,) = run_ranks(tiny(model__width=8, train__steps=5), resume=True)
    assert isinstance(error, CheckpointError)
    assert "in the checkpoint and" in str(error)


def test_refused_resume_leaves_the_run_as_it_was(
    tiny: Make, losses: Losses, run_ranks: Run
) -> None:
    """Only one rank has the layer that does not fit; the other learns of it before it writes."""
    config = tiny(pipeline__stages=2, run__checkpoint_every=2)
    losses(config)
    folder = Path(config.run.folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000003")
    before = {name: (folder / name).read_bytes() for name in ("config.json", "metrics.jsonl")}
    errors = run_ranks(
        config.with_(model__vocab_size=300, model__tie_embeddings=False, train__steps=5),
        resume=True,
    )
    assert any(isinstance(error, CheckpointError) for error in errors)
    assert {name: (folder / name).read_bytes() for name in before} == before


AVERAGING = """
import torch.nn.functional as F
from torch import nn

class Averages(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)

def layers():
    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return [nn.Embedding(256, 8), Averages(8), nn.Linear(8, 256)], loss
"""


def test_running_means_are_resumed(
    tiny: Make, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "averaging_layers.py").write_text(AVERAGING)
    monkeypatch.syspath_prepend(tmp_path)
    mine = {
        "model__layers": "averaging_layers:layers",
        "train__decay": "none",
        "train__eval_every": 2,
    }
    whole, part = (
        tiny(**mine, train__steps=4, run__folder=str(tmp_path / name)) for name in ("whole", "part")
    )
    losses(whole)
    losses(part.with_(train__steps=2))
    losses(part, resume=True)
    assert held_out(part)[-1] == held_out(whole)[-1]


BUFFERS = """
import torch
import torch.nn.functional as F
from torch import nn

class Masked(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("ones", torch.ones(1, 4).expand(4, 4))
        self.register_buffer("turns", torch.full((4,), 1j))

def layers():
    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return [nn.Embedding(256, 8), Masked(), nn.Linear(8, 256)], loss
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_of_any_values_are_saved_and_filled(
    precision: str, tiny: Make, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of infinities, a view of one row four times, complex numbers; of an older checkpoint
    there are none.
    """
    (tmp_path / "buffer_layers.py").write_text(BUFFERS)
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny(
        model__layers="buffer_layers:layers",
        train__precision=precision,
        train__parameters=precision,
    )
    losses(config)
    kept = checkpoint.load(checkpoint_url(config), lambda name: True).tensors
    assert kept["layers.1.turns"].tolist() == [1j] * 4
    losses(config.with_(train__steps=4), resume=True)
    monkeypatch.setattr(Stage, "named_buffers", lambda stage: iter([]))
    losses(config.with_(train__steps=5), resume=True)
    monkeypatch.undo()
    losses(config.with_(train__steps=6), resume=True)


def test_buffers_that_change_are_refused_where_layers_run_twice(
    tiny: Make, run_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "averaging_twice.py").write_text(AVERAGING)
    monkeypatch.syspath_prepend(tmp_path)
    (error,) = run_ranks(tiny(model__layers="averaging_twice:layers", pipeline__recompute="full"))
    assert isinstance(error, RunError)
    assert "layer 1 (Averages) changes its buffers as it runs" in str(error)


def held_out(config: Config) -> list[float]:
    return [
        row["held_out_loss"] for row in read_rows(Path(config.run.folder)) if "held_out_loss" in row
    ]


def test_checkpoints_may_go_to_any_url(tiny: Make, losses: Losses, tmp_path: Path) -> None:
    whole = losses(tiny(train__decay="none", train__steps=5, run__folder=str(tmp_path / "whole")))
    away = {"run__checkpoint_url": f"memory://{tmp_path.name}", "train__decay": "none"}
    losses(tiny(**away, pipeline__stages=2))
    assert losses(tiny(**away, train__steps=5), resume=True) == whole
    assert not (tmp_path / "run/checkpoints").exists()


def test_trace_has_every_rank_and_the_prediction(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2, run__trace_steps=1)
    losses(config)
    events = json.loads(write_chrome(Path(config.run.folder)).read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 0, predicted", "rank 1, predicted"}
    measured = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0}
    assert {"0F0", "0B3", "0SEND_F0", "0RECV_B0", "0STEP"} <= measured


def test_spans_of_two_ranks_are_on_one_clock(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2, run__trace_steps=1)
    losses(config)
    ((_, _, timeline),) = load_trace(Path(config.run.folder)).steps
    start = {
        str(span.action): span.start_us for span in timeline.spans if span.lane is Lane.COMPUTE
    }
    end = {str(span.action): span.end_us for span in timeline.spans if span.lane is Lane.COMPUTE}
    assert all(
        start[f"1F{m}"] >= end[f"0F{m}"] and start[f"0B{m}"] >= end[f"1B{m}"] for m in range(4)
    )


def test_run_without_a_trace_says_so(tiny: Make, losses: Losses) -> None:
    config = tiny()
    losses(config)
    with pytest.raises(ConfigError, match="trace_steps"):
        load_trace(Path(config.run.folder))
