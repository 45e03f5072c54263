from pathlib import Path

import pytest

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError
from dpipe.plan.forecast import forecast
from dpipe.plan.tensor_parallel import at_boundaries, exchange_s
from dpipe.plan.text import forecast_text
from dpipe.timeline.cost import Cost

MODEL = {"num_layers": 2, "width": 256, "num_heads": 8, "context": 64, "vocab_size": 256}
UNIT_BITS = 4 * 64 * 256 * 4 * 8 / 2  # of a micro-batch of four sequences in fp32, one half of it


def on_two(delay_ms: float = 0.0, **chosen: bool) -> Config:
    predict = {"machine_gbps": 1.0, "machine_delay_ms": delay_ms}
    return build({"model": MODEL, "predict": predict, "tensor_parallel": {"size": 2, **chosen}})


@pytest.mark.parametrize(
    ("sequence", "forward", "backward"),
    [(False, (2, 4, 4, 0), (0, 4, 4, 2)), (True, (1, 4, 4, 1), (1, 6, 6, 2))],
)
def test_layers_exchange_the_bytes_of_the_table(
    sequence: bool, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    """In units of (T - 1) / T u: embedding, two blocks, head."""
    there, back = exchange_s(on_two(sequence_parallel=sequence), num_layers=4)
    assert there == pytest.approx([units * UNIT_BITS / 1e9 for units in forward])
    assert back == pytest.approx([units * UNIT_BITS / 1e9 for units in backward])


def test_each_exchange_waits_out_the_delay_of_the_machine() -> None:
    (there, _), (plain, _) = (exchange_s(on_two(delay_ms), num_layers=3) for delay_ms in (5.0, 0.0))
    assert [a - b for a, b in zip(there, plain, strict=True)] == pytest.approx([0.005, 0.01, 0.01])


@pytest.mark.parametrize(
    ("chosen", "times", "gathers"),
    [({}, 1, True), ({"scatter_gather": False}, 2, False), ({"sequence_parallel": True}, 1, False)],
)
def test_machine_sends_an_activation_once_unless_each_rank_sends_all(
    chosen: dict[str, bool], times: int, gathers: bool
) -> None:
    cost = at_boundaries(on_two(**chosen), Cost.uniform(2, 10, 20, message_bytes=100))
    gather_us = UNIT_BITS / 1e3 * gathers
    assert (cost.activation_bytes, cost.gradient_bytes) == ((100 * times,), (100 * times,))
    assert cost.forward_us == pytest.approx([10, 10 + gather_us])
    assert cost.backward_us == pytest.approx([20 + gather_us, 20])


def test_arithmetic_is_divided_among_the_ranks() -> None:
    one, two = (build({"model": MODEL, "tensor_parallel": {"size": size}}) for size in (1, 2))
    free = {"predict__machine_gbps": 1e6, "predict__machine_delay_ms": 0}
    assert forecast(two.with_(**free)).cost.forward_us == pytest.approx(
        [us / 2 for us in forecast(one).cost.forward_us], rel=1e-3
    )


def test_parameters_are_divided_among_the_ranks() -> None:
    one, two = (
        forecast(build({"model": MODEL, "tensor_parallel": {"size": size}})).memory
        for size in (1, 2)
    )
    assert two[0].parameters == pytest.approx(
        one[0].parameters / 2, rel=0.05
    )  # norms, some biases, positions


def test_indivisible_vocabulary_is_refused_with_a_divisible_size() -> None:
    with pytest.raises(
        ConfigError, match=r"bytes has 256 entries, which .*size 3 does not divide; set .* = 258"
    ):
        forecast(build({"model": {"num_heads": 3, "width": 96}, "tensor_parallel": {"size": 3}}))


def test_simulation_explains_what_a_rank_is(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[pipeline]\nstages = 2\n[tensor_parallel]\nsize = 2\n")
    text = forecast_text(str(tmp_path / "job.toml"), (), None, as_json=False)
    assert "2 ranks a stage on one machine, assuming 16 Gbit/s and 0.1 ms between them" in text
    assert "rank 0 at most" in text
    assert "rank 2 at most" in text
