import json
from pathlib import Path

import pytest

from dpipe.config import Config, build
from dpipe.engine.forecast import (
    LayerCosts,
    assumed_network,
    forecast,
    forecast_text,
    gpt_costs,
    stage_cost,
    vocabulary,
)
from dpipe.errors import ConfigError, ScheduleError
from dpipe.topology import Link, Network

FREE = Network("free", Link(delay_ms=0, bandwidth_gbps=1000))


def a_replay(**pipeline: object) -> Config:
    train = {"batch_size": 8, "num_microbatches": 8}
    replay = {"forward_ms": 10, "backward_ms": 20, "message_bytes": 1000}
    return build({"model": {"layers": "replay"}, "replay": replay, "train": train, "pipeline": pipeline})


def test_gpipe_takes_the_textbook_time() -> None:
    # (M + S - 1) (F + B), Huang et al. 2019
    found = forecast(a_replay(stages=4, schedule="gpipe"), network=FREE)
    assert found.timeline.duration_us == pytest.approx((8 + 3) * 30_000, rel=1e-4)


def test_backward_of_a_gpt_is_twice_its_forward() -> None:
    costs = gpt_costs(Config())
    assert costs.backward_s == tuple(2 * s for s in costs.forward_s)


def test_wire_format_decides_the_bytes_of_a_hop() -> None:
    plain, half = (gpt_costs(build({"pipeline": {"wire": wire}})).activation_bytes[0] for wire in ("none", "bf16"))
    assert plain == 2 * half == 4 * 4 * 128 * 128


def test_recomputation_runs_forward_once_more_before_the_input_gradient() -> None:
    layers = LayerCosts((1.0, 1.0), (2.0, 2.0), (0, 0), (0, 0))
    cost = stage_cost(layers, (1, 1), recompute=True)
    assert (cost.backward_us, cost.input_us, cost.weight_us) == ((3e6, 3e6), (2e6, 2e6), (1e6, 1e6))


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 layers cannot make 7 stages"):
        forecast(build({"pipeline": {"stages": 7}}))


def test_split_that_places_other_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"split \[3, 4\] places 7 layers, but the model has 6 \(an embedding,"):
        forecast(build({"pipeline": {"stages": 2, "split": [3, 4]}}))


def test_parameter_that_a_schedule_does_not_have_is_refused() -> None:
    with pytest.raises(ScheduleError, match="memory_limit"):
        forecast(a_replay(stages=2, schedule="1f1b", memory_limit=2))


def test_auto_is_no_slower_than_any_schedule_it_knows() -> None:
    times = {
        name: forecast(a_replay(stages=4, schedule=name)).timeline.duration_us
        for name in ("auto", "gpipe", "1f1b", "zero-bubble")
    }
    assert times["auto"] == min(times.values())


def test_auto_keeps_the_memory_limit() -> None:
    from dpipe.schedule.check import peak_in_flight

    found = forecast(a_replay(stages=4, schedule="auto", memory_limit=5))
    assert max(peak_in_flight(found.schedule)) <= 5


def test_replay_with_another_number_of_times_than_stages_is_refused() -> None:
    config = build({"model": {"layers": "replay"}, "replay": {"forward_ms": [1, 2, 3]}, "pipeline": {"stages": 2}})
    with pytest.raises(ConfigError, match=r"lists 3 stage times, but pipeline.stages is 2"):
        forecast(config)


def test_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer .*nowhere.json cannot be read"):
        vocabulary(str(tmp_path / "nowhere.json"))


def test_text_and_json_tell_the_same(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[pipeline]\nstages = 2\n")
    row = json.loads(forecast_text(str(path), (), None, as_json=True))
    text = forecast_text(str(path), (), None, as_json=False)
    assert f"{row['step_s']:.4f} s, assuming 20 GFLOP/s a rank" in text
    assert "peak in flight  2 1 micro-batches" in text


def test_network_is_loopback_unless_a_profile_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text("delay_ms = 50\nbandwidth_gbps = 1\n")
    assert assumed_network(str(tmp_path / "slow.toml"), 1).link(0, 1).delay_ms == 50
    assert assumed_network(None, 1).name == "loopback"


def test_profile_of_a_real_interface_counts_headers_and_a_shaped_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text("delay_ms = 1\nbandwidth_gbps = 1")
    far = str(tmp_path / "far.toml")
    real, shaped = (a_replay(stages=2).with_(**{key: far}) for key in ("predict__network", "transport__shape"))
    assert forecast(real).network.rate_gbps(0, 1) == pytest.approx(0.956, abs=1e-3)
    assert forecast(shaped).network.rate_gbps(0, 1) == 1
