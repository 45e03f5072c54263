"""A step predicted on the machines of a file."""

import math
from pathlib import Path
from typing import Any

import pytest

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError, ProfileError
from dpipe.machines.machine import LayerTime, Machine
from dpipe.network.link import Host, Link, Network
from dpipe.plan.assumed_network import (
    assumed_network,
    connections_of,
    leaves_all_to_one,
    uplink_bytes_per_s,
)
from dpipe.plan.costs import transformer_costs
from dpipe.plan.forecast import forecast
from dpipe.plan.on_machines import digest_of_layers, layers_on, placement_of
from dpipe.plan.text import forecast_text

EVEN = """
[default_link]
delay_ms = 1
bandwidth_gbps = 1
"""
FOUR = EVEN + "".join(f'[[machine]]\nname = "{name}"\n' for name in "abcd")
MODEL: dict[str, Any] = {"num_layers": 2, "width": 32, "num_heads": 2, "context": 16}


@pytest.fixture
def job(tmp_path: Path):
    def make(machines: str | None, **sections: dict[str, Any]) -> Config:
        predict = {}
        if machines is not None:
            path = tmp_path / "m.toml"
            path.write_text(machines)
            predict["machines"] = str(path)
        train = {"batch_size": 8, "num_microbatches": 4}
        pipeline = {"stages": 2, "split": [2, 2]}
        return build(
            {"model": MODEL, "train": train, "pipeline": pipeline, "predict": predict} | sections
        )

    return make


def test_equal_machines_are_predicted_as_ranks_of_one_network(job) -> None:
    plain = forecast(job(None), network=Network("m", Link(1, 1)))
    assert forecast(job(FOUR)).timeline == plain.timeline


def test_stage_takes_as_long_as_on_its_machine(job) -> None:
    machines = EVEN + '[[machine]]\nname = "a"\n[[machine]]\nname = "b"\ngflops = 5\n'
    even = forecast(job(FOUR)).cost
    (uneven,) = forecast(job(machines)).costs
    assert uneven.forward_us == (even.forward_us[0], 4 * even.forward_us[1])
    assert uneven.weight_us == (even.weight_us[0], 4 * even.weight_us[1])


def test_replicas_take_as_long_as_on_their_machines(job) -> None:
    two = {"replicas": 2, "kind": "all-reduce"}
    speeds = [20, 20, 10, 40]
    machines = EVEN
    for name, gflops in zip("abcd", speeds, strict=True):
        machines += f'[[machine]]\nname = "{name}"\ngflops = {gflops}\n'
    even = forecast(job(FOUR, data_parallel=two))
    uneven = forecast(job(machines, data_parallel=two))
    first, second = uneven.costs
    assert first == even.costs[0]
    assert second.forward_us == (2 * first.forward_us[0], first.forward_us[1] / 2)
    # The order of all replicas is looked for with the slower of each stage.
    assert uneven.cost.forward_us == (second.forward_us[0], first.forward_us[1])
    assert uneven.step_us > even.step_us


def test_estimated_cut_goes_by_the_speed_of_machines(job) -> None:
    """It was that of machines which are alike."""
    twelve = {**MODEL, "num_layers": 12}
    estimated = {"pipeline": {"stages": 2}, "model": twelve}
    slow_last = EVEN + '[[machine]]\nname = "a"\n[[machine]]\nname = "b"\ngflops = 5\n'
    even = forecast(job(FOUR, **estimated)).split
    uneven = forecast(job(slow_last, **estimated))
    assert uneven.split[0] > even[0]
    (cost,) = uneven.costs
    seconds = [sum(each) for each in zip(cost.forward_us, cost.backward_us, strict=True)]
    one_block = forecast(job(slow_last, model=twelve, pipeline={"stages": 2, "split": [12, 2]}))
    (of_one,) = one_block.costs
    block_us = (of_one.forward_us[1] + of_one.backward_us[1]) / 2
    assert abs(seconds[0] - seconds[1]) <= block_us


