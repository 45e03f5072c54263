"""Combinations of sections that are refused."""

from typing import Any

import pytest

from dpipe.config.load import build
from dpipe.errors import ConfigError

WITH_SERVER = {"kind": "parameter-server", "replicas": 2}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"pipeline": {"stages": 2, "splits": [[3, 3], [2, 4]]}},
            "pipeline.splits is for 2 replicas, but data_parallel.replicas is 1",
        ),
        (
            {"pipeline": {"stages": 2, "splits": [[3, 3], [2, 4]]}, "data_parallel": WITH_SERVER},
            'pipeline.splits does not go with data_parallel.kind "parameter-server": take '
            '"all-reduce" or "sharded"',
        ),
        (
            {
                "pipeline": {"stages": 2, "splits": [[3, 3], [2, 4]]},
                "data_parallel": {"kind": "all-reduce", "replicas": 2, "group": "torch"},
            },
            'pipeline.splits does not go with data_parallel.group "torch"',
        ),
        (
            {"pipeline": {"stages": 2, "splits": [[3, 3], [2, 5]]}},
            "pipeline.splits places 7 layers in replica 1, and 6 in replica 0",
        ),
        (
            {"pipeline": {"stages": 2, "splits": [[3, 3], [2, 2, 2]]}},
            "pipeline.splits lists 3 stages for replica 1, but pipeline.stages is 2",
        ),
        (
            {"pipeline": {"stages": 2, "split": [3, 3], "splits": [[3, 3]]}},
            "leave pipeline.split out",
        ),
        (
            {"pipeline": {"stages": 2, "stages_per_rank": 2, "splits": [[3, 3]]}},
            "leave pipeline.stages_per_rank out",
        ),
        (
            {"train": {"batch_size": 7, "num_microbatches": 4}},
            "batch_size 7 is not divisible by train.num_microbatches 4; change one of them",
        ),
        (
            {
                "train": {"num_microbatches": 4},
                "data_parallel": {"kind": "all-reduce", "replicas": 3},
            },
            "batch_size 16 is not divisible by train.num_microbatches 4 for each of "
            "data_parallel.replicas 3",
        ),
        (
            {"tensor_parallel": {"size": 3}},
            "num_heads 4 is not divisible by tensor_parallel.size 3; .* that is: 6",
        ),
        (
            {"tensor_parallel": {"size": 4}, "model": {"vocab_size": 50257}},
            "model.vocab_size 50257 is not divisible by tensor_parallel.size 4; the next that is: "
            "50260",
        ),
        (
            {"tensor_parallel": {"size": 2, "sequence_parallel": True}, "model": {"context": 15}},
            "model.context 15 is not divisible by tensor_parallel.size 2",
        ),
        (
            {"tensor_parallel": {"size": 2}, "model": {"layers": "my.model:layers"}},
            "model.layers is 'my.model:layers'",
        ),
        (
            {"model": {"layers": "replay"}, "node": {"device": "cuda"}},
            'moves host memory: set node.device = "cpu"',
        ),
        (
            {"model": {"layers": "replay"}, "pipeline": {"split": "measured"}},
            "a replayed stage has none: leave it out",
        ),
        (
            {"replay": {"exchanges": 2}},
            "replay.exchanges are among the ranks of a tensor-parallel group: set "
            "tensor_parallel.size",
        ),
        (
            {
                "model": {"layers": "replay"},
                "tensor_parallel": {"size": 2, "sequence_parallel": True},
            },
            "tensor_parallel.sequence_parallel splits a real model",
        ),
        (
            {
                "tensor_parallel": {"size": 2},
                "train": {"clip_norm": 0},
                "data_parallel": {"kind": "parameter-server", "staleness": 1},
            },
            "staleness does not go with tensor_parallel.size above 1",
        ),
        (
            {
                "tensor_parallel": {"size": 2},
                "data_parallel": {"kind": "all-reduce", "replicas": 2, "wire": "int8"},
                "train": {"batch_size": 32},
            },
            "rounds parameters that are not sharded differently on each of tensor_parallel.size 2",
        ),
    ],
)
def test_incompatible_sections_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(table)


