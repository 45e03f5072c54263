"""Each table of the results has the figures of its file."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import pytest
from pages import DOCS, README, ROOT, text_of

RESULTS = DOCS / "results.md"
KEPT = ROOT / "scripts/results"
NETWORKS = [("0.1", "10"), ("1", "5"), ("5", "2"), ("10", "1"), ("50", "1")]


def lines_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (KEPT / f"{name}.jsonl").read_text("utf-8").splitlines()]


def table(title: str, page: Path = RESULTS) -> list[list[str]]:
    """The rows of the first table below a heading, its own heading apart."""
    _, _, section = text_of(page).partition(f"\n## {title}\n")
    found = re.search(r"^\|.*?(?=^[^|])", section, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    rows = [line.strip("|").split("|") for line in found[0].splitlines() if line]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def seconds(value: object) -> str:
    return f"{float(str(value)):.2f}"


def predicted(replicas: int, engine: str, schedule: str, wire: str) -> dict[str, dict[str, str]]:
    """By network, from scripts/table.py --mode sim."""
    with (KEPT / "sim/gpt3xl_gpipe_network.csv").open(encoding="utf-8") as lines:
        return {
            f"{row['delay_ms']} ms, {row['bandwidth_gbps']} Gbit/s": row
            for row in csv.DictReader(lines)
            if (row["engine"], row["schedule"], row["wire"]) == (engine, schedule, wire)
            and row["data_parallel"] == str(replicas)
        }


def measured(wire: str) -> dict[str, str]:
    return {
        f"{line['delay_ms']:g} ms, {line['bandwidth_gbps']:g} Gbit/s": seconds(line["measured_s"])
        for line in lines_of("gpt3xl_gpipe_network")
        if (line["mode"], line["engine"], line["schedule"]) == ("replay", "dpipe", "auto")
        and line["wire"] == wire
        and line["data_parallel"] == 1
        and line["delay_ms"] is not None
    }


def five_networks() -> list[list[str]]:
    source = predicted(1, "published", "gpipe", "fp32")
    rows = []
    for network, row in source.items():
        cells = [network, seconds(row["published_s"]), seconds(row["predicted_s"])]
        for wire in ("fp32", "bf16"):
            ours = predicted(1, "dpipe", "auto", wire)[network]
            cells += [seconds(ours["predicted_s"]), measured(wire)[network]]
        rows.append(cells)
    return rows


def test_published_system_on_five_networks() -> None:
    assert len(five_networks()) == 5
    assert table("The published system on five networks") == five_networks()


def test_readme_has_the_same_figures() -> None:
    shown = table("Why", README)
    assert len(shown) >= 5
    assert shown == table("The settings of a real training, on these networks and on others")


def test_settings_of_a_real_training() -> None:
    shown = table("The settings of a real training, on these networks and on others")
    cells = [cell for row in shown for cell in row[2:] if cell]
    kept = lines_of("gpt3xl_networks")
    assert len(kept) == 13
    assert Counter(cells) == Counter(
        seconds(line[key]) for line in kept for key in ("predicted_s", "measured_s")
    )


def test_four_replicas_of_the_published_system() -> None:
    expected = []
    for network, row in predicted(4, "published", "gpipe", "fp32").items():
        ours = [predicted(4, "dpipe", "auto", wire)[network] for wire in ("fp32", "bf16", "int8")]
        shown = [row["published_s"], row["predicted_s"], *(each["predicted_s"] for each in ours)]
        expected.append([network, *map(seconds, shown)])
    assert len(expected) == 4
    assert table("Four replicas of the published system, predicted") == expected


def that_day_and_today(row: dict, text: Callable[[float], str]) -> str:
    """The prediction of the day of a measured run, and today's if it differs."""
    that_day = text(row["predicted_that_day_s"])
    today = text(row["predicted_today_s"])
    return that_day if today == that_day else f"{that_day} (today {today})"


