"""Sweeps of replicas: their gradients are also divided by the scale."""

import json
from pathlib import Path

import pytest

from dpipe.config.load import build

CONFIG = """
[model]
layers = "replay"
[replay]
message_bytes = 4000
parameter_bytes = [8000, 4000]
[train]
num_microbatches = 4
batch_size = 12
[pipeline]
stages = 2
[data_parallel]
kind = "all-reduce"
replicas = 3
"""


@pytest.fixture
def cell(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep = script("sweep")
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "far.toml").write_text("delay_ms = 20\nbandwidth_gbps = 1\n")
    plan = {"name": "s", "config": "config.toml", "networks": ["far.toml"], "scale": 4}

    def make(**runs: object):
        read = sweep.Sweep.model_validate(
            plan | {"run": [{"schedules": ["gpipe"], "wires": ["bf16"], **runs}]}
        )
        (found,) = sweep.cells(read, tmp_path / "work")
        return sweep, found

    return make


def test_scale_divides_gradients_and_every_wire_is_the_cells(cell):
    config = cell()[1].config
    assert config.replay.parameter_bytes == [2000, 1000]
    assert (config.pipeline.wire, config.data_parallel.wire) == ("bf16", "bf16")


def test_line_has_replicas_and_stages(cell):
    sweep, found = cell()
    line = json.loads(json.dumps(sweep.as_line(found, {"measured_s": 1.0}, "commit")))
    assert (line["data_parallel"], line["schedule"]) == (3, "gpipe, 2 stages")


def test_overrides_of_a_run_have_the_last_word_and_a_name(cell):
    sweep, found = cell(
        label="alone", overrides=["data_parallel.replicas=1", "data_parallel.wire='none'"]
    )
    assert (found.config.data_parallel.replicas, found.config.data_parallel.wire) == (1, "none")
    assert sweep.as_line(found, {"measured_s": 1.0}, "commit")["engine"] == "dpipe alone"
    assert str(found) == "far dpipe alone gpipe bf16"


def test_run_on_networks_of_its_own_leaves_out_the_sweeps(cell, tmp_path: Path):
    (tmp_path / "near.toml").write_text("delay_ms = 1\nbandwidth_gbps = 1\n")
    assert cell(networks=["near.toml"])[1].network.name == "near"


def test_step_of_local_sgd_is_the_mean_over_whole_rounds(cell):
    """A step of the next round waits for the exchange at the end of a round."""
    sweep, found = cell(overrides=["data_parallel.kind='local-sgd'", "data_parallel.inner_steps=3"])
    assert sweep.usual([9.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0], found.config) == 2.0
    assert sweep.usual([9.0, 1.0, 1.0, 4.0, 1.0, 1.0, 4.0], cell()[1].config) == 1.0


@pytest.mark.parametrize(("given", "scaled"), [(0, None), (4000, 1000), ([8000, 400], [2000, 100])])
def test_bytes_that_are_not_set_stay_unset(script, given, scaled):
    config = build({"replay": {"message_bytes": 4000, "parameter_bytes": given}})
    sizes = script("sweep").scaled_bytes(config, 4)
    assert sizes == {"message_bytes": 1000} | (
        {} if scaled is None else {"parameter_bytes": scaled}
    )
