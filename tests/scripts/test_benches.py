"""What several runs of a bench have measured, as one file."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner


def row(ratio: float, half: str) -> dict:
    return {"schedule": "1f1b", "stages": 2, "ratio": ratio, "middle half": half, "flops": None}


@pytest.fixture
def benches(script):
    return script("benches")


def test_measured_values_are_kept_by_run_and_others_once(benches) -> None:
    runs = [[row(1.01, "a")], [row(1.03, "b")]]
    expected = {"schedule": "1f1b", "stages": 2, "ratio": [1.01, 1.03], "flops": None}
    assert benches.merged(runs) == [expected]


def test_file_has_every_run_of_the_bench(benches, monkeypatch, tmp_path: Path) -> None:
    printed = iter([1.01, 1.03])

    def run(argv, **_):
        assert argv[1:] == ["-m", "dpipe", "bench", "engine", "--json"]
        return SimpleNamespace(stdout=json.dumps([row(next(printed), "")]))

    monkeypatch.setattr(benches.subprocess, "run", run)
    arguments = ["engine", "--runs", "2", "--results", str(tmp_path)]
    assert CliRunner().invoke(benches.main, arguments).exit_code == 0
    kept = json.loads((tmp_path / "engine.json").read_text())
    assert kept["kept"] == "all of 2 runs"
    assert kept["rows"][0]["ratio"] == [1.01, 1.03]
