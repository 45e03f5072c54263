"""The reference of all keys, from the sections' own declarations."""

import re

import pytest

from dpipe.config import reference
from dpipe.config.load import Config
from dpipe.config.reference import Key

KEYS = [key for section in reference.sections() for key in section.keys]


def key(name: str) -> Key:
    return next(key for key in KEYS if key.name == name)


def test_every_key_of_a_configuration_is_there() -> None:
    assert {key.name for key in KEYS} == {
        *Config().shared(),
        *(f"node.{name}" for name in Config().node.model_dump()),
    }


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_key_has_a_meaning(key: Key) -> None:
    """One to three whole sentences."""
    assert re.fullmatch(r"\S.{9,239}\.", key.meaning)
    # a key that may be left out says what that means
    if not key.default:
        assert "Left out:" in key.meaning or key.name in ("node.tls_key", "node.tls_ca")


@pytest.mark.parametrize("section", reference.sections(), ids=lambda section: section.name)
def test_section_says_what_it_is_for(section: reference.SectionReference) -> None:
    assert re.fullmatch(r"\S.{9,}\.", section.meaning)


@pytest.mark.parametrize(
    ("name", "values", "default"),
    [
        ("train.steps", "integer, at least 1", "100"),
        ("train.clip_norm", "number, at least 0", "1.0"),
        ("train.betas", "list of 2 numbers, at least 0, below 1", "[0.9, 0.95]"),
        ("train.decay", '"cosine", "linear", "none"', '"cosine"'),
        ("train.compile", "boolean", "false"),
        ("train.eval_every", "integer, at least 1", ""),
        ("model.options", "table", "{}"),
        ("data.files", "list of strings", "[]"),
        ("replay.forward_ms", "number, at least 0, or list of numbers, at least 0", "10.0"),
        ("timeouts.join", "number, above 0, at most 2,592,000", "120.0"),
        ("transport.connections", 'integer, 1 to 1,024, or "auto"', '"auto"'),
        ("node.port", "integer, 0 to 65,535", "0"),
    ],
)
def test_key_has_its_type(name: str, values: str, default: str) -> None:
    assert key(name).values() == values
    assert key(name).default == default


def test_choice_lists_the_names_of_its_table() -> None:
    assert key("model.preset").values().startswith('"bert-345m", "gpt2-345m", "gpt3-xl"')


def test_text_is_readable_at_100_columns() -> None:
    assert max(len(line) for line in reference.text().splitlines()) <= 100
    assert (
        "  steps = 100                           integer, at least 1\n"
        "      Optimizer steps of the whole run."
    ) in reference.text()


def test_markdown_has_a_table_a_section_with_a_row_a_key() -> None:
    lines = reference.markdown().splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        f"## `[{name}]`" for name in Config.model_fields
    ]
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(KEYS)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert any(
        row.startswith('| `train.decay` | `"cosine"`, `"linear"`, `"none"` |') for row in rows
    )


def test_json_has_an_object_a_key() -> None:
    (steps,) = [each for each in reference.as_json() if each["key"] == "train.steps"]
    assert steps == {
        "key": "train.steps",
        "type": "integer",
        "allowed": "integer, at least 1",
        "default": "100",
        "meaning": key("train.steps").meaning,
    }