def of_sweep(name: str) -> list[dict]:
    """Kept by scripts/today.py."""
    return [row for row in lines_of("sim/today") if row["sweep"] == name]


def pairs(rows: Iterable[Iterable[str]]) -> Counter[str]:
    """Cells of a prediction and a measurement."""
    cells = [cell for row in rows for part in row for cell in part.split("; ")]
    number = r"\d[\d.]*"
    pair = rf"{number}( \(today {number}\))?, {number}"
    return Counter(cell for cell in cells if re.fullmatch(pair, cell))


def test_replicas_measured_beside_simulated() -> None:
    shown = pairs(row[1:] for row in table("Replicas, measured beside simulated"))
    kept = Counter(
        f"{that_day_and_today(row, seconds)}, {seconds(row['measured_s'])}"
        for row in of_sweep("gpt3xl_replicas")
    )
    assert shown.total() == 17
    assert shown == kept


def three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def test_tensor_parallelism_over_a_slow_link() -> None:
    shown = {
        (row[0], column): cell
        for row in table("Tensor parallelism over a slow link")
        for column, cell in enumerate(row[1:])
    }
    columns = [(1, "auto"), (1, "1f1b"), (2, "1f1b"), (4, "1f1b"), (8, "1f1b")]
    kept = {}
    for row in of_sweep("gpt3xl_megatron"):
        network = row["network"].removesuffix("gbps").replace("ms-", " ms, ") + " Gbit/s"
        schedule = row["schedule"].partition(",")[0]
        predicted = that_day_and_today(row, three_digits)
        column = columns.index((row["tensor_parallel"], schedule))
        kept[network, column] = f"{predicted}, {three_digits(row['measured_s'])}"
    assert len(shown) == 20
    assert shown == kept


def test_how_long_plans_take() -> None:
    rows = []
    for line in lines_of("plan_times"):
        machines = f"{line['machines']}, {line['fleet']}"
        size = f"{line['stages']} x {line['replicas']}"
        estimate = f"{line['estimated_s'] / line['step_s']:.2f}"
        rows.append([machines, size, f"{line['step_s']:.2f}", estimate, f"{line['cpu_s']:.1f}"])
    shown = table("How long a plan takes")
    assert [row[:5] for row in shown] == rows


@pytest.mark.parametrize(
    ("name", "where"),
    [("convergence", "between stages"), ("convergence_data_parallel", "between two replicas")],
)
def test_what_wire_formats_cost_in_loss(name: str, where: str) -> None:
    first, *others = [line["final_held_out_loss"] for line in lines_of(name)]
    kept = Counter(percent(loss, first) for loss in others)
    rows = table("What wire formats cost in loss")
    shown = Counter(row[2] for row in rows if row[0] == where)
    if where == "between two replicas":
        (not_clipped,) = kept - shown  # it is below the table
        assert f"Of the last, {not_clipped.removeprefix('+')}" in text_of(RESULTS)
        kept -= Counter([not_clipped])
    assert shown == kept


def test_steps_that_overlap_in_the_lab() -> None:
    rows = []
    for row in of_sweep("gpt3xl_overlap"):
        times = [that_day_and_today(row, seconds), seconds(row["measured_s"])]
        label = row["system"].removeprefix("dpipe").strip()
        schedule = ", ".join(filter(None, (row["schedule"], label)))
        rows.append([schedule, row["wire"], *times])
    assert table("Few micro-batches, measured") == rows


def test_what_steps_that_overlap_cost_in_loss() -> None:
    lines = lines_of("convergence_overlap")
    first = lines[0]["final_held_out_loss"]
    rows = []
    for line in lines:
        loss = line["final_held_out_loss"]
        rows.append([line["name"], f"{loss:.4f}", percent(loss, first)])
    assert table("What steps that overlap cost in loss") == rows


def percent(loss: float, of: float) -> str:
    text = f"{(loss / of - 1) * 100:+.2f} %"
    return "0.00 %" if float(text.split()[0]) == 0 else text


