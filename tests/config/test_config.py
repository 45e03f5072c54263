import json
from pathlib import Path
from typing import Any

import pytest

from dpipe.config.load import Config, build, load
from dpipe.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_file_is_read_and_overridden(tmp_path: Path) -> None:
    path = written(tmp_path, "[train]\nsteps = 5\n[pipeline]\nstages = 4\n")
    config = load(path, ("train.steps=7", "run.folder=runs/a b", "pipeline.split=[1, 2, 2, 1]"))
    assert (config.train.steps, config.run.folder, config.pipeline.split) == (
        7,
        "runs/a b",
        (1, 2, 2, 1),
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"model": {"widht": 3}}, "unknown key 'model.widht'; did you mean 'width'?"),
        ({"trian": {}}, "unknown key 'trian'; did you mean 'train'?"),
        ({"train": {"steps": "many"}}, "train.steps: .* got 'many'"),
        ({"train": {"batch_size": 7}}, "batch_size 7 is not divisible by train.num_microbatches 4"),
        (
            {"data_parallel": {"kind": "all-reduce", "replicas": 3}},
            "batch_size 16 is not divisible by train.num_microbatches 4 for each of "
            "data_parallel.replicas 3",
        ),
        (
            {"data_parallel": {"replicas": 2}},
            "replicas is 2, but data_parallel.kind does not say how they agree",
        ),
        (
            {"data_parallel": {"kind": "sharded", "group": "torch"}},
            'group "torch" goes with data_parallel.kind "all-reduce".*not \'sharded\'',
        ),
        (
            {"model": {"width": 100, "num_heads": 3}},
            "model.width 100 must be a multiple of model.num_heads 3",
        ),
        *(
            (
                {"model": {"layers": name}},
                'model.layers must be one of "gpt", "bert", "replay", "package.module:function"',
            )
            for name in ("mine", ":", "mine:", ":layers", ".mine:layers")
        ),
        ({"pipeline": {"stages": 3, "stages_per_rank": 2}}, "stages 3 is not a multiple of"),
        (
            {"pipeline": {"stages": 2, "split": [3]}},
            "split lists 1 stages, but pipeline.stages is 2",
        ),
        (
            {"pipeline": {"stages": 4, "stages_per_rank": 2}},
            'above 1 goes with pipeline.schedule "gpipe" or "interleaved"',
        ),
        (
            {"pipeline": {"stages": 4, "schedule": "interleaved"}},
            '"interleaved" needs pipeline.stages_per_rank above 1',
        ),
        (
            {"pipeline": {"schedule": "interleave"}},
            'pipeline.schedule must be one of "gpipe", .*, "auto", got \'interleave\'; '
            'did you mean "interleaved"',
        ),
        ({"node": {"tls_cert": "a.pem"}}, "go together"),
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
            {"tensor_parallel": {"sequence_parallel": True}},
            "sequence_parallel needs tensor_parallel.size 2",
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
            {"data_parallel": {"fragments": 2}},
            "go with data_parallel.kind \"local-sgd\", not 'none': leave them out",
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
def test_mistake_is_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(table)


@pytest.mark.parametrize("wait", ["join", "connect", "transfer", "heartbeat"])
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e12, 0, -1])
def test_wait_that_no_clock_counts_is_refused(wait: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=rf"^timeouts\.{wait}: Input should be [^\n]*$"):
        build({"timeouts": {wait: seconds}})


@pytest.mark.parametrize(
    "key", ["predict.gflops", "predict.machine_delay_ms", "train.learning_rate"]
)
def test_number_that_is_not_finite_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: Input should be a finite number, got inf"):
        load(written(tmp_path, ""), (f"{key}=inf",))


@pytest.mark.parametrize(
    "override", ["train.steps=true", "train.betas=[true, 0.9]", "train.eval_every=false"]
)
def test_truth_is_no_number(tmp_path: Path, override: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^{override.partition('=')[0]}: Input should not be true or false, got ",
    ):
        load(written(tmp_path, ""), (override,))


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="steps(.|\n)*learning_rate"):
        build({"train": {"steps": 0, "learning_rate": -1}})


