"""The memory of leaving a replica out: a gradient beside the mean, only on a GPU."""

import pytest

from dpipe.config.load import build
from dpipe.memory.exchange import exchange_bytes

SIZE = 1_000_000


@pytest.mark.parametrize(
    ("device", "kind", "group", "more"),
    [
        ("cpu", "all-reduce", "dpipe", 0),
        ("cpu", "sharded", "dpipe", 0),
        ("cuda", "all-reduce", "dpipe", SIZE),
        ("cuda", "all-reduce", "torch", 0),
        ("cuda", "sharded", "dpipe", 0),
    ],
)
def test_own_gradient_is_counted_where_the_mean_is_a_copy(
    device: str, kind: str, group: str, more: int
) -> None:
    def held(**extra: str) -> int:
        replicas = {"kind": kind, "replicas": 2, "group": group, **extra}
        config = build({"data_parallel": replicas, "node": {"device": device}})
        (size,) = exchange_bytes(config, [SIZE], [])
        return size

    assert held(reject="nonfinite") - held() == more
