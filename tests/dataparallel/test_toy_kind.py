"""A user's own kind: the rest of dpipe needs nothing but its declaration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_kind

from dpipe.config.load import Config
from dpipe.errors import ConfigError

Make = Callable[..., Config]


@pytest.fixture
def replicated(tiny: Make, tmp_path: Path) -> Make:
    def make(kind: str, **settings: Any) -> Config:
        return tiny(
            data_parallel__kind=kind,
            data_parallel__replicas=2,
            run__folder=str(tmp_path / kind),
            **settings,
        )

    return make


def test_kind_declared_in_one_file_trains_replicas(
    replicated: Make, losses: Callable[..., list[float]]
) -> None:
    two_stages = {"pipeline__stages": 2, "pipeline__memory_gb": 1.0}
    with toy_kind.declared():
        toy = losses(replicated("toy", **two_stages))
    assert toy == losses(replicated("all-reduce", **two_stages))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay": True}, 'data_parallel.delay does not go with data_parallel.kind "toy"$'),
        ({"group": "torch"}, '"torch" goes with data_parallel.kind "all-reduce" .* not \'toy\''),
        ({"staleness": 1}, 'go with data_parallel.kind "parameter-server", not with "toy"'),
        ({"overlap": True}, "go with data_parallel.kind \"local-sgd\", not 'toy'"),
        ({"fragments": 2}, "go with data_parallel.kind \"local-sgd\", not 'toy'"),
    ],
)
def test_undeclared_property_of_a_kind_is_refused(
    settings: dict[str, Any], message: str, replicated: Make
) -> None:
    keys = {f"data_parallel__{key}": value for key, value in settings.items()}
    with toy_kind.declared(), pytest.raises(ConfigError, match=message):
        replicated("toy", **keys)


def test_undeclared_kind_is_refused(replicated: Make) -> None:
    with pytest.raises(ConfigError, match="data_parallel.kind.*'toy'"):
        replicated("toy")
