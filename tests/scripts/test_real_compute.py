"""The parts of a step that trains for real, one more at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dpipe.network.link import Host, Link, Network
from dpipe.schedule.generate import gpipe
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import Steady

Script = Callable[[str], ModuleType]
NEAR = Network(default=Link(0.0, 1000.0))


def test_each_part_is_added_to_those_before(script: Script) -> None:
    """One rank that votes alone: its parts take their time one after the other."""
    cost = Cost(
        forward_us=(10.0,),
        backward_us=(20.0,),
        input_us=(0.0,),
        weight_us=(0.0,),
        activation_bytes=(),
        update_us=(3.0,),
        vote_us=(4.0,),
        python_us=(0.5,),
        between_us=(6.0,),
    )
    host = Host((0,), cores=1, threads=2, message_us=5.0)
    scenario = Scenario(gpipe(1, 1), cost, NEAR, [host], ballots=NEAR)
    ladder = script("real_compute").ladder(scenario, [24.0])
    step_us = {name: Steady(part.lowered()).period() for name, part in ladder.items()}
    assert step_us == {
        "computing, measured alone": pytest.approx(24),
        "computing beside others": pytest.approx(30),
        "ranks share cores": pytest.approx(60),  # two threads on a core
        "vote and optimizer": pytest.approx(74),
        "Python, data, log": pytest.approx(88),
        "messages": pytest.approx(108),  # a ballot and a verdict, each written and read
    }


def line(name: str, ratio: float) -> dict[str, Any]:
    return {
        "name": name,
        "measured_ms": 100 * ratio,
        "predicted_ms": 100.0,
        "ratio": ratio,
        "parts_ms": {"computing": 80.0, "messages": 100.0},
    }


def test_table_has_the_medians_of_all_runs(script: Script, tmp_path: Path) -> None:
    module = script("real_compute")
    cells = tmp_path / "cells.toml"
    cells.write_text(
        'name = "two"\ntimes = 3\n[[cell]]\nname = "a"\nconfig = "a.toml"\n'
        '[[cell]]\nname = "b"\nconfig = "b.toml"\n'
    )
    results = tmp_path / "results.jsonl"
    lines = [line("a", 1.2), line("a", 1.0), line("a", 1.1)]
    results.write_text("".join(json.dumps(each) + "\n" for each in lines))
    arguments = [str(cells), "--times", "0", "--results", str(results)]
    result = CliRunner().invoke(module.main, arguments)
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "| run | computing | messages | measured | measured / predicted |",
        "| --- | --- | --- | --- | --- |",
        "| a | 80.0 | 100.0 | 110.0 | 1.10 (1.00 to 1.20) |",
    ]


@pytest.mark.parametrize(("rank", "core"), [(0, "0"), (1, "1"), (2, "0"), (3, "1")])
def test_pinned_ranks_have_the_cores_in_turn(
    script: Script, monkeypatch: pytest.MonkeyPatch, rank: int, core: str
) -> None:
    module = script("real_compute")
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    assert module.Pinned().enter(rank, ["dpipe"]) == ["taskset", "-c", core, "dpipe"]


def test_run_beside_others_is_made_again(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = script("real_compute")
    shares = [0.2, 0.0, 0.0]

    def run(*_: object) -> dict[str, Any]:
        return line("a", 1.0) | {"others": shares.pop(0)}

    monkeypatch.setattr(module, "run", run)
    cell = module.Cell(name="a", config="a.toml")
    module.run_quietly(module.Cells(name="a", times=1, cell=(cell,)), cell, tmp_path)
    assert len(shares) == 1
