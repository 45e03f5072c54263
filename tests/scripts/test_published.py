"""The published values, byte by byte, and today's rows of every table.

A figure that is changed by mistake, in a source, in a network or among the assumptions of a table,
is found here.
"""

import csv
import hashlib
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "scripts/published"
KEPT = ROOT / "scripts/results/sim"

# By `sha256sum scripts/published/*.csv`.
DIGESTS = {
    "aws_region_links.csv": ("5b08bd351dcd91d62d6fac6d0d4b19fa60d6b9ff47d09264f31ec3a6a00f733e"),
    "gpt3xl_gpipe_micro_batches.csv": (
        "dd3a8cfd2cc37c967a19e3d6f27cafbdc3493c8b69798bd914a0655c94779d52"
    ),
    "gpt3xl_gpipe_network.csv": (
        "cc6f4ac34ecc685706df23cee82f5918678e4c0f9ff4ec24cfa3397177c9e8e7"
    ),
    "gpt3xl_megatron.csv": ("a8e9478c13978e5c0df1173b058c6954d38e9e804dd6383d494b2184f2a6eedb"),
    "gpt3xl_torch_pipe.csv": ("5f399feaacd979d474a491b3f312ac30618521778e36099af912c8365613aea0"),
    "gpt3xl_torch_pipe_fsdp.csv": (
        "54d305b5f41cb53d33c8344ce54adac302b64f6097ba3cf270e6864e7572d002"
    ),
    "megatron_bert345m_scaling.csv": (
        "27c5ec1ca42d59f36a3c9e5ef155c7b74245f390532bc6a4f52addb1c4701dac"
    ),
    "megatron_bert345m_timers.csv": (
        "adc5f3a82da337b789bd5ce4a7defe0df2292a6e1e0978780fb5f8929631cd01"
    ),
    "megatron_memory_time.csv": (
        "5fd9352160f4c5306e8b881b4b9a7028d8ba24991237d9bde351df713fd92c2c"
    ),
}


def test_published_values_are_as_they_were_copied() -> None:
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in PUBLISHED.glob("*.csv")
    }
    assert digests == DIGESTS


@pytest.fixture
def table(script):
    return script("table")


def names() -> list[str]:
    return sorted(path.stem for path in KEPT.glob("*.csv"))


# The first case alone is not slow: the table whose search takes longest comes last.
PREDICTED = sorted(
    (name for name in names() if name != "gpt3xl_gpipe_network"),
    key=lambda name: name == "gpt3xl_gpipe_micro_batches",
)


def test_every_table_has_its_rows_kept(table) -> None:
    predicted = set(table.TABLES) - set(table.MEASURED)
    assert names() == sorted(predicted)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", PREDICTED)
def test_prediction_of_today_is_the_one_that_is_kept(table, name) -> None:
    """After an intended change: `scripts/table.py NAME --mode sim --csv` into the file, and --page
    docs/results.md.
    """
    today = CliRunner().invoke(table.main, [name, "--mode", "sim", "--csv"]).output
    assert today == (KEPT / f"{name}.csv").read_text(encoding="utf-8")


@pytest.mark.slow
def test_published_system_and_fixed_schedules_are_predicted_as_it_is_kept(table) -> None:
    """The rows of a search take minutes: `scripts/table.py gpt3xl_gpipe_network --mode sim`."""
    kept = list(csv.DictReader(io.StringIO((KEPT / "gpt3xl_gpipe_network.csv").read_text())))
    quick = [row for row in kept if row["schedule"] != "auto" and row["wire"] == "fp32"]
    assert len(quick) == 9 + 2 * 5
    today = [table.with_prediction(row_of(table, row)).predicted_s for row in quick]
    assert today == [float(row["predicted_s"]) for row in quick]


def row_of(table, row: dict[str, str]):
    return table.Row(
        float(row["delay_ms"]),
        float(row["bandwidth_gbps"]),
        int(row["data_parallel"]),
        row["engine"],
        row["schedule"],
        row["wire"],
        published_s=float(row["published_s"]) if row["published_s"] else None,
    )


COLUMNS = {
    "gpt3xl_gpipe_network": {"seconds_per_iteration"},
    "gpt3xl_gpipe_micro_batches": {"seconds"},
    "gpt3xl_megatron": {"seconds_per_iteration"},
    "gpt3xl_torch_pipe": {"seconds_per_iteration"},
    "megatron_memory_time": {"time_ms", "peak_memory_mb"},
}


@pytest.mark.parametrize("name", COLUMNS)
def test_published_values_are_printed_as_they_were_published(name) -> None:
    """10999 MiB was printed as 1.1e+04."""
    source = csv.DictReader((PUBLISHED / f"{name}.csv").read_text().splitlines())
    shown = csv.DictReader((KEPT / f"{name}.csv").read_text().splitlines())
    said = [row for row in shown if row.get("engine", "published") == "published"]
    for line, row in zip(source, said, strict=True):
        for column in COLUMNS[name]:
            assert not line[column] or plain(line[column]) in row.values()


def plain(number: str) -> str:
    """Without trailing zeros."""
    return re.sub(r"\.0$", "", number)


def test_every_assumption_says_where_it_is_from(table) -> None:
    from tables.form import ORIGINS

    declared = {name: simulated.PARAMETERS for name, simulated in table.SIMULATED.items()}
    declared["gpt3xl_gpipe_network"] = table.PARAMETERS
    for name, parameters in declared.items():
        assert parameters, name
        for parameter in parameters:
            assert parameter.origin.startswith(ORIGINS), parameter


@pytest.mark.slow
def test_table_says_its_assumptions_below_its_rows(table) -> None:
    text = CliRunner().invoke(table.main, ["gpt3xl_megatron", "--mode", "sim"]).output
    assert "| words of the classifier | 28996 |  | nominal: BERT's cased vocabulary |" in text
    assert text.count("| fitted on ") == 5


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", PREDICTED)
def test_page_says_what_the_table_comes_to(table, name, tmp_path) -> None:
    page = ROOT / "docs/results.md"
    copy = tmp_path / "results.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    CliRunner().invoke(table.main, [name, "--mode", "sim", "--page", str(copy)])
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_page_says_what_the_published_system_comes_to(table) -> None:
    kept = csv.DictReader(io.StringIO((KEPT / "gpt3xl_gpipe_network.csv").read_text()))
    rows = [replace(row_of(table, row), predicted_s=float(row["predicted_s"])) for row in kept]
    said = table.with_parameters(table.note(rows), table.PARAMETERS)
    marked = f"<!-- gpt3xl_gpipe_network sim -->\n{said}\n<!-- end -->"
    assert marked in (ROOT / "docs/results.md").read_text(encoding="utf-8")
