"""The configuration that a file results in, key by key."""

from pathlib import Path

import pytest

from dpipe.config import effective
from dpipe.config.effective import Setting, settings
from dpipe.config.load import load
from dpipe.errors import ConfigError

JOB = """
model = { preset = "gpt3-xl", num_layers = 2, options = { "a b" = [1, 2.5], name = "ü" } }
run = { folder = 'runs/"quoted"' }
node = { token = "hunter2" }
pipeline = { stages = 2, split = [2, 2] }
"""
OVERRIDES = ("train.steps=5", "model.width=4096", "run.sample=My fellow")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_each_value_has_its_origin(job: Path) -> None:
    by_name = {setting.name: setting for setting in settings(job, OVERRIDES)}
    assert [by_name[f"model.{key}"] for key in ("num_layers", "width", "num_heads", "dropout")] == [
        Setting("model.num_layers", 2, str(job)),
        Setting("model.width", 4096, "override"),
        Setting("model.num_heads", 16, "preset gpt3-xl"),
        Setting("model.dropout", 0.0, "default"),
    ]
    assert by_name["train.steps"].origin == "override"


def test_text_is_a_file_of_the_same_meaning(job: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.toml"
    again.write_text(effective.text(settings(job, OVERRIDES)), encoding="utf-8")
    config = load(job, OVERRIDES)
    assert load(again) == config.with_(node__token="")


def test_text_is_laid_out_by_section(job: Path) -> None:
    text = effective.text(settings(job))
    assert text.startswith(
        '[model]\nlayers = "gpt"                                      # default\n'
    )
    assert "\n\n[train]\n" in text
    assert "\n# eval_every is left out                            # default\n" in text


def test_token_is_not_shown(job: Path) -> None:
    assert "hunter2" not in effective.text(settings(job))
    assert "# token is not shown" in effective.text(settings(job))
    assert effective.as_json(settings(job))["node.token"] == {"value": None, "origin": str(job)}


def test_unset_token_is_not_hidden(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("")
    assert effective.as_json(settings(path))["node.token"] == {"value": "", "origin": "default"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = 3", r"train must be a section, \[train\], got 3"),
        ("trian = { steps = 3 }", "unknown key 'trian'; did you mean 'train'"),
        ("model = { preset = 'gpt5' }", "model.preset must be one of \"bert-345m\", .* got 'gpt5'"),
        ("model = { preset = ['gpt3-xl'] }", "model.preset: Input should be a valid string"),
    ],
)
def test_mistake_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        settings(path)
