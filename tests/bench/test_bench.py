import json
from pathlib import Path

import pytest

from dpipe.bench import bench, loopback
from dpipe.bench.loopback import Loopback
from dpipe.errors import ConfigError, RunError
from dpipe.network.link import Link
from dpipe.report.pace import Pace, silent
from dpipe.schedule.generate import GENERATORS


@pytest.fixture
def _two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"schedule": "gpipe", "ratio": 1.0312}, {"schedule": "1f1b", "ratio": 1.0}]
    monkeypatch.setitem(bench._BENCHES, "engine", bench.Bench(lambda pace: rows, 1.0))


@pytest.mark.usefixtures("_two_rows")
def test_rows_are_printed_as_json() -> None:
    assert [row["schedule"] for row in json.loads(bench.bench_text("engine", as_json=True))] == [
        "gpipe",
        "1f1b",
    ]


@pytest.mark.usefixtures("_two_rows")
def test_rows_are_printed_as_a_table_with_machine_and_date() -> None:
    text = bench.bench_text("engine", as_json=False)
    assert "1.031" in text
    assert "cores, 20" in text


def test_unknown_figure_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench._BENCHES, "mfu", bench.Bench(lambda pace: [{"mfu": None}], 1.0))
    text = bench.bench_text("mfu", as_json=False)
    assert "│ -   │" in text
    assert "None" not in text


@pytest.mark.slow
def test_failed_run_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="unknown key 'train.stps'"):
        bench.run_quietly(
            {"train": {"stps": 3}, "run": {"folder": str(tmp_path / "run")}}, tmp_path
        )


def test_engine_row_holds_each_step_against_the_simulation_of_its_own_round() -> None:
    fast, slow = (
        Loopback(Link(delay, rate), 100.0, us)
        for delay, rate, us in ((0.1, 10, 300.0), (0.3, 20, 500.0))
    )
    runs = [bench._Run(fast, 1.0, [1.02, 1.04]), bench._Run(slow, 2.0, [2.12, 2.16])]
    row = bench._engine_row("1f1b", "tcp", runs)
    assert row["measured / simulated"] == pytest.approx(1.05)
    assert row["middle half"] == "1.025 to 1.075"
    assert row["link"] == "0.20 ms, 15.0 Gbit/s, 0.50 ms of a core an end"


@pytest.mark.parametrize(("name", "rank"), [("transport", 0), ("all-reduce", 2)])
def test_invalid_hosts_are_refused(name: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="--hosts goes with all-reduce and a --rank below 2"):
        bench.bench_text(name, as_json=False, hosts=("10.0.0.1", "10.0.0.2"), rank=rank)


@pytest.mark.parametrize(("quick", "limit_s"), [(True, 60.0), (False, float("inf"))])
def test_quick_bench_has_a_minute(
    monkeypatch: pytest.MonkeyPatch, quick: bool, limit_s: float
) -> None:
    def run(pace: Pace) -> list[bench.Row]:
        return [{"limit": pace.limit_s}]

    monkeypatch.setitem(bench._BENCHES, "engine", bench.Bench(run, 1.0))
    (row,) = json.loads(bench.bench_text("engine", as_json=True, quick=quick))
    assert row["limit"] == limit_s


def test_engine_measures_the_link_once_a_round_and_quickly_over_tcp_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Loopback(Link(0.1, 10), 100.0, 300.0)
    links: list[str] = []
    monkeypatch.setattr(loopback, "measure_loopback", lambda way: links.append(way) or machine)
    monkeypatch.setattr(bench, "_replay", lambda *_: bench._Run(machine, 1.0, [1.02, 1.04]))
    rows = bench.bench_engine(silent())
    assert links == ["grpc x1", "tcp x1"] * 2
    assert len(rows) == 2 * len(GENERATORS)
    links.clear()
    rows = bench.bench_engine(Pace("engine", 1.0, limit_s=60.0, silent=True))
    assert links == ["tcp x1"]
    assert [row["schedule"] for row in rows] == list(GENERATORS)
    assert {row["transport"] for row in rows} == {"tcp"}
