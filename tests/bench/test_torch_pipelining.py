import pytest

from dpipe.bench.torch_pipelining import Size, compare_pipelining

TINY = Size(
    num_layers=2,
    width=16,
    num_heads=2,
    context=16,
    num_microbatches=2,
    microbatch_size=2,
    num_steps=4,
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])  # of torch itself, and by CSV
def test_both_engines_have_the_same_losses_and_are_timed(schedule: str) -> None:
    row = compare_pipelining(schedule, TINY)
    assert row["loss difference"] < 1e-5
    low, high = map(float, row["middle half"].split(" to "))
    assert 0 < low <= round(row["dpipe / torch"], 3) <= high
    assert min(row["dpipe_s"], row["torch_s"]) > 0
