from dpipe.baselines.gloo import compare_transport


def test_comparison_gives_the_rate_of_each_way_and_their_ratio() -> None:
    result = compare_transport(num_bytes=1 << 16, repeats=2, connections=(1, 2))
    rates = result["gb_per_s"]
    assert set(rates) == {"gloo", "grpc x1", "grpc x2"}
    assert all(rate > 0 for rate in rates.values())
    assert result["over_gloo"] == {name: rates[name] / rates["gloo"] for name in ("grpc x1", "grpc x2")}
