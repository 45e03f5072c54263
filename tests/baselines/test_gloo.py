import pytest

from dpipe.baselines.gloo import compare_transport
from dpipe.baselines.loopback import measure_link


def test_comparison_gives_the_rate_of_each_way_and_its_ratio() -> None:
    rows = compare_transport(num_bytes=1 << 16, repeats=2)
    assert [row["way"] for row in rows] == ["gloo", "grpc x1", "grpc x2", "tcp x1"]
    gloo = rows[0]["gb_per_s"]
    assert gloo > 0
    assert [row["over gloo"] for row in rows] == pytest.approx([row["gb_per_s"] / gloo for row in rows])


@pytest.mark.parametrize("way", ["grpc x1", "tcp x1"])
def test_link_is_measured_as_a_delay_and_a_bandwidth(way: str) -> None:
    link = measure_link(way, num_bytes=400_000)
    assert 0 < link.delay_ms < 100
    assert 0.01 < link.bandwidth_gbps < 1000
