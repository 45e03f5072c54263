"""axolotl's files become ours, and what does not is said."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpipe.cli.main import main
from dpipe.config.load import build, load
from dpipe.convert.axolotl import _ALWAYS, _KEYS, _TOGETHER, converted
from dpipe.errors import ConfigError

EXAMPLES = Path(__file__).parent / "examples"
LORA = {
    "base_model": "org/model",
    "datasets": [{"path": "chats.jsonl", "type": "chat_template"}],
    "sequence_len": 2048,
    "sample_packing": True,
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 3,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "warmup_ratio": 0.1,
    "train_on_inputs": False,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "val_set_size": 0.05,
    "output_dir": "outputs/run",
}


def of(**changes: object) -> tuple[dict[str, dict[str, object]], list[str]]:
    text, left_out = converted({**LORA, **changes})
    return tomllib.loads(text), left_out


def test_lora_job_comes_over_whole() -> None:
    table, left_out = of()
    assert left_out == []
    config = build(table)
    assert (config.model.hf, config.model.context) == ("org/model", 2048)
    assert (config.adapter.kind, config.adapter.r, config.adapter.alpha) == ("lora", 8, 16.0)
    assert (config.train.batch_size, config.train.num_microbatches) == (8, 4)
    assert (config.train.epochs, config.train.warmup_ratio) == (3.0, 0.1)
    assert (config.train.optimizer, config.train.precision) == ("adamw_8bit", "bf16")
    assert (config.data.files, config.data.format) == (("chats.jsonl",), "chat")
    assert (config.pipeline.recompute, config.run.folder) == ("full", "outputs/run")


def test_base_of_few_bits_comes_over() -> None:
    for key, base in (("load_in_8bit", "int8"), ("load_in_4bit", "nf4")):
        table, left_out = of(adapter="qlora", **{key: True})
        assert left_out == []
        assert build(table).adapter.base == base


def test_defaults_are_those_of_axolotl() -> None:
    config = build(of(sample_packing=None, val_set_size=None)[0])
    assert (config.train.weight_decay, config.train.betas) == (0.0, (0.9, 0.999))
    assert (config.data.packing, config.data.held_out) == (False, 0.0)


def test_keys_without_a_counterpart_are_named() -> None:
    _, left_out = of(deepspeed="zero3.json", optimizer="galore_adamw", load_in_8bit=False)
    assert left_out == [
        "optimizer = 'galore_adamw' has no counterpart",
        "deepspeed = 'zero3.json' has no counterpart",
    ]


def test_steps_take_the_place_of_epochs() -> None:
    table, _ = of(max_steps=50)
    assert table["train"]["steps"] == 50
    assert "epochs" not in table["train"]


def test_data_set_of_the_hub_is_a_split() -> None:
    sets = [{"path": "org/chats", "type": "alpaca", "split": "test"}, {"path": "org/more"}]
    table, left_out = of(datasets=sets)
    assert table["data"]["hub"] == "org/chats:test"
    assert table["data"]["format"] == "instruction"
    assert "org/more is the second source" in left_out[-1]


def test_stream_comes_over() -> None:
    table, left_out = of(
        datasets=[{"path": "json", "data_files": ["a.jsonl"], "type": "chat_template"}],
        test_datasets=[{"path": "b.jsonl", "ds_type": "json", "type": "chat_template"}],
        streaming=True,
        streaming_multipack_buffer_size=500,
        max_steps=50,
        val_set_size=0,
    )
    assert left_out == []
    data = build(table).data
    assert (data.streaming, data.shuffle) == (True, 500)
    assert (data.files, data.held_out) == (("a.jsonl",), ("b.jsonl",))
    assert of(shuffle_merged_datasets=False)[0]["data"]["shuffle"] == "none"


def test_texts_come_over_and_are_split() -> None:
    table, left_out = of(datasets=[{"path": "books.jsonl", "type": "completion", "field": "text"}])
    assert left_out == []
    data = build(table).data
    assert (data.format, data.too_long) == ("completion", "split")
    texts = [{"path": "books.jsonl", "type": "completion"}]
    table, _ = of(datasets=texts, excess_length_strategy="truncate")
    assert table["data"]["too_long"] == "truncate"


def test_texts_to_pretrain_on_are_a_stream() -> None:
    source = {"path": "org/web", "split": "train", "text_column": "text", "type": "pretrain"}
    changes = {"datasets": None, "val_set_size": 0, "eval_steps": None, "max_steps": 50}
    table, left_out = of(pretraining_dataset=[source], **changes)
    assert left_out == []
    data = build(table).data
    assert (data.hub, data.format, data.streaming) == ("org/web:train", "completion", True)
    assert of(pretraining_dataset="org/web", **changes)[0]["data"]["hub"] == "org/web:train"


def test_column_of_another_name_is_named() -> None:
    texts = [{"path": "books.jsonl", "type": "completion", "field": "body"}]
    assert of(datasets=texts)[1] == ["datasets: field = 'body' of books.jsonl has no counterpart"]


def test_precision_is_that_of_the_key_that_is_true() -> None:
    assert of(bf16=True, fp16=False)[0]["train"]["precision"] == "bf16"
    assert of(bf16=False, fp16=True)[0]["train"]["precision"] == "fp16"


def test_learning_rate_falls_to_a_share() -> None:
    assert of(cosine_min_lr_ratio=0.1)[0]["train"]["min_learning_rate"] == pytest.approx(2e-5)


def test_nothing_is_evaluated_where_nothing_is_held_out() -> None:
    table, left_out = of(val_set_size=0.0, eval_steps=100)
    assert "eval_every" not in table["train"]
    assert left_out == ["train.eval_every is left out, because nothing is held out"]


def test_all_linear_layers_contain_those_that_are_named() -> None:
    table, _ = of(lora_target_modules=["q_proj"])
    assert table["adapter"]["target_modules"] == "all-linear"


def test_key_of_a_data_set_that_is_not_read_is_named() -> None:
    shares = {
        "path": "org/chats",
        "type": "chat_template",
        "split": "train[:20%]",
        "field_messages": "conversations",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles_to_train": ["user"],
    }
    table, left_out = of(datasets=[shares])
    assert table["data"]["hub"] == "org/chats:train"
    assert left_out == [
        "datasets: roles_to_train = ['user'] of org/chats has no counterpart",
        "datasets: of org/chats all of train is read, not [:20%]",
    ]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_key_of_a_usual_file_is_mapped_or_named(name) -> None:
    """Files like those that axolotl publishes as examples."""
    yaml = pytest.importorskip("yaml")
    theirs = yaml.safe_load((EXAMPLES / name).read_text())
    text, left_out = converted(theirs)
    config = build(tomllib.loads(text))
    assert config.train.batch_size == theirs["micro_batch_size"] * config.train.num_microbatches
    said = " ".join(left_out)
    known = {*_KEYS, *_TOGETHER, *_ALWAYS}
    assert all(key in known or f"{key} = " in said for key, value in theirs.items() if value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": "fast"}, "learning_rate 'fast' is not a value that axolotl takes"),
        ({"datasets": "chats"}, "datasets 'chats' must be a list of tables"),
        ({"micro_batch_size": "two"}, "micro_batch_size 'two' must be counts"),
    ],
)
def test_value_of_another_kind_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        converted({**LORA, **changes})


def test_command_writes_a_file_that_loads(tmp_path) -> None:
    yaml = pytest.importorskip("yaml")
    source = tmp_path / "axolotl.yaml"
    source.write_text(yaml.safe_dump({**LORA, "deepspeed": "zero3.json"}))
    target = tmp_path / "job.toml"
    argv = ["convert", str(source), "--to", str(target)]
    done = CliRunner().invoke(main, argv)
    assert done.exit_code == 0
    assert f"{source}: deepspeed = 'zero3.json' has no counterpart" in done.output
    assert load(target).model.hf == "org/model"
    assert "name another file" in CliRunner().invoke(main, argv).output


@pytest.mark.parametrize("content", ["- a list", "a: [broken"])
def test_file_that_is_no_table_is_refused(content: str, tmp_path) -> None:
    pytest.importorskip("yaml")
    source = tmp_path / "axolotl.yaml"
    source.write_text(content)
    done = CliRunner().invoke(main, ["convert", str(source)])
    assert done.exit_code == 2
    assert "YAML" in done.output