def test_estimated_cut_of_replicas_goes_by_the_slowest_machine_of_each_stage(job) -> None:
    eight = {**MODEL, "num_layers": 8}
    machines = EVEN
    for name, gflops in zip("abcd", (20, 20, 20, 5), strict=True):
        machines += f'[[machine]]\nname = "{name}"\ngflops = {gflops}\n'
    two = {"replicas": 2, "kind": "all-reduce"}
    found = forecast(job(machines, model=eight, pipeline={"stages": 2}, data_parallel=two))
    even = forecast(job(FOUR, model=eight, pipeline={"stages": 2}, data_parallel=two))
    assert found.split[0] > even.split[0]
    assert (
        found.step_us
        < forecast(
            job(
                machines,
                model=eight,
                pipeline={"stages": 2, "split": [*even.split]},
                data_parallel=two,
            )
        ).step_us
    )


def test_measured_layers_are_taken_as_they_were_measured(job) -> None:
    config = job(FOUR, pipeline={"stages": 2, "split": [2, 2], "recompute": "selective"})
    counted = transformer_costs(config)
    times = (
        LayerTime("embedding", 2, 1, 2),
        LayerTime("block", 2, 10, 20, 12, 9),
        LayerTime("head", 2, 3, 6),
    )
    layers = layers_on(config, counted, Machine("a", layers=times))
    assert layers.forward_s == (0.001, 0.01, 0.01, 0.003)
    assert layers.backward_s == (0.002, 0.02, 0.02, 0.006)
    assert layers.input_s == (0.001, 0.012, 0.012, 0.003)
    assert layers.weight_s == (0.001, 0.009, 0.009, 0.003)
    share = counted.core_s[1] / counted.forward_s[1]
    assert layers.core_s == pytest.approx((0, 0.01 * share, 0.01 * share, 0))


def test_layer_that_was_not_measured_is_named(job) -> None:
    layer = '[[machine.layer]]\nkind = "block"\nmicro_batch_size = 1\nforward_ms = 1\nbackward_ms=1'
    with pytest.raises(ProfileError, match="machine 'a' says nothing of layer 'embedding'"):
        forecast(job(f'[[machine]]\nname = "a"\ndevices = 2\n{layer}'))


def test_ranks_of_a_machine_share_its_cores_and_talk_past_its_interface(job) -> None:
    config = job(
        '[[machine]]\nname = "a"\ndevices = 2\ncores = 1\ngflops = 1\negress_gbps = 0.001\n'
    )
    placement = placement_of(config)
    assert placement is not None
    assert placement.hosts == (Host((0, 1), 1),)
    shared_us = forecast(config).step_us
    alone = job('[[machine]]\nname = "a"\ndevices = 2\ncores = 2\ngflops = 1\n')
    assert placement_of(alone).hosts == ()
    assert shared_us > 1.3 * forecast(alone).step_us


def test_tensor_parallel_group_sits_on_one_machine(job) -> None:
    machines = EVEN + '[[machine]]\nname = "a"\ndevices = 3\n[[machine]]\nname = "b"\ndevices = 2\n'
    config = job(machines, tensor_parallel={"size": 2})
    assert placement_of(config).seats == ("a", "b")
    with pytest.raises(
        ConfigError,
        match="takes 3 places of 2 devices each, on one machine, but the machines of .* have 2",
    ):
        forecast(job(machines, tensor_parallel={"size": 2}, pipeline={"stages": 3}))


def test_too_few_machines_are_refused(job) -> None:
    with pytest.raises(ConfigError, match="takes 2 places, but the machines of .* have 1: list"):
        forecast(job('[[machine]]\nname = "a"\n'))


def test_links_that_are_missing_are_named_by_machine(job) -> None:
    with pytest.raises(ProfileError, match="no link from machine a to b, b to a; list each pair"):
        forecast(job('[[machine]]\nname = "a"\n[[machine]]\nname = "b"\n'))


def test_file_of_machines_may_stand_for_a_profile(tmp_path: Path) -> None:
    """Its rates are those of messages: no headers are taken off."""
    path = tmp_path / "office.toml"
    path.write_text(FOUR)
    network = assumed_network(str(path), 1, headers=True)
    assert (network.name, network.link(0, 3)) == ("office", Link(1, 1))


