"""The table of model families, and that a family needs nothing but its entry."""

from collections.abc import Iterator

import pytest

from dpipe.choices import function_at
from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.plan.costs import layer_flops, layer_parameter_bytes
from dpipe.plan.run_plan import make_model
from dpipe.stage.bert import bert
from dpipe.stage.families import FAMILIES, USERS_OWN, Family, family_of
from dpipe.stage.flops import gpt_layer_flops, gpt_layer_parameter_bytes
from dpipe.stage.gpt import gpt
from dpipe.stage.model import LayeredModel


def toy(**sizes: object) -> LayeredModel:
    return gpt(**sizes)  # type: ignore[arg-type]


@pytest.fixture
def toy_family() -> Iterator[Family]:
    yield FAMILIES.add(
        Family(
            "toy",
            builder=f"{__name__}:toy",
            layer_flops=gpt_layer_flops,
            layer_parameter_bytes=gpt_layer_parameter_bytes,
            continues_text=False,
            ties_embeddings=True,
        )
    )
    FAMILIES.remove("toy")


def test_builders_are_the_functions_that_make_the_models() -> None:
    builders = {name: family.builder for name, family in FAMILIES.items()}
    assert {name: function_at(path) for name, path in builders.items() if path} == {
        "gpt": gpt,
        "bert": bert,
    }


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_transformer_is_costed_by_formula(family: Family) -> None:
    formulas = {family.layer_flops is not None, family.layer_parameter_bytes is not None}
    assert formulas == {family.is_transformer}


def test_users_own_layers_are_no_entry_of_the_table() -> None:
    assert family_of("my.model:layers") is USERS_OWN
    assert not USERS_OWN.is_transformer
    assert USERS_OWN.computes
    assert USERS_OWN.name not in FAMILIES


def test_added_family_is_configured_costed_and_built(toy_family: Family) -> None:
    config = build({"model": {"layers": "toy", "num_layers": 3, "width": 32}})
    assert config.model.family is toy_family
    assert config.model.tie_embeddings  # as declared by the family
    assert not build({"model": {"layers": "toy", "tie_embeddings": False}}).model.tie_embeddings
    assert len(make_model(config).layers) == 5
    assert len(layer_flops(config, 1)) == len(layer_parameter_bytes(config)) == 5


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"run": {"sample": "My fellow"}}, 'continue a text, and model.layers is "toy"'),
        ({"tensor_parallel": {"size": 2}}, "splits the layers of dpipe's own models"),
    ],
)
def test_added_family_is_refused_what_it_cannot_do(
    toy_family: Family, table: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"model": {"layers": toy_family.name}, **table})


def test_unknown_layers_are_refused_with_the_names_of_all_families(toy_family: Family) -> None:
    with pytest.raises(
        ConfigError, match='must be one of "gpt", "bert", "replay", "toy", "package'
    ):
        build({"model": {"layers": "lstm"}})
