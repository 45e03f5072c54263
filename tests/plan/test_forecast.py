import json
from pathlib import Path
from typing import Any

import pytest

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError, ProfileError, ScheduleError
from dpipe.network.link import Link, Network
from dpipe.plan.assumed_network import assumed_network
from dpipe.plan.costs import LayerCosts, stage_cost, transformer_costs
from dpipe.plan.forecast import Forecast, forecast, server_ranks, without_search
from dpipe.plan.text import as_row, forecast_text
from dpipe.timeline.span import Lane
from dpipe.tokenizer.tokenizer import vocabulary
from dpipe.wire.format import HopFormats, MessageSize

FREE = Network("free", Link(delay_ms=0, bandwidth_gbps=1000))


ONE_SLOW_LINK = """
name = "one-slow"
delay_ms = 1
bandwidth_gbps = 1
link = [
    { from = 1, to = 2, delay_ms = 1, bandwidth_gbps = 0.02 },
    { from = 2, to = 1, delay_ms = 1, bandwidth_gbps = 0.0004 },
]
"""


def a_replay(**pipeline: object) -> Config:
    train = {"batch_size": 8, "num_microbatches": 8}
    replay = {"forward_ms": 10, "backward_ms": 20, "message_bytes": 1000}
    return build(
        {"model": {"layers": "replay"}, "replay": replay, "train": train, "pipeline": pipeline}
    )


def test_step_in_which_no_time_passes_has_no_row() -> None:
    still = {"model": {"layers": "replay"}, "replay": {"forward_ms": 0, "backward_ms": 0}}
    with pytest.raises(ConfigError, match="no time passes in such a step"):
        as_row(forecast(build(still)))


def test_gpipe_takes_the_textbook_time() -> None:
    # (M + S - 1) (F + B), Huang et al. 2019
    found = forecast(a_replay(stages=4, schedule="gpipe"), network=FREE)
    assert found.timeline.duration_us == pytest.approx((8 + 3) * 30_000, rel=1e-4)


def test_backward_of_a_gpt_is_twice_its_forward() -> None:
    costs = transformer_costs(Config())
    assert costs.backward_s == tuple(2 * s for s in costs.forward_s)


def test_wire_format_decides_the_bytes_of_a_hop() -> None:
    mixed = {
        "forward": "bf16",
        "backward": "none",
        "links": {"1-2": {"forward": "int8"}},
    }
    cost = forecast(build({"pipeline": {"stages": 4, "wire": mixed}})).cost
    values = 4 * 128 * 128
    int8_bytes = values + 4 * values // 256
    assert cost.activation_bytes == (2 * values, int8_bytes, 2 * values)
    assert cost.gradient_bytes == (4 * values,) * 3


def test_auto_takes_smaller_formats_only_where_they_save_time(tmp_path: Path) -> None:
    """Of three links the middle one is slow, in one of its directions."""
    profile = tmp_path / "one-slow.toml"
    profile.write_text(ONE_SLOW_LINK)
    config = a_replay(stages=4, schedule="1f1b", wire="auto", wire_allowed=["int8", "none", "bf16"])
    found = forecast(config.with_(predict__network=str(profile)))
    assert found.formats.forward == ("none", "none", "none")
    assert found.formats.backward == ("none", "int8", "none")
    fixed = config.with_(pipeline__wire="int8", predict__network=str(profile))
    assert found.step_us <= 1.005 * forecast(fixed).step_us


def test_recomputation_runs_forward_once_more_before_the_input_gradient() -> None:
    layers = LayerCosts((1.0, 1.0), (2.0, 2.0), (MessageSize(), MessageSize()))
    cost = stage_cost(layers, (1, 1), HopFormats.alike("none", 1), recompute="full")
    assert (cost.backward_us, cost.input_us, cost.weight_us) == ((3e6, 3e6), (2e6, 2e6), (1e6, 1e6))


