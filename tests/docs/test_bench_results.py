"""Each table of a bench on the results' page has the figures of its file in scripts/results."""

import json
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import pytest
from pages import ROOT
from test_result_files import lines_of, table
from test_results_page import one_line, sections

Row = Mapping[str, Any]


def kept(name: str) -> list[Row]:
    text = (ROOT / f"scripts/results/bench/{name}.json").read_text(encoding="utf-8")
    rows: list[Row] = json.loads(text)["rows"]
    return rows


def by_columns(rows: Sequence[Row], key: str, across: str, value: str, digits: int) -> list:
    """[the row's name, all runs in the first column, in the second, ...]"""
    names = dict.fromkeys(row[key] for row in rows)
    columns = dict.fromkeys(row[across] for row in rows)
    cells = {
        (row[key], row[across]): ", ".join(f"{each:.{digits}f}" for each in row[value])
        for row in rows
    }
    return [[name, *(cells[name, column] for column in columns)] for name in names]


@pytest.mark.parametrize(
    ("title", "name", "value", "digits"),
    [
        ("The engine, against its own prediction", "engine", "measured / simulated", 3),
        ("Beside torch's pipeline", "pipelining", "dpipe / torch", 2),
    ],
)
def test_ratios_of_schedules_are_those_of_all_runs(
    title: str, name: str, value: str, digits: int
) -> None:
    rows = kept(name)
    assert len(rows) >= 4
    assert table(title) == by_columns(rows, "schedule", "transport", value, digits)


def test_moving_a_tensor() -> None:
    expected = []
    for row in kept("transport"):
        over = row["over gloo"]
        spread = f"{min(over):.2f} to {max(over):.2f}" if len(set(over)) > 1 else ""
        expected.append([f"{median(row['gb_per_s']):.2f}", f"{median(over):.2f}", spread])
    assert len(expected) == 4
    assert [row[1:] for row in table("Moving a tensor")] == expected


def test_averaging_over_four_processes() -> None:
    value = "times as fast as gloo"
    expected = []
    rows = kept("all-reduce")
    for unshaped, shaped in zip(rows[::2], rows[1::2], strict=True):
        ratios = unshaped[value]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}"
        expected.append([spread, ", ".join(map(str, shaped[value]))])
    shown = [[cell.removesuffix(" (by epoll)") for cell in row[1:]] for row in table(AVERAGING)]
    assert len(expected) == 4
    assert shown == expected


AVERAGING = "Averaging over four processes"


def test_what_one_link_carries() -> None:
    keys = ("iperf3 x1", "connections", "iperf3", "dpipe", "dpipe / asked", "dpipe / iperf3")
    expected = []
    for row in kept("link"):
        network = row["network"].removesuffix("gbps").replace("ms-", " ms, ") + " Gbit/s"
        cells = [row[key] for key in keys]
        expected.append([network, *(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells)])
    assert len(expected) == 5
    assert table("What one link carries") == expected


def test_engine_beside_a_plain_loop() -> None:
    (row,) = kept("mfu")
    *others, last = (f"{ratio:.2f}" for ratio in row["over plain"])
    said = f"(context {row['context']}) in one stage of the engine takes {', '.join(others)} and"
    assert f"{said} {last} of the step" in one_line(sections()["The engine, against a plain loop"])


def test_compiled_step() -> None:
    (row,) = kept("compiled")
    said = f"took {row['first_step_s'][0]} s, including the compilation"
    assert said in one_line(sections()["A compiled step"])


def test_layouts_of_tensor_parallelism() -> None:
    path = ROOT / "scripts/results/tensor_product.txt"
    *layouts, last = path.read_text(encoding="utf-8").splitlines()
    apart = [layout.split()[-1] for layout in layouts]
    assert len(layouts) == 60
    assert last == f"furthest apart: {max(apart, key=float)}, bound 1e-05"
    section = sections()["Tensor parallelism: the same losses"]
    assert f"the furthest apart differ by {max(apart, key=float)}." in one_line(section)


def test_resumed_run() -> None:
    """With int8 the steps after the first that was resumed; with bf16 none differs."""
    int8, bf16 = lines_of("resumed")
    assert bf16["uninterrupted"] == bf16["resumed"]
    both = list(zip(int8["uninterrupted"], int8["resumed"], strict=True))
    first = int8["resumed after step"]
    assert all(whole == resumed for whole, resumed in both[: first + 1])
    apart = [abs(whole - resumed) / whole for whole, resumed in both[first + 1 :]]
    said = f"differ by {min(apart):.0e} to {max(apart):.0e} of themselves"
    section = one_line(sections()["A resumed run with int8 gradients"])
    assert said in section
    assert re.search(rf"{len(both)} steps at once, and {first} of them", section)