def real_compute() -> list[list[str]]:
    lines = lines_of("real_compute")
    rows = []
    for name in dict.fromkeys(line["name"] for line in lines):
        own = [line for line in lines if line["name"] == name]
        parts = [median(line["parts_ms"][part] for line in own) for part in own[0]["parts_ms"]]
        measured_ms = median(line["measured_ms"] for line in own)
        ratios = [line["ratio"] for line in own]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([name, *(f"{ms:.1f}" for ms in [*parts, measured_ms]), spread])
    return rows


def test_real_compute_on_two_cores() -> None:
    assert len(real_compute()) == 9
    assert table("Real compute on two cores") == real_compute()


def test_memory_of_published_models() -> None:
    worst: dict[str, dict[str, str]] = {}
    for line in lines_of("hub_memory"):
        ranks = zip(line["predicted"], line["measured"], strict=True)
        off = max(abs(predicted / measured - 1) for predicted, measured in ranks)
        assert off < 0.03
        worst.setdefault(line["family"], {})[line["way"]] = f"{off:.1%}"
    ways = list(worst["llama"])
    rows = [[family, *(cells.get(way, "") for way in ways)] for family, cells in worst.items()]
    assert len(rows) == 20
    assert table("Memory", DOCS / "fine-tuning.md") == rows


def test_what_chaos_did_and_left() -> None:
    """Chaos prints more than the page shows; the file has what the page does."""
    columns = ("faults", "to_a_step", "steps_repeated", "goodput", "losses")
    rows = []
    for line in lines_of("chaos"):
        options = f"`{line['options']}`"
        if line["date"] != "2026-11-25":  # that of the text
            options += f" ({line['date']})"
        rows.append([options, *(line[column] for column in columns)])
    page = text_of(DOCS / "machines.md")
    assert rows
    for row in rows:
        assert f"| {' | '.join(row)} |" in page
    _, _, below = page.partition("| `scripts/chaos job.toml` with |")
    assert below.partition("\n\n")[0].count("\n| ") == 1 + len(rows)


def simulated(name: str) -> list[dict[str, str]]:
    with (KEPT / f"sim/{name}.csv").open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_what_micro_batches_leave_unexplained() -> None:
    rows = simulated("gpt3xl_gpipe_micro_batches")
    named = [
        float(row["error_percent"])
        for row in rows
        if row["micro_batch"] == "3" and float(row["bandwidth_gbps"]) <= 2
    ]
    assert len(named) == 4
    assert sorted(named) == sorted(float(row["error_percent"]) for row in rows)[:4]
    said = f"these four rows are predicted {-max(named)} to {-min(named)} % too short"
    assert said in " ".join(text_of(RESULTS).split())


def test_parts_of_bert_that_miss_their_aim_are_named() -> None:
    rows = []
    for row in simulated("megatron_bert345m_timers"):
        error = float(row["error_percent"])
        if abs(error) > 10 and not row["fitted"] and not row["contradicts"]:
            times = [row["published_ms"], row["predicted_ms"]]
            rows.append([row["gpus"], row["part"], *times, f"{error:+.1f} %"])
    _, _, section = text_of(RESULTS).partition("### megatron_bert345m_timers")
    for row in rows:
        assert f"| {' | '.join(row)} |" in section
    shown = section.partition("<!--")[0]
    assert shown.count("\n| ") == 2 + len(rows)


def bert_timers() -> dict[str, dict[str, dict[str, str]]]:
    """By number of GPUs and part."""
    runs: dict[str, dict[str, dict[str, str]]] = {}
    for row in simulated("megatron_bert345m_timers"):
        runs.setdefault(row["gpus"], {})[row["part"]] = row
    return runs