@pytest.mark.parametrize("text", ["steps=5", "train.steps", "=5", "train.=5"])
def test_override_without_section_and_value_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="must look like section.key=value"):
        load(written(tmp_path, ""), (text,))


def test_override_of_something_that_is_no_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'train' is not a section"):
        load(written(tmp_path, "train = 3"), ("train.steps=5",))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load(tmp_path / "nowhere.toml")


def test_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"configuration .* cannot be read: Is a directory"):
        load(tmp_path)


def test_section_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train must be a section, \[train\], got 3$"):
        load(written(tmp_path, "train = 3"))


def test_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.toml is not TOML"):
        load(written(tmp_path, "steps 5"))


def test_configuration_that_a_run_has_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = build({"train": {"steps": 7}, "model": {"options": {"a": None}}})
    path.write_text(json.dumps(config.model_dump(mode="json", exclude={"node"})))
    assert load(path, ("train.seed=3",)) == config.with_(train__seed=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [("steps 5", "is not JSON"), ("[3]", "must be a JSON object of sections")],
)
def test_json_that_is_no_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("train = { steps = 7 }", encoding="utf-8-sig")
    assert load(path, ()).train.steps == 7


@pytest.mark.parametrize("folder", ["", "runs/" + "x" * 300, "runs/" + "ü" * 150, "a\0b"])
def test_folder_that_no_run_can_have_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.folder [^\0]*$"):
        build({"run": {"folder": folder}})


def test_text_where_a_list_belongs_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.files: Input should be a list, got 'x.txt'"):
        load(written(tmp_path, "data = { files = 'x.txt' }"), ())


def test_digest_differs_with_what_ranks_must_agree_on() -> None:
    assert build({"train": {"steps": 5}}).digest() != Config().digest()


def test_digest_leaves_out_what_belongs_to_one_process() -> None:
    assert build({"node": {"port": 7000, "threads": 4}}).digest() == Config().digest()


def test_configuration_survives_json() -> None:
    config = build({"pipeline": {"stages": 2, "split": [3, 3]}})
    table: dict[str, dict[str, object]] = {}
    for name, value in config.shared().items():
        section, _, key = name.partition(".")
        table.setdefault(section, {})[key] = value
    assert build(table) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delay": True}, '"local-sgd", which has data_parallel.overlap instead'),
        (
            {"fragments": 5, "inner_steps": 4},
            "data_parallel.fragments is 5, but at most one is averaged at each",
        ),
    ],
)
def test_local_sgd_refuses_what_it_cannot_do(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"data_parallel": {"kind": "local-sgd", "replicas": 2, **given}})


# in 10^9, as the papers say it
PUBLISHED_SIZES = {
    "gpt2-345m": 0.355,
    "sc21-1.7b": 1.7,
    "sc21-3.6b": 3.6,
    "sc21-7.5b": 7.5,
    "sc21-18.4b": 18.4,
    "sc21-39.1b": 39.1,
    "sc21-76.1b": 76.1,
    "sc21-145.6b": 145.6,
    "sc21-310.1b": 310.1,
    "sc21-529.6b": 529.6,
    "sc21-1008b": 1008.0,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED_SIZES.items())
def test_preset_has_as_many_parameters_as_published(name: str, published: float) -> None:
    """12 l h^2 (1 + 13 / 12h + (V + s) / 12 l h), equation 2 of Narayanan et al. 2021."""
    model = build({"model": {"preset": name}}).model
    assert model.vocab_size is not None
    blocks = model.num_layers * (12 * model.width**2 + 13 * model.width)
    parameters = blocks + (model.vocab_size + model.context) * model.width
    assert parameters / 1e9 == pytest.approx(published, rel=0.03)  # theirs are rounded


def test_what_is_not_given_stays_unset() -> None:
    """Results are known again by what was given, whatever defaults there are."""
    assert build({"model": {"width": 64}}).model.model_fields_set == {"width"}


