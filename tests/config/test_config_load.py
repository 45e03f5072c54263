"""Reading a configuration: the file, its overrides, its mistakes, its digest."""

import json
from pathlib import Path

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
    ],
)
def test_mistake_is_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(table)


@pytest.mark.parametrize(
    "key", ["predict.gflops", "predict.machine_delay_ms", "train.learning_rate"]
)
def test_number_that_is_not_finite_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: Input should be a finite number, got inf"):
        load(written(tmp_path, ""), (f"{key}=inf",))


@pytest.mark.parametrize(
    "override", ["train.steps=true", "train.betas=[true, 0.9]", "train.eval_every=false"]
)
def test_boolean_is_refused_as_a_number(tmp_path: Path, override: str) -> None:
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


def test_override_of_an_unknown_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'train' is not a section"):
        load(written(tmp_path, "train = 3"), ("train.steps=5",))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load(tmp_path / "nowhere.toml")


def test_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"configuration .* cannot be read: Is a directory"):
        load(tmp_path)


def test_value_in_place_of_a_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train must be a section, \[train\], got 3$"):
        load(written(tmp_path, "train = 3"))


def test_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.toml is not TOML"):
        load(written(tmp_path, "steps 5"))


def test_json_of_a_run_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = build({"train": {"steps": 7}, "model": {"options": {"a": None}}})
    path.write_text(json.dumps(config.model_dump(mode="json", exclude={"node"})))
    assert load(path, ("train.seed=3",)) == config.with_(train__seed=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [("steps 5", "is not JSON"), ("[3]", "must be a JSON object of sections")],
)
def test_json_of_something_else_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("train = { steps = 7 }", encoding="utf-8-sig")
    assert load(path, ()).train.steps == 7


def test_string_in_place_of_a_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.files: Input should be a list, got 'x.txt'"):
        load(written(tmp_path, "data = { files = 'x.txt' }"), ())


def test_key_that_is_left_out_stays_unset() -> None:
    """A sweep finds its results by the keys that were set, whatever the defaults are."""
    assert build({"model": {"width": 64}}).model.model_fields_set == {"width"}


def test_digest_depends_on_keys_that_ranks_share() -> None:
    assert build({"train": {"steps": 5}}).digest() != Config().digest()


def test_digest_leaves_out_the_node_section() -> None:
    assert build({"node": {"port": 7000, "threads": 4}}).digest() == Config().digest()


def test_configuration_survives_json() -> None:
    config = build({"pipeline": {"stages": 2, "split": [3, 3]}})
    table: dict[str, dict[str, object]] = {}
    for name, value in config.shared().items():
        section, _, key = name.partition(".")
        table.setdefault(section, {})[key] = value
    assert build(table) == config