def test_selective_recomputation_runs_the_attention_cores_once_more() -> None:
    layers = LayerCosts((1.0, 1.0), (2.0, 2.0), (MessageSize(), MessageSize()), core_s=(0.0, 0.25))
    cost = stage_cost(layers, (1, 1), HopFormats.alike("none", 1), recompute="selective")
    assert (cost.backward_us, cost.input_us) == ((2e6, 2.25e6), (1e6, 1.25e6))


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 layers cannot make 7 stages"):
        forecast(build({"pipeline": {"stages": 7}}))


def test_split_that_places_other_layers_than_there_are_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"split \[3, 4\] places 7 layers, but the model has 6 \(an embedding,"
    ):
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
    config = build(
        {
            "model": {"layers": "replay"},
            "replay": {"forward_ms": [1, 2, 3]},
            "pipeline": {"stages": 2},
        }
    )
    with pytest.raises(ConfigError, match=r"lists 3 values, but pipeline.stages is 2"):
        forecast(config)


def test_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer .*nowhere.json cannot be read"):
        vocabulary(str(tmp_path / "nowhere.json"))


def test_text_and_json_have_the_same_values(tmp_path: Path) -> None:
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


SLOW = Network("slow", Link(delay_ms=1, bandwidth_gbps=1))
ONE_GB = 125_000  # bytes that 1 Gbit/s carries in a millisecond


def replicated(kind: str, **data_parallel: object) -> Config:
    """Two stages whose gradients take 40 ms and 20 ms to leave a rank as a whole. Nothing is
    clipped, so that no rank waits for a vote.
    """
    train = {"batch_size": 16, "num_microbatches": 8, "clip_norm": 0}
    replay = {
        "forward_ms": 10,
        "backward_ms": 20,
        "message_bytes": 1000,
        "parameter_bytes": [40 * ONE_GB, 20 * ONE_GB],
    }
    chosen = {"kind": kind, "replicas": 2, "chunk_bytes": 4 << 20, **data_parallel}
    pipeline = {"stages": 2, "schedule": "gpipe"}
    return build(
        {
            "model": {"layers": "replay"},
            "replay": replay,
            "train": train,
            "pipeline": pipeline,
            "data_parallel": chosen,
        }
    )


def reduce_ms(config: Config) -> float:
    """The time that the exchange of replicas adds to a step on the slow network, on average."""
    alone = config.with_(data_parallel__replicas=1, train__batch_size=8)
    return (forecast(config, network=SLOW).step_us - forecast(alone, network=SLOW).step_us) / 1e3


def test_all_reduce_adds_what_the_first_stage_sends() -> None:
    # Half of it to the other replica and half of the average back, in two parts of which one hides
    # the other's delay; the second stage is through before.
    assert reduce_ms(replicated("all-reduce")) == pytest.approx(40 + 1, abs=0.1)


def test_clipping_adds_the_vote_to_a_step() -> None:
    """The last ballot is there one delay after the other replica's step has ended. The verdict is
    one delay on its way back, but then the coordinator's replica is ahead with all that it sends.
    """
    config = replicated("all-reduce")
    clipping = config.with_(train__clip_norm=1.0)
    step_ms, voted_ms = (forecast(c, network=SLOW).step_us / 1e3 for c in (config, clipping))
    assert voted_ms - step_ms == pytest.approx(1)