def test_size_that_is_given_overrides_the_preset() -> None:
    model = build({"model": {"preset": "gpt3-xl", "num_layers": 2}}).model
    assert (model.num_layers, model.width, model.context) == (2, 2048, 2048)


def test_embeddings_of_bert_are_tied_unless_it_is_said_otherwise() -> None:
    tied = [
        build({"model": model}).model.tie_embeddings
        for model in (
            {"preset": "bert-345m"},
            {"layers": "bert"},
            {"layers": "bert", "tie_embeddings": False},
            {},
        )
    ]
    assert tied == [True, True, False, False]


def test_sample_of_bert_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match='run.sample is for models that continue a text, and model.layers is "bert"',
    ):
        build({"model": {"layers": "bert"}, "run": {"sample": "My fellow"}})


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match='model.preset must be one of "bert-345m", "gpt2-345m", .* got \'gpt5\''
    ):
        build({"model": {"preset": "gpt5"}})


@pytest.mark.parametrize(
    ("table", "named"),
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
def test_nccl_is_refused_what_it_cannot_move(
    table: dict[str, dict[str, object]], named: str
) -> None:
    transport = {"kind": "nccl", **table.get("transport", {})}
    with pytest.raises(ConfigError, match=f'with transport.kind "nccl" {named}'):
        build({**table, "transport": transport})


SERVED = {"kind": "parameter-server", "replicas": 2}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"data_parallel": {"kind": "all-reduce", "staleness": 1}}, "go with data_parallel.kind"),
        ({"data_parallel": {**SERVED, "delay": True}}, "which has data_parallel.staleness instead"),
        ({"data_parallel": {**SERVED, "address": "10.0.0.1"}}, "must be HOST:PORT"),
        ({"data_parallel": {**SERVED, "address": ["a:1", "b:2"]}}, "lists 2 servers"),
        ({"data_parallel": {**SERVED, "staleness": 1}}, "set train.clip_norm = 0"),
        (
            {"data_parallel": {**SERVED, "wire": "int8"}, "model": {"tie_embeddings": True}},
            "tied embedding",
        ),
    ],
)
def test_parameter_server_that_cannot_work_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(table)


def test_torch_group_that_rounds_each_sum_refuses_a_tied_embedding_from_three_replicas_on() -> None:
    """Of two there is one order to add in."""
    given = {"kind": "all-reduce", "group": "torch", "wire": "bf16"}
    table = {"model": {"tie_embeddings": True}, "train": {"batch_size": 24}}
    build({**table, "data_parallel": {**given, "replicas": 2}})
    with pytest.raises(
        ConfigError, match='set data_parallel.wire = "none", leave data_parallel.group out'
    ):
        build({**table, "data_parallel": {**given, "replicas": 3}})


def test_one_address_of_a_server_may_be_a_string() -> None:
    assert build(
        {"data_parallel": {**SERVED, "address": "10.0.0.1:7100"}}
    ).data_parallel.address == ("10.0.0.1:7100",)


@pytest.mark.parametrize(
    ("chosen", "words"),
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
    chosen: dict[str, Any], words: str
) -> None:
    """They were as fast as the machine is, and predicted to be as slow as the shape."""
    table = {"data_parallel": {**chosen, "replicas": 2}}
    build(table)
    with pytest.raises(
        ConfigError, match=f"transport.shape slows the links of the ranks, and {words}"
    ):
        build({**table, "transport": {"shape": "slow.toml"}})


def test_half_parameters_need_half_precision() -> None:
    with pytest.raises(
        ConfigError, match="train.parameters 'bf16' computes in bf16, but train.precision is 'fp32'"
    ):
        build({"train": {"parameters": "bf16"}})


@pytest.mark.parametrize("schedule", ["zero-bubble", "auto"])
def test_compiled_layers_refuse_a_schedule_that_splits_the_backward_pass(schedule: str) -> None:
    with pytest.raises(
        ConfigError, match=f'with train.compile pipeline.schedule must not be "{schedule}"'
    ):
        build({"train": {"compile": True}, "pipeline": {"schedule": schedule}})
