import pytest

from dpipe.bench.gloo import _row, compare_transport
from dpipe.bench.loopback import measure_loopback


def test_comparison_gives_the_rate_of_each_way_and_its_ratio() -> None:
    rows = compare_transport(num_bytes=1 << 16, repeats=2)
    assert [row["way"] for row in rows] == ["gloo", "grpc x1", "grpc x2", "tcp x1"]
    assert rows[0]["over gloo"] == 1.0
    assert min(row["gb_per_s"] for row in rows) > 0


def test_rate_over_gloo_is_the_middle_of_the_rounds() -> None:
    row = _row("tcp x1", 500_000_000, [1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert (row["gb_per_s"], row["over gloo"], row["middle half"]) == (1.0, 1.0, "0.500 to 2.000")


@pytest.mark.alone  # beside other load a large message may seem as quick as a small one
@pytest.mark.parametrize("way", ["grpc x1", "tcp x1"])
def test_loopback_is_measured_as_a_link_with_core_time_of_its_messages(way: str) -> None:
    found = measure_loopback(way, num_bytes=400_000)
    assert 0 <= found.link.delay_ms < 100  # what the work of both ends leaves of a message
    assert 0.01 < found.link.bandwidth_gbps < 1000
    assert 0 < found.host([0, 1], computes=False).bytes_us(1_000_000) < 100_000