def test_vote_does_not_cross_a_network_that_the_transport_imitates(tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text("delay_ms = 50\nbandwidth_gbps = 1\n")
    far = str(tmp_path / "far.toml")
    table: dict[str, Any] = {"pipeline": {"stages": 2}, "predict": {"network": far}}
    imitated = {"pipeline": {"stages": 2}, "transport": {"shape": far}}
    votes_ms = [_vote_ms(forecast(build(each))) for each in (table, imitated)]
    assert votes_ms == pytest.approx([50, 0.1], abs=0.01)


def _vote_ms(found: Forecast) -> float:
    """The time from the last ballot, that of rank 0, to the verdict at rank 1."""
    timeline = found.timeline
    steps = [timeline.on(rank, Lane.UPDATE)[-1].start_us for rank in (0, 1)]
    return (steps[1] - steps[0]) / 1e3


def test_wire_of_the_gradient_decides_its_bytes() -> None:
    assert reduce_ms(replicated("all-reduce", wire="bf16")) == pytest.approx(20 + 1, abs=0.1)


def test_sharded_optimizer_gives_back_unrounded_parameters() -> None:
    assert reduce_ms(replicated("sharded", wire="bf16")) == pytest.approx(10 + 20 + 2, abs=1.1)


def test_delay_hides_the_exchange() -> None:
    """Except a part of 10 ms that a message of the pipeline may have to wait for."""
    assert reduce_ms(replicated("all-reduce", delay=True)) < 10.1


def test_local_sgd_pays_once_in_so_many_steps() -> None:
    assert reduce_ms(replicated("local-sgd", inner_steps=10)) == pytest.approx(
        (40 + 2) / 10, rel=0.1
    )
    assert (
        reduce_ms(replicated("local-sgd", inner_steps=10, overlap=True)) < 1.1
    )  # a part, in one of ten steps


def test_inner_steps_are_as_few_as_the_network_allows() -> None:
    slower = Network(default=Link(delay_ms=1, bandwidth_gbps=0.1))
    auto = forecast(replicated("local-sgd", inner_steps="auto"), network=slower)
    alone = forecast(replicated("local-sgd", inner_steps=10**9), network=slower)
    fewer = forecast(replicated("local-sgd", inner_steps=auto.inner_steps - 1), network=slower)
    assert auto.step_us <= 1.02 * alone.step_us < fewer.step_us


def test_fragments_exchange_as_much_in_smaller_pieces() -> None:
    whole, parts = (
        forecast(replicated("local-sgd", inner_steps=10, fragments=n), network=SLOW) for n in (1, 4)
    )
    assert parts.timeline.duration_us < whole.timeline.duration_us
    assert parts.step_us == pytest.approx(whole.step_us, rel=0.01)
    assert (whole.agreeing_share, parts.agreeing_share) == (0.1, 0.4)


def test_text_has_the_mean_step_and_the_one_with_the_exchange(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[data_parallel]\nkind = "local-sgd"\nreplicas = 2\ninner_steps = 50\n')
    row = json.loads(forecast_text(str(path), (), None, as_json=True))
    text = forecast_text(str(path), (), None, as_json=False)
    assert (
        f"{row['step_s']:.4f} s on average, {row['agreeing_step_s']:.4f} s where replicas agree"
        in text
    )
    assert row["link_bytes"]["0->1"] == row["link_bytes"]["1->0"] == row["reduce_bytes"][0] > 0


def a_gpt(**pipeline: object) -> Config:
    model = {"num_layers": 6, "width": 256, "num_heads": 4, "context": 128, "vocab_size": 512}
    train = {"batch_size": 64, "num_microbatches": 8}
    return build({"model": model, "train": train, "pipeline": {"stages": 2, **pipeline}})


def fullest(config: Config) -> int:
    return max(rank.total for rank in forecast(config).memory)


def test_memory_of_each_rank_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[pipeline]\nstages = 2\n")
    row = json.loads(forecast_text(str(path), (), None, as_json=True))
    assert len(row["memory"]) == 2
    assert all(
        sum(v for k, v in rank.items() if k != "total") == rank["total"] > 0
        for rank in row["memory"]
    )
    assert "rank 1 at most 0." in forecast_text(str(path), (), None, as_json=False)


def test_auto_keeps_the_memory_in_bytes() -> None:
    free, tight = a_gpt(schedule="auto"), fullest(a_gpt(schedule="1f1b", in_flight=1)) * 1.05
    assert fullest(free) > tight
    assert fullest(a_gpt(schedule="auto", memory_gb=tight / 1e9)) <= tight


def test_run_that_cannot_fit_is_refused_with_what_would() -> None:
    needed = fullest(a_gpt(schedule="gpipe"))
    fits = fullest(a_gpt(schedule="gpipe", recompute="full"))
    with pytest.raises(ConfigError) as refusal:
        forecast(a_gpt(schedule="gpipe", memory_gb=0.9 * needed / 1e9))
    assert f"would hold {needed / 1e9:.3f} GB" in str(refusal.value)
    assert f'pipeline.recompute = "full" ({fits / 1e9:.3f} GB); pipeline.schedule = "1f1b"' in str(
        refusal.value
    )
    forecast(a_gpt(schedule="gpipe", recompute="full", memory_gb=0.9 * needed / 1e9))


def test_auto_that_can_never_fit_is_refused_before_the_search() -> None:
    least = fullest(a_gpt(schedule="1f1b", in_flight=1))
    forecast(a_gpt(schedule="auto", memory_gb=1.01 * least / 1e9), choose=without_search)
    with pytest.raises(ConfigError, match="would hold"):
        forecast(a_gpt(schedule="auto", memory_gb=0.99 * least / 1e9), choose=without_search)


def test_error_says_if_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="more stages or a smaller model would help"):
        forecast(a_gpt(memory_gb=1e-6))


def test_sharded_replicas_hold_a_share_of_the_optimizer_state() -> None:
    def optimizer(kind: str) -> int:
        return (
            forecast(a_gpt().with_(data_parallel__kind=kind, data_parallel__replicas=4))
            .memory[0]
            .optimizer
        )

    assert optimizer("sharded") == pytest.approx(optimizer("all-reduce") / 4, rel=1e-3)


def test_memory_limit_of_replay_is_refused() -> None:
    with pytest.raises(ConfigError, match="replay stages hold no model"):
        forecast(a_replay(stages=2, memory_gb=1))


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, (0, 0)),
        ({"servers": "per-stage"}, (0, 1)),
        ({"address": "server:7100"}, (4, 4)),
        ({"servers": "per-stage", "address": ["server:7100", "other:7100"]}, (4, 5)),
    ],
)
def test_parameter_servers_are_ranks_of_the_first_replica_or_behind_all(
    settings: dict[str, object], ranks: tuple[int, ...]
) -> None:
    assert server_ranks(replicated("parameter-server", **settings)) == ranks


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_embedded_servers_are_where_the_schedule_places_the_stages(schedule: str) -> None:
    config = build(
        {
            "pipeline": {"stages": 4, "stages_per_rank": 2, "schedule": schedule},
            "data_parallel": {"kind": "parameter-server", "replicas": 2, "servers": "per-stage"},
        }
    )
    assert server_ranks(config) == forecast(config).schedule.rank_of_stage


