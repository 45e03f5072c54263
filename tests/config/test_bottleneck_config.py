"""What `model.bottleneck_width` goes with."""

from typing import Any

import pytest

from dpipe.config.load import build
from dpipe.errors import ConfigError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bottleneck_width": 128}, "128 must be less than model.width 128"),
    ({"bottleneck_width": 8, "bottleneck_every": 3}, "4 must be a multiple of .*every 3"),
    ({"bottleneck_width": 8, "bottleneck_every": 4}, "4 must be .* at least twice it"),
    ({"bottleneck_every": 2}, "set model.bottleneck_width, or leave it out"),
    ({"bottleneck_width": 8, "layers": "bert"}, 'for model.layers "gpt", not "bert"'),
]


@pytest.mark.parametrize(("model", "message"), REFUSED)
def test_model_without_such_bottlenecks_says_what_to_change(
    model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"model": model})


def test_tensor_parallel_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave tensor_parallel.size out"):
        build({"model": {"bottleneck_width": 8}, "tensor_parallel": {"size": 2}})
