import pytest

from dpipe.baselines.gloo import compare_transport


def test_comparison_gives_the_rate_of_each_way_and_its_ratio() -> None:
    rows = compare_transport(num_bytes=1 << 16, repeats=2)
    assert [row["way"] for row in rows] == ["gloo", "grpc x1", "grpc x2", "tcp x1"]
    gloo = rows[0]["gb_per_s"]
    assert gloo > 0
    assert [row["over gloo"] for row in rows] == pytest.approx([row["gb_per_s"] / gloo for row in rows])
