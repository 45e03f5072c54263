import re
from pathlib import Path

import pytest

from dpipe.baselines import fsdp
from dpipe.baselines.fsdp import check_config
from dpipe.config.load import load
from dpipe.errors import ConfigError

TWO_REPLICAS = (
    "data_parallel.replicas=2",
    'data_parallel.kind="sharded"',
    "train.num_microbatches=2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        TWO_REPLICAS,
        ("pipeline.schedule=zero-bubble", "pipeline.recompute=full", "train.precision=bf16"),
    ],
)
def test_torch_has_the_same_losses(overrides, our_losses, their_rows):
    """Two stages, on two replicas each or on one, against one process of ours."""
    rows = their_rows(fsdp, *overrides)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["loss"] for row in rows] == our_losses(*overrides[1:])
    assert all(row["step_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.layers=replay", "train.clip_norm=0"], 'model.layers must be "gpt"'),
        (["model.dropout=0.1"], "model.dropout must be 0"),
        (["model.tie_embeddings=true"], "model.tie_embeddings must be false"),
        (["train.precision=fp16"], 'train.precision must be "fp32" or "bf16"'),
        (["train.precision=bf16", "train.parameters=bf16"], 'and train.parameters "fp32"'),
        (["train.compile=true"], "train.compile must be false"),
        (["pipeline.stages=1"], "pipeline.ranks must be above 1"),
        (["pipeline.wire=bf16"], 'pipeline.wire must be "none"'),
        (["pipeline.sequence_slices=2"], "pipeline.sequence_slices must be 1"),
        (["pipeline.split=measured"], 'pipeline.split must not be "measured"'),
        (["tensor_parallel.size=2", "model.vocab_size=256"], "tensor_parallel.size must be 1"),
        ([*TWO_REPLICAS, "data_parallel.delay=true"], "without delay"),
        ([*TWO_REPLICAS, "data_parallel.wire=bf16"], 'with data_parallel.wire "none"'),
        (
            [*TWO_REPLICAS, "data_parallel.kind=local-sgd"],
            'data_parallel.kind must be "all-reduce" or "sharded"',
        ),
        (["transport.shape=slow.toml"], "transport.shape must be left out"),
    ],
)
def test_unsupported_configuration_is_refused_for_fsdp(
    job: Path, overrides: list[str], message: str
):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(load(job, tuple(overrides)))