def test_iterations_of_bert_keep_their_aim() -> None:
    rows = [row for row in simulated("megatron_bert345m_scaling") if not row["contradicts"]]
    assert [row["gpus"] for row in rows] == ["1", "8", "32", "64", "128"]
    assert max(abs(float(row["error_percent"])) for row in rows) <= 10
    assert "The aim of 10 % a row is met" in " ".join(text_of(RESULTS).split())


def test_timers_of_bert_that_add_up_to_more_than_their_iteration() -> None:
    section = " ".join(text_of(RESULTS).split())
    rest_ms = {}
    for row in simulated("megatron_bert345m_scaling"):
        if row["contradicts"]:
            continue
        parts = bert_timers()[row["gpus"]].values()
        timed_ms = sum(float(part["published_ms"]) for part in parts)
        took_ms = float(row["published_ms"])
        rest_ms[row["gpus"]] = took_ms - timed_ms
    said = (
        f"On 128 GPUs the timers add up to {timed_ms:.0f} ms, and the iteration took {took_ms:.0f}"
    )
    assert said in section
    assert rest_ms.pop("128") < 0
    least, most = min(rest_ms.values()), max(rest_ms.values())
    assert f"1, 8, 32 and 64 GPUs {least:.0f} to {most:.0f} ms are in no timer" in section


def test_what_hosts_of_several_machines_make_slower() -> None:
    eight, *more = (bert_timers()[gpus] for gpus in ("8", "32", "64", "128"))
    section = " ".join(text_of(RESULTS).split())
    for part, said in (
        ("backward", "backward takes {}, {} and {} % longer"),
        ("waiting for neighbours", "for which the last stage waits, {}, {} and {} %"),
    ):
        one_ms = float(eight[part]["published_ms"])
        longer = [float(run[part]["published_ms"]) / one_ms - 1 for run in more]
        assert said.format(*(f"{share * 100:.0f}" for share in longer)) in section


def test_check_of_bert_that_contradicts_the_runs_beside_it() -> None:
    part = "check for infinities"
    checks = [bert_timers()[gpus][part]["published_ms"] for gpus in ("32", "64", "128")]
    said = "{:.0f}, {:.0f} and {:.0f} ms on 32, 64 and 128 GPUs".format(*map(float, checks))
    assert said in " ".join(text_of(RESULTS).split())


def test_how_long_a_thread_that_wakes_waits_for_a_core() -> None:
    title = "How long a thread that wakes waits for a core"
    kept = lines_of("wakes")
    rows = []
    for line in kept:
        times = [f"{line[key]:.3f}" for key in ("mean_ms", "median_ms", "one of ten_ms")]
        rows.append(
            [line["run"], line["woken on"], line["which was at"], f"{line['wakes']:,}", *times]
        )
    assert table(title) == rows
    both = [line for line in kept if line["run"].startswith("two stages")]
    num_exchanges = 30 * 88  # steps, and in each step those of both stages
    waits_ms = sum(
        line["wakes"] * line["mean_ms"] for line in both if line["which was at"] == "the run"
    )
    _, _, section = text_of(RESULTS).partition(f"## {title}")
    assert f"{sum(line['wakes'] for line in both) / num_exchanges:.0f} times" in section
    assert f"{waits_ms / num_exchanges:.1f} ms an exchange" in section


def test_what_it_costs_a_run_to_be_watched() -> None:
    kept = lines_of("watching")
    rows = []
    for line in kept:
        cells = [str(line["pages"]), str(line["turns"])]
        for name in ("time", "processor_time"):
            first, third = line[f"{name}_quartiles"]
            cells.append(f"{line[name]:.3f} ({first:.3f}, {third:.3f})")
        rows.append([*cells, f"{line['watcher_share_of_a_core']:.1%} of a core"])
    page = DOCS / "watching.md"
    assert table("What it costs the run", page) == rows
    command = f"`scripts/watching.py --turns {kept[0]['turns']} --steps {kept[0]['steps']} --out"
    assert command in text_of(page)
    assert kept[0]["date"] in text_of(page)
    assert f"on {kept[0]['cores']} cores" in text_of(page)
