"""Sizes by name: they are those published, and each can be overridden."""

import pytest

from dpipe.config.load import build
from dpipe.errors import ConfigError

# in 10^9, as published
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
    assert parameters / 1e9 == pytest.approx(published, rel=0.03)  # published numbers are rounded


def test_size_that_is_set_wins_over_the_preset() -> None:
    model = build({"model": {"preset": "gpt3-xl", "num_layers": 2}}).model
    assert (model.num_layers, model.width, model.context) == (2, 2048, 2048)


def test_embeddings_of_bert_are_tied_unless_set_otherwise() -> None:
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


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match='model.preset must be one of "bert-345m", "gpt2-345m", .* got \'gpt5\''
    ):
        build({"model": {"preset": "gpt5"}})
