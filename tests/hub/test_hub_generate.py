"""Text from a published model: each token goes through its layers once."""

import pytest

from dpipe.config.load import build
from dpipe.data.sampling import continue_ids
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise

published = pytest.importorskip("hub.published")
layers_module = pytest.importorskip("dpipe.hub.layers")


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("family", published.FAMILIES)
def test_tokens_are_those_without_a_cache_and_go_through_once(family, tmp_path):
    """Past a sliding window of 6, and past the context of 20, from where on nothing is kept."""
    folder = published.save(family, tmp_path / "model")
    model = make_model(build({"model": {"hf": str(folder), "context": 20}}))
    layers = [materialise(model, index, 0, "cpu").eval() for index in range(6)]
    lengths = []
    layers[1].register_forward_hook(lambda _, given, made: lengths.append(given[0].shape[1]))
    asked = published.tokens(1, 9)[0].tolist()
    arguments = (layers, asked, 14, 20, 97, 0.0, 0)
    expected = continue_ids(*arguments)
    lengths.clear()
    assert continue_ids(*arguments, keys=layers_module.HubKeyCache(layers)) == expected
    assert lengths == [9] + [1] * 11 + [20] * 2
    # Nothing is kept behind it.
    assert continue_ids(*arguments) == expected
