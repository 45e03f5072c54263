"""Against a stand-in for megatron-core, and against megatron-core itself where it is installed."""

import re
import sys
from pathlib import Path

import pytest
import torch
from fakes import fake_megatron

from dpipe.baselines import megatron
from dpipe.baselines.foreign import train_rank
from dpipe.baselines.megatron import VERSION, check_config, transformer_config
from dpipe.config.load import load
from dpipe.errors import ConfigError
from dpipe.processes.environment import ProcessInfo
from dpipe.report.metrics import read_rows

ONE_RANK = ("pipeline.stages=1",)
TWO_REPLICAS = (
    "data_parallel.replicas=2",
    'data_parallel.kind="sharded"',
    "train.num_microbatches=2",
)
TIED = ("model.tie_embeddings=true", "model.vocab_size=256")
ON_GPU = "node.device=cuda"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> fake_megatron.ParallelState:
    return fake_megatron.install(monkeypatch)


@pytest.mark.usefixtures("groups")
def test_megatron_has_the_same_losses(job: Path, tmp_path: Path, our_losses):
    config = load(job, (*ONE_RANK, f"run.folder={tmp_path / 'theirs'}"))
    train_rank(config, ProcessInfo(), lambda config: None, megatron.make_step)
    rows = read_rows(tmp_path / "theirs")
    assert [row["loss"] for row in rows] == our_losses()


@pytest.mark.usefixtures("groups")
def test_bert_of_megatron_has_the_same_losses(job: Path, tmp_path: Path, as_bert, our_losses):
    config = load(job, (*ONE_RANK, *as_bert, f"run.folder={tmp_path / 'theirs'}"))
    train_rank(config, ProcessInfo(), lambda config: None, megatron.make_step)
    rows = read_rows(tmp_path / "theirs")
    assert [row["loss"] for row in rows] == our_losses(*as_bert)


def test_rank_order_is_ours(job: Path, tmp_path: Path, groups):
    config = load(job, (*ONE_RANK, f"run.folder={tmp_path / 'theirs'}", "train.steps=1"))
    train_rank(config, ProcessInfo(), lambda config: None, megatron.make_step)
    assert groups.called == {"tensor": 1, "pipeline": 1, "virtual": None, "order": "tp-cp-ep-pp-dp"}


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("recompute", "granularity", "method"),
    [("none", None, None), ("selective", "selective", None), ("full", "full", "uniform")],
)
def test_recomputation_is_mapped_to_megatrons_names(job: Path, recompute, granularity, method):
    settings = transformer_config(
        load(job, (f"pipeline.recompute={recompute}",)), torch.device("cpu")
    )
    assert (settings.recompute_granularity, settings.recompute_method) == (granularity, method)


@pytest.mark.parametrize(
    "overrides",
    [
        ("tensor_parallel.size=2", *TWO_REPLICAS, "train.num_microbatches=4", *TIED),
        (
            *TWO_REPLICAS,
            "pipeline.stages=4",
            "pipeline.stages_per_rank=2",
            "pipeline.schedule=interleaved",
        ),
    ],
)
def test_real_megatron_has_the_same_losses(overrides, our_losses, their_rows):
    """Two stages of two ranks on two replicas; chunks that are interleaved, with the optimizer
    distributed.
    """
    pytest.importorskip("megatron.core")
    from fakes import cpu_megatron

    rows = their_rows(cpu_megatron, *overrides)
    assert [row["loss"] for row in rows] == our_losses(*models(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ("tensor_parallel.size=2", "pipeline.recompute=full"),
        (*TWO_REPLICAS, "model.tie_embeddings=false"),
        ("pipeline.stages=4", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved"),
    ],
)
def test_bert_of_real_megatron_has_the_same_losses(overrides, as_bert, our_losses, their_rows):
    """Tensor-parallel stages with a tied embedding, replicas, and an interleaved schedule."""
    pytest.importorskip("megatron.core")
    from fakes import cpu_megatron

    rows = their_rows(cpu_megatron, *as_bert, *overrides)
    assert [row["loss"] for row in rows] == our_losses(*as_bert, *models(overrides))


def models(overrides):
    """The settings that change the training, and not those of the layout."""
    return [override for override in overrides if override.startswith("model.")]


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.layers=my.model:layers"], 'model.layers must be "gpt" or "bert"'),
        (["model.dropout=0.1"], "model.dropout must be 0"),
        (["train.precision=bf16"], "train.precision and train.parameters must be the same"),
        (["train.compile=true"], "train.compile must be false"),
        (["pipeline.schedule=gpipe"], 'pipeline.schedule must be "1f1b" or "interleaved"'),
        (["pipeline.stages=3"], "model.num_layers divisible by pipeline.stages"),
        (["pipeline.split=[3, 3]"], "pipeline.split must be left out"),
        (["pipeline.wire=bf16"], 'pipeline.wire must be "none"'),
        (["pipeline.sequence_slices=2"], "pipeline.sequence_slices must be 1"),
        (
            [
                "tensor_parallel.size=2",
                "model.vocab_size=256",
                "tensor_parallel.sequence_parallel=true",
            ],
            "tensor_parallel.sequence_parallel must be false",
        ),
        ([*TWO_REPLICAS, "data_parallel.delay=true"], "without delay"),
        ([*TWO_REPLICAS, "data_parallel.wire=bf16"], 'with data_parallel.wire "none"'),
        (
            [*TWO_REPLICAS, "data_parallel.kind=local-sgd"],
            'data_parallel.kind must be "all-reduce" or "sharded"',
        ),
        (["transport.shape=slow.toml"], "transport.shape must be left out"),
        (["node.device=cpu"], 'node.device must be "cuda"'),
    ],
)
def test_unsupported_configuration_is_refused_for_megatron(
    job: Path, overrides: list[str], message: str
):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(load(job, (ON_GPU, *overrides)))


def test_missing_megatron_says_what_to_install(job: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ConfigError, match=f"pip install megatron-core=={VERSION}"):
        check_config(load(job, (ON_GPU,)))


@pytest.mark.usefixtures("groups")
def test_import_error_inside_megatron_is_not_reported_as_missing_megatron(
    monkeypatch: pytest.MonkeyPatch,
):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'einops'", name="einops")

    monkeypatch.setattr(megatron.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="einops"):
        megatron.part_of_megatron("models.gpt")
