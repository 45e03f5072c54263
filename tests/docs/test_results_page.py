"""Each table of the results has its command, machine and date, and the figures of its file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, ROOT, text_of

RESULTS = DOCS / "results.md"
FIGURES = Path(__file__).with_name("figures.txt")
DEMO = ROOT / "scripts/results/demo.txt"  # what it printed, as README said it, too


def one_line(text: str) -> str:
    return " ".join(text.split())


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", text_of(RESULTS), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def fields(section: str) -> dict[str, str]:
    return dict(re.findall(r"^:([A-Z]\w+): (.+)$", section, flags=re.MULTILINE))


@pytest.mark.parametrize("title", sections())
def test_result_has_its_command_machine_date_and_file(title: str) -> None:
    section = sections()[title]
    if "Not measured yet" in section:
        assert "| --- |" not in section
        return
    keys = fields(section)
    assert set(keys) == {"Command", "Machine", "Date", "Results"}
    assert "`" in keys["Command"]
    assert re.search(r"2026-\d\d-\d\d", keys["Date"])
    assert "virtual machine" in keys["Machine"] or keys["Machine"] == "none: simulated"
    kept = re.findall(r"`(scripts/results/[^`]+)`", keys["Results"])
    assert kept
    assert all((ROOT / path).exists() for path in kept)


def figures() -> list[str]:
    lines = FIGURES.read_text(encoding="utf-8").splitlines()
    lines += DEMO.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_figure_that_readme_had_is_on_a_page() -> None:
    pages = one_line(" ".join(text_of(page) for page in sorted(DOCS.glob("*.md"))))
    lost = [figure for figure in figures() if one_line(figure) not in pages]
    assert len(figures()) > 100
    assert not lost


def test_page_has_the_figures_of_the_fine_tuning_that_is_kept() -> None:
    printed = (ROOT / "scripts/results/finetune.txt").read_text(encoding="utf-8")
    losses = re.findall(r"held-out loss ([\d.]+)", printed)
    (apart,) = re.findall(r"difference of logits, run and export: (\S+)", printed)
    ((minutes, seconds),) = re.findall(r"^real\t(\d+)m([\d.]+)s$", printed, flags=re.MULTILINE)
    section = one_line(sections()["Fine-tuning a published model"])
    assert f"took {minutes} minutes {float(seconds):.0f} s" in section
    assert "from {} to {} nats".format(*losses) in section
    assert f"logits of the run to {apart}" in section


def marked(name: str) -> list[list[str]]:
    """The cells of the table that scripts/table.py has put on the page."""
    found = re.search(rf"<!-- {name} replay -->\n(.*?)\n<!-- end -->", text_of(RESULTS), re.DOTALL)
    assert found is not None
    lines = found[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def lines_of(name: str) -> list[dict[str, Any]]:
    path = ROOT / f"scripts/results/{name}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_table_of_the_networks_says_what_the_results_file_says() -> None:
    """Each prediction is that of the day; what today's is takes scripts/table.py minutes to say."""
    if not (ROOT / "scripts/results/gpt3xl_networks.jsonl").exists():
        assert marked("gpt3xl_networks") == [["Not measured yet."]]
        return
    _, _, *rows = marked("gpt3xl_networks")
    shown = [
        [float(cell.split(" ")[0]) for cell in cells]
        for row in rows
        for cells in (row[2:4], row[4:6])
        if cells[0]
    ]
    lines = lines_of("gpt3xl_networks")
    measured = [[round(line[key], 2) for key in ("predicted_s", "measured_s")] for line in lines]
    assert sorted(shown) == sorted(measured)


def test_table_of_the_lab_says_what_the_results_file_says() -> None:
    """Seconds alone: what each is of its prediction takes scripts/table.py minutes to say."""
    head, _, *rows = marked("gpt3xl_gpipe_network")
    shown = {
        (row[0], system): cell.split(" ")[0]
        for row in rows
        for system, cell in zip(head[1:], row[1:], strict=True)
        if not system.startswith("published")
    }
    measured = {}
    for line in lines_of("gpt3xl_gpipe_network"):
        if line["mode"] == "replay" and line["delay_ms"] is not None and line["data_parallel"] == 1:
            network = f"{line['delay_ms']:g} ms, {line['bandwidth_gbps']:g} Gbit/s"
            system = f"{line['engine']} {line['schedule']} {line['wire']}"
            measured[network, system] = f"{line['measured_s']:.2f}"
    assert len(shown) == 35
    assert shown == measured
