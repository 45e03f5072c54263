"""`dpipe plan` for a model of the user's own: its layers are counted, not a transformer's."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dpipe.planner.command import plan_text

MODEL = """
import torch
from torch import nn


def layers():
    wide = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16))
    narrow = [nn.Linear(16, 16) for _ in range(4)]
    return [nn.Embedding(256, 16), *narrow, wide, nn.Linear(16, 256)], loss


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
"""
JOB = """
[model]
layers = "planned_model:layers"
context = 8
[train]
batch_size = 8
num_microbatches = 4
[pipeline]
stages = 2
"""
MACHINES = """
[default_link]
delay_ms = 0.01
bandwidth_gbps = 100
[[machine]]
name = "a"
gflops = 1
memory_gb = 1
[[machine]]
name = "b"
gflops = 1
memory_gb = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planned_model", raising=False)  # of another folder
    (tmp_path / "planned_model.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "machines.toml").write_text(MACHINES)
    return tmp_path


def planned(*overrides: str) -> dict[str, Any]:
    text = plan_text(
        "job.toml",
        overrides,
        "machines.toml",
        write=None,
        max_price=None,
        objective="time",
        formats=("none",),
        seed=0,
        as_json=True,
    )
    row: dict[str, Any] = json.loads(text)
    return row


@pytest.mark.slow
@pytest.mark.parametrize("memory_gb", [0.09, 0.07])
def test_what_layers_that_were_measured_hold_fits_the_machines(
    memory_gb: float, folder: Path
) -> None:
    """What such a layer holds for backward was counted as nothing. With 0.09 GB the estimate takes
    four micro-batches to fit, which do not: eight do.
    """
    small = MACHINES.replace("memory_gb = 1", f"memory_gb = {memory_gb}")
    (folder / "machines.toml").write_text(small)
    (folder / "job.toml").write_text(JOB.replace("num_microbatches = 4\n", ""))
    row = planned("model.context=64", "train.batch_size=512")
    memory = [seat["memory"] for seat in row["seats"]]
    assert row["num_microbatches"] == 8
    assert 0.4 < max(memory) <= 1


def test_own_model_is_cut_by_what_its_layers_take(folder: Path) -> None:
    row = planned()
    # Operations of a token: 256 in each narrow layer, 16,384 in the wide one, 4,096 in the head.
    assert row["layers_per_stage"] == [6, 1]
    assert all(0 < seat["memory"] < 1 for seat in row["seats"])
