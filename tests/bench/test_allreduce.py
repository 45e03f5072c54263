import pytest

from dpipe.bench.allreduce import compare_here


@pytest.mark.slow
def test_every_way_averages_in_turns_with_gloo() -> None:
    rows = compare_here(num_bytes=4096, processes=2, repeats=1)
    ways = [row["way"] for row in rows]
    assert ways[0] == "gloo"
    assert {"tcp x1", "grpc x4", "tcp x4 int8"} <= set(ways)
    assert rows[0]["times as fast as gloo"] == 1.0
    assert all(row["seconds"] > 0 for row in rows)