def test_parameter_server_sends_back_to_every_replica() -> None:
    # Its own link carries both stages' parameters to both replicas, 2 x 60 ms; an all-reduce shares
    # that out.
    server_ms = reduce_ms(replicated("parameter-server", address="server:7100"))
    assert server_ms > 80 > reduce_ms(replicated("all-reduce"))


def test_network_without_a_link_to_the_server_is_refused() -> None:
    known = {(a, b): Link(1, 1) for a in range(4) for b in range(4) if a != b}
    with pytest.raises(ProfileError, match="no link from rank 0 to 4"):
        forecast(
            replicated("parameter-server", address="server:7100"),
            network=Network("four", None, known),
        )


def test_parameter_server_waits_for_the_norm_where_gradients_are_clipped() -> None:
    clipped, eager = (
        forecast(
            replicated("parameter-server", chunk_bytes=1 << 18).with_(train__clip_norm=norm),
            network=SLOW,
        )
        for norm in (1.0, 0.0)
    )
    assert eager.step_us < clipped.step_us


def test_profile_of_a_real_interface_counts_headers_and_a_shaped_one_does_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "far.toml").write_text("delay_ms = 1\nbandwidth_gbps = 1")
    far = str(tmp_path / "far.toml")
    real, shaped = (
        a_replay(stages=2).with_(**{key: far}) for key in ("predict__network", "transport__shape")
    )
    assert forecast(real).network.rate_gbps(0, 1) == pytest.approx(0.956, abs=1e-3)
    assert forecast(shaped).network.rate_gbps(0, 1) == 1
