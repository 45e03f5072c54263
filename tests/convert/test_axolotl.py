"""axolotl's files become ours, and what does not is said."""

import tomllib

import pytest
from click.testing import CliRunner

from dpipe.cli.main import main
from dpipe.config.load import build, load
from dpipe.convert.axolotl import converted
from dpipe.errors import ConfigError

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": "fast"}, "learning_rate 'fast' is not what axolotl takes"),
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