def test_sample_of_bert_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match='run.sample is for models that continue a text, and model.layers is "bert"',
    ):
        build({"model": {"layers": "bert"}, "run": {"sample": "My fellow"}})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, 'node.device must be "cuda"'),
        ({"node": {"device": "cuda"}, "model": {"layers": "replay"}}, "model.layers"),
        ({"node": {"device": "cuda"}, "transport": {"shape": "slow.toml"}}, "transport.shape"),
        (
            {"node": {"device": "cuda"}, "data_parallel": {"kind": "all-reduce", "replicas": 2}},
            "data_parallel.group",
        ),
    ],
    ids=["cpu", "replay", "shape", "replicas"],
)
def test_nccl_refuses_unsupported_configurations(
    table: dict[str, dict[str, object]], message: str
) -> None:
    transport = {"kind": "nccl", **table.get("transport", {})}
    with pytest.raises(ConfigError, match=f'with transport.kind "nccl" {message}'):
        build({**table, "transport": transport})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"data_parallel": {"kind": "all-reduce", "staleness": 1}}, "go with data_parallel.kind"),
        (
            {"data_parallel": {**WITH_SERVER, "delay": True}},
            "which has data_parallel.staleness instead",
        ),
        ({"data_parallel": {**WITH_SERVER, "address": "10.0.0.1"}}, "must be HOST:PORT"),
        ({"data_parallel": {**WITH_SERVER, "address": ["a:1", "b:2"]}}, "lists 2 servers"),
        ({"data_parallel": {**WITH_SERVER, "staleness": 1}}, "set train.clip_norm = 0"),
        (
            {"data_parallel": {**WITH_SERVER, "wire": "int8"}, "model": {"tie_embeddings": True}},
            "tied embedding",
        ),
    ],
)
def test_invalid_parameter_server_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(table)


def test_torch_group_with_rounded_sums_refuses_a_tied_embedding_on_three_or_more_replicas() -> None:
    """With two replicas there is only one order of summation."""
    settings = {"kind": "all-reduce", "group": "torch", "wire": "bf16"}
    table = {"model": {"tie_embeddings": True}, "train": {"batch_size": 24}}
    build({**table, "data_parallel": {**settings, "replicas": 2}})
    with pytest.raises(
        ConfigError, match='set data_parallel.wire = "none", leave data_parallel.group out'
    ):
        build({**table, "data_parallel": {**settings, "replicas": 3}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "parameter-server"},
            'data_parallel.kind "parameter-server" .* take data_parallel.kind "all-reduce"',
        ),
        (
            {"kind": "all-reduce", "group": "torch"},
            'data_parallel.group "torch" .* take data_parallel.group "dpipe"',
        ),
    ],
)
def test_shape_is_refused_where_replicas_have_connections_of_their_own(
    settings: dict[str, Any], message: str
) -> None:
    """Such a run was not slowed down, but was predicted to be."""
    table = {"data_parallel": {**settings, "replicas": 2}}
    build(table)
    with pytest.raises(
        ConfigError, match=f"transport.shape slows the links of the ranks, and {message}"
    ):
        build({**table, "transport": {"shape": "slow.toml"}})


@pytest.mark.parametrize("schedule", ["zero-bubble", "auto"])
def test_compiled_layers_refuse_a_schedule_that_splits_the_backward_pass(schedule: str) -> None:
    with pytest.raises(
        ConfigError, match=f'with train.compile pipeline.schedule must not be "{schedule}"'
    ):
        build({"train": {"compile": True}, "pipeline": {"schedule": schedule}})


def test_auto_refuses_a_number_of_microbatches_in_flight() -> None:
    """It was ignored."""
    with pytest.raises(ConfigError, match="leave pipeline.in_flight out, or bound what a rank"):
        build({"pipeline": {"schedule": "auto", "in_flight": 4}})


@pytest.mark.parametrize(
    ("size", "replicas", "expected"), [(16, 1, 4), (6, 1, 3), (7, 1, 1), (2, 1, 2), (12, 2, 3)]
)
def test_micro_batches_that_are_left_out_fit_the_batch(
    size: int, replicas: int, expected: int
) -> None:
    kind = "none" if replicas == 1 else "all-reduce"
    config = build(
        {
            "train": {"batch_size": size},
            "data_parallel": {"kind": kind, "replicas": replicas},
        }
    )
    assert config.train.num_microbatches == expected
    assert "num_microbatches" not in config.train.model_fields_set, "a plan may choose another"