def test_prediction_says_whose_machines_they_are(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(FOUR)
    (tmp_path / "job.toml").write_text("[pipeline]\nstages = 2\n")
    override = f"predict.machines={tmp_path / 'm.toml'}"
    text = forecast_text(str(tmp_path / "job.toml"), (override,), None, as_json=False)
    assert f"on the machines of {tmp_path / 'm.toml'}" in text


LOSSY = """
[[machine]]
name = "a"
[[machine]]
name = "b"
[[link]]
from = "a"
to = "b"
delay_ms = 20
bandwidth_gbps = 1
loss_percent = 5
"""


def test_measured_rate_of_a_lossy_link_is_not_lowered_by_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "lossy.toml"
    path.write_text(LOSSY)
    network = assumed_network(str(path), "auto")
    assert network.rate_gbps(0, 1) == pytest.approx(1)
    assert network.over(1).rate_gbps(0, 1) < 0.1
    assert network.delay_us(0, 1, 10**6) > 20e3


def test_connections_are_those_of_the_machines_that_the_ranks_sit_on(job) -> None:
    far = EVEN.replace("delay_ms = 1\n", "delay_ms = 0.1\n") + "".join(
        f'[[machine]]\nname = "{name}"\n' for name in "abc"
    )
    far += '[[link]]\nfrom = "a"\nto = "b"\ndelay_ms = 200\nbandwidth_gbps = 1\n'
    config = job(far).with_(transport__connections="auto")
    moved = config.with_(predict__seats=("b", "c"))
    assert connections_of(config) == forecast(config).network.connections > 1
    assert connections_of(moved) == forecast(moved).network.connections == 1


MEASURED = '[measured]\nat = "2026-11-23T12:00:00Z"\nmodel = "{}"\n'
TIMES = "".join(
    f'[[machine.layer]]\nkind = "{kind}"\nmicro_batch_size = 2\nforward_ms = 1\nbackward_ms = 2\n'
    for kind in ("embedding", "block", "head")
)


def test_times_of_another_model_are_refused(job) -> None:
    machines = FOUR.replace('name = "a"\n', f'name = "a"\n{TIMES}')
    digest = job(machines).layers_digest()
    with pytest.raises(ConfigError, match="were measured with another model or precision: .* 5f84"):
        forecast(job(MEASURED.format("5f84501") + machines))
    same = forecast(job(MEASURED.format(digest) + machines))
    assert same.step_us == forecast(job(machines)).step_us
    # Links and memory are those of the machines, whatever they were measured with.
    forecast(job(MEASURED.format("5f84501") + FOUR))


def test_digest_of_layers_has_the_vocabulary_of_the_tokenizer(
    job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that were measured with a small vocabulary were taken for those with a large one."""
    config = job(None)
    assert config.model.vocab_size is None
    sizes = {"small.json": 300, "same.json": 300, "large.json": 50_000}
    monkeypatch.setattr("dpipe.tokenizer.tokenizer.vocabulary", sizes.__getitem__)
    small, same, large = (
        digest_of_layers(config.with_(data__tokenizer=name, data__files=("x",))) for name in sizes
    )
    assert small == same
    assert small != large
    assert digest_of_layers(config) == config.layers_digest()  # of bytes, as it was


def test_as_many_connections_are_used_as_somebody_asked_for() -> None:
    home = {"network": "netem/profiles/home.toml"}
    config = build({"predict": home, "transport": {"kind": "tcp"}})
    assert leaves_all_to_one(config)
    assert not leaves_all_to_one(config.with_(transport__connections=4))
    assert not leaves_all_to_one(config.with_(transport__congestion_control="reno"))


def test_messages_take_turns_where_the_network_says_that_links_share_an_uplink() -> None:
    narrow = {"network": "netem/profiles/25ms-0.03gbps.toml"}
    config = build({"predict": narrow, "transport": {"kind": "tcp", "connections": 1}})
    share = 1448 / 1514  # of a packet
    assert uplink_bytes_per_s(config, 1) == pytest.approx(share * 0.03e9 / 8)
    home = config.with_(predict__network="netem/profiles/home.toml", transport__connections="auto")
    assert uplink_bytes_per_s(home, 1) == pytest.approx(share * 0.02e9 / 8)


@pytest.mark.parametrize(
    "change",
    [
        {"predict__network": None},
        {"transport__kind": "grpc"},
        {"transport__connections": 4},  # a message goes over all of them at once
        {"predict__network": None, "transport__shape": "netem/profiles/25ms-0.03gbps.toml"},
    ],
)
def test_messages_take_no_turns_where_none_are_known_to_help(change: dict[str, object]) -> None:
    narrow = {"network": "netem/profiles/25ms-0.03gbps.toml"}
    config = build({"predict": narrow, "transport": {"kind": "tcp", "connections": 1}})
    assert uplink_bytes_per_s(config.with_(**change), 1) == math.inf
