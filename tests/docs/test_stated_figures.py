"""Figures in the text of a page, outside tables, are those of their file in scripts/results."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from statistics import mean, median

import pytest
from pages import DOCS, ROOT, text_of
from tables import micro_batches, tcp
from test_result_files import lines_of, table
from test_results_page import marked, one_line, sections
from torch import nn

from dpipe.stage.bottleneck import narrow_gpt
from dpipe.stage.gpt import gpt
from dpipe.wire.format import wire_bytes

RESULTS = DOCS / "results.md"


def section_of(page: str, title: str) -> str:
    """The text below a heading, up to the next one that is as high."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*)", text_of(ROOT / page), re.M | re.S)
    assert found is not None, f"{page} has no heading {title!r}"
    level, below = found.groups()
    return one_line(re.split(rf"^#{{1,{len(level)}}} ", below, maxsplit=1, flags=re.M)[0])


def in_results(title: str) -> str:
    return one_line(sections()[title])


@pytest.mark.parametrize("line", lines_of("by_hand"), ids=lambda line: line["said"][:40])
def test_figure_of_a_run_whose_output_is_not_kept(line: dict[str, str]) -> None:
    """It was copied from the page, with the command and the date of the run."""
    assert re.fullmatch(r"2026-\d\d-\d\d", line["date"])
    assert line["from"]
    assert line["said"] in section_of(line["page"], line["section"])


def off(line: dict) -> float:
    return (line["measured_s"] / line["predicted_s"] - 1) * 100


def test_how_far_the_lab_was_from_the_predictions_of_the_day() -> None:
    ours = [line for line in lines_of("gpt3xl_gpipe_network") if line["engine"] == "dpipe"]
    slow = [
        line for line in ours if line["schedule"] == "zero-bubble" and line["bandwidth_gbps"] == 1
    ]
    most = max(abs(off(line)) for line in ours if line not in slow)
    first, second = (f"{-off(line):.1f}" for line in slow)
    said = f"within {most:.1f} % of their predictions, except zero-bubble at 1 Gbit/s ({first} and"
    assert f"{said} {second} % faster)" in in_results(
        "All schedules on five networks, beside torch"
    )


def percents_today() -> Iterator[tuple[str, float]]:
    """By system: how far what was measured is from today's prediction, from the marked table."""
    head, _, *rows = marked("gpt3xl_gpipe_network")
    for row in rows:
        for system, cell in zip(head[1:], row[1:], strict=True):
            if system.startswith("dpipe"):
                yield system, float(re.findall(r"([+-][\d.]+) %", cell)[-1])


def test_how_far_the_lab_is_from_the_predictions_of_today() -> None:
    cells = list(percents_today())
    assert len(cells) == 25
    auto = max(percents for system, percents in cells if " auto " in system)
    others = max(abs(percents) for system, percents in cells if " auto " not in system)
    section = in_results("All schedules on five networks, beside torch")
    assert f"is within {others:.1f} % of all rows except those of `auto`" in section
    assert f"predicts them up to {auto:.1f} % shorter than measured" in section


def test_rows_that_a_rule_was_learnt_from() -> None:
    lines = lines_of("gpt3xl_gpipe_network")
    slow = [
        line for line in lines if line["schedule"] == "zero-bubble" and line["bandwidth_gbps"] == 1
    ]
    that_day, measured = (
        " s and ".join(f"{line[key]:.2f}" for line in slow) for key in ("predicted_s", "measured_s")
    )
    section = in_results("All schedules on five networks, beside torch")
    assert f"predicted that day {that_day} s, measured {measured} s" in section
    auto = lines[0]
    said = f"predicted that day {auto['predicted_s']:.2f} s, measured {auto['measured_s']:.2f} s"
    assert said in section
    (group,) = [
        line for line in lines_of("real_compute_first") if "tensor-parallel" in line["name"]
    ]
    predicted = f"predicted that day {group['parts_ms']['messages']:.1f} ms"
    assert f"{predicted}, measured {group['measured_ms']:.1f} ms" in section
    demo = [line for line in lines_of("real_compute_even") if line["name"].startswith("the demo")]
    predicted = f"predicted that day {median(each['parts_ms']['messages'] for each in demo):.1f} ms"
    measured = f"measured {median(each['measured_ms'] for each in demo):.1f} ms"
    assert f"{predicted}, {measured}" in section


def test_replicas_are_furthest_from_their_prediction_with_local_sgd() -> None:
    name = "gpt3xl_replicas"
    lines = lines_of(name)
    far = max(lines, key=lambda line: abs(off(line)))
    assert far["engine"] == "dpipe local-sgd"
    section = in_results("Replicas, measured beside simulated")
    assert f"Predictions are furthest apart for local SGD, by {abs(off(far)):.1f} %" in section
    today = [abs(row["measured_s"] / row["predicted_today_s"] - 1) for row in today_of(name)]
    assert f"and are at most {max(today) * 100:.1f} % off" in section


def today_of(name: str) -> list[dict]:
    return [row for row in lines_of("sim/today") if row["sweep"] == name]


@pytest.mark.parametrize(
    ("name", "title", "said"),
    [
        ("gpt3xl_megatron", "Tensor parallelism over a slow link", "of the day, in every digit"),
        ("gpt3xl_overlap", "Few micro-batches, measured", "are those of the day"),
    ],
)
def test_predictions_of_today_that_are_those_of_the_day(name: str, title: str, said: str) -> None:
    rows = today_of(name)
    assert rows
    assert all(row["predicted_today_s"] == row["predicted_that_day_s"] for row in rows)
    assert said in in_results(title)


def test_bf16_at_1_gbps_is_faster_than_the_published_step_at_10() -> None:
    (line,) = [
        line
        for line in lines_of("gpt3xl_networks")
        if (line["delay_ms"], line["bandwidth_gbps"], line["wire"]) == (10, 1, "bf16")
    ]
    published = table("Why", ROOT / "README.md")[0][1]
    assert line["measured_s"] < float(published)
    assert "At 1 Gbit/s and 10 ms, a step with bf16" in text_of(ROOT / "README.md")


def test_share_of_headers() -> None:
    shares = [
        1 - frames.payload_bytes.value / frames.frame_bytes.value
        for frames in (tcp.STANDARD, tcp.JUMBO)
    ]
    standard, jumbo = (f"{share * 100:.1f} %" for share in shares)
    assert f"headers take {standard} of its rate instead of {jumbo}" in one_line(text_of(RESULTS))
    assert f"Headers then take {standard} of the rate instead of {jumbo}" in one_line(
        text_of(RESULTS)
    )
    for page in ("results.md", "networks.md"):
        assert f"leaves {1 - shares[0]:.3f} of it for payload" in one_line(text_of(DOCS / page))


def test_three_sequences_take_less_than_three_times_one() -> None:
    (one, _), (three, _) = (micro_batches.stage_us(count, in_waves=True) for count in (1, 3))
    said = f"three together take {three / one:.2f} times the forward pass of one"
    assert said in one_line(text_of(RESULTS))


def test_computing_of_a_step_on_narrow_links() -> None:
    a_sequence_ms = micro_batches.FORWARD_MS.value + micro_batches.BACKWARD_MS.value
    assert f"Computing takes {64 * a_sequence_ms / 1e3:.1f} s of each step" in in_results(
        "Narrow links, predicted"
    )


def test_planner_beside_the_best_by_dtfms_cost() -> None:
    lines = lines_of("placement")
    alike, unlike = (
        line["planner"] / line["by_dtfm"]
        for line in lines
        if line["stages"] * line["replicas"] == 64
    )
    section = in_results("Where machines sit, beside other placements")
    said = f"takes {alike:.2f} of the time of DT-FM's placement where machines are alike"
    assert f"{said}, and {unlike:.2f} where they are not" in section


def test_processor_time_of_a_search_for_a_placement() -> None:
    took_s = [line["search_cpu_s"] for line in lines_of("placement")]
    assert len(took_s) == 7
    said = f"A search took {min(took_s):.1f} to {max(took_s):.1f} s of processor time"
    assert said in in_results("Where machines sit, beside other placements")


def times_fewer(line: dict) -> float:
    """Bytes of fp32 gradients at every step, over those of a line of local SGD."""
    options = dict(override.split("=", 1) for override in line["overrides"])
    form = json.loads(options["data_parallel.wire"])
    inner_steps = int(options["data_parallel.inner_steps"])
    values = 1 << 20
    return inner_steps * wire_bytes("none", values) / wire_bytes(form, values)


def test_bytes_that_local_sgd_saves() -> None:
    """As many values are averaged at once; less often, and in fewer bits."""
    lines = {line["name"]: line for line in lines_of("convergence_data_parallel")}
    e3m0, int4 = (
        f"{times_fewer(lines[f'local SGD, 20 inner steps, {form}']):.0f}"
        for form in ("e3m0", "int4")
    )
    said = f"sends {e3m0} times fewer bytes with `e3m0` and {int4} times fewer with `int4`"
    assert said in in_results("What wire formats cost in loss")
    replicas = one_line(text_of(DOCS / "replicas.md"))
    assert f"sends {e3m0} times fewer bytes than fp32 gradients at every step" in replicas


def by_name(name: str) -> dict[str, list[float]]:
    """Final losses by cell, seed after seed."""
    losses: dict[str, list[float]] = {}
    for line in lines_of(name):
        losses.setdefault(line["name"], []).append(line["final_held_out_loss"])
    return losses


def above(losses: dict[str, list[float]], cell: str) -> list[float]:
    """Percent above the first cell, seed by seed."""
    first = next(iter(losses.values()))
    return [(loss / of - 1) * 100 for loss, of in zip(losses[cell], first, strict=True)]


def test_what_steps_that_overlap_save_and_cost() -> None:
    times_s = {
        (line["schedule"], line["wire"]): line["measured_s"]
        for line in lines_of("gpt3xl_overlap")
        if line["engine"] == "dpipe"  # in slices is another row
    }
    fp32, bf16 = (
        f"{(1 - times_s['2bw', wire] / times_s['auto', wire]) * 100:.0f} %"
        for wire in ("fp32", "bf16")
    )
    page = one_line(text_of(DOCS / "writing-a-configuration.md"))
    assert f"{fp32} of a step of 12 stages and 16 micro-batches at 50 ms and 1 Gbit/s" in page
    assert f"in fp32, {bf16} in bf16" in page
    losses = by_name("convergence_overlap")
    (same_rate,) = above(losses, "2bw")
    (a_third,) = above(losses, "2bw, a third of the learning rate")
    assert f"on the demo's text {same_rate:.0f} % of the loss" in page
    assert f"{a_third:.1f} % with a third of the learning rate" in page


def test_what_slices_of_few_micro_batches_save() -> None:
    times_s = {
        (line["engine"], line["wire"]): line["measured_s"]
        for line in lines_of("gpt3xl_overlap")
        if line["schedule"] == "auto"
    }
    fp32, bf16 = (
        f"{(1 - times_s['dpipe 4 slices', wire] / times_s['dpipe', wire]) * 100:.0f} %"
        for wire in ("fp32", "bf16")
    )
    page = one_line(text_of(DOCS / "writing-a-configuration.md"))
    assert f"{fp32} in fp32 and {bf16} in bf16; [other networks]" in page


def test_first_step_of_fp32_over_50_ms_where_hosts_have_cubic() -> None:
    (line,) = [
        line
        for line in lines_of("gpt3xl_stock_cubic")
        if (line["delay_ms"], line["bandwidth_gbps"], line["wire"]) == (50, 1, "fp32")
        and line["engine"] == "dpipe"
    ]
    first_s, *_ = line["steps_s"]
    assert f"With Reno the first takes {first_s:.1f} s" in in_results("TCP as it comes")


def test_torch_does_better_with_bbr_than_with_cubic() -> None:
    with_bbr, with_cubic = (
        {
            (line["delay_ms"], line["bandwidth_gbps"]): line["measured_s"]
            for line in lines_of(name)
            if line["engine"] == "torch"
        }
        for name in ("gpt3xl_stock", "gpt3xl_stock_cubic")
    )
    assert with_bbr
    for network, seconds in with_bbr.items():
        assert seconds < with_cubic[network]
    assert "torch does better with BBR than with CUBIC" in in_results("TCP as it comes")


def test_four_bits_forward_by_seed() -> None:
    losses = by_name("convergence_wires")
    seeds = [
        *above(losses, "int4 forward, int8 backward"),
        *above(losses, "int4 forward, int6 backward"),
    ]
    assert len(seeds) == 6
    section = in_results("What fewer bits cost in eight stages")
    assert f"single seeds lie between {min(seeds):.2f} and {max(seeds):.2f} %" in section


def test_four_bits_forward_without_the_rounding_that_was_trained_with() -> None:
    losses = by_name("convergence_wires")
    over_wire = mean(above(losses, "int4 forward, int8 backward"))
    exported = mean(above(losses, "int4 forward, int8 backward, evaluated in fp32"))
    section = in_results("What fewer bits cost in eight stages")
    assert f"has lost {exported:.1f} % and not {over_wire:.2f} %" in section


def test_what_a_rotation_saves() -> None:
    losses = by_name("convergence_wires")
    plain = mean(above(losses, "int4"))
    saved = plain - mean(above(losses, "int4, rotated"))
    section = in_results("What fewer bits cost in eight stages")
    assert f"A rotation alone saves {saved:.0f} of {plain:.1f} %" in section
    page = text_of(DOCS / "wire-formats.md")
    assert f"it [recovered {saved / plain * 100:.0f} %](results.md" in page


def test_feedback_brings_four_bits_backward_within_a_percent() -> None:
    losses = by_name("convergence_wires")
    assert max(above(losses, "int4, feedback backward")) < 1
    assert "which it brings within 1 % of the loss" in one_line(text_of(DOCS / "wire-formats.md"))


def test_fine_tuning_over_few_bits() -> None:
    lines = lines_of("convergence_finetune")
    first = {line["name"]: line["held_out_loss"]["0"] for line in reversed(lines)}
    section = in_results("What fewer bits cost a fine-tuning")
    rounded = "fp32 has {:.3f} nats, `int8` {:.3f} and `int4` forward {:.3f}"
    names = ("fp32", "int8", "int4 forward, int8 backward")
    assert rounded.format(*(first[name] for name in names)) in section
    for name in ("int8+outlier", "int6+hadamard+outlier", "int4+hadamard+outlier"):
        assert f"`{name}` {first[name]:.3f}" in section


def test_an_outlier_apart_leaves_a_fine_tuning_its_loss() -> None:
    losses = by_name("convergence_finetune")
    cost = {name: mean(above(losses, name)) for name in losses}
    page = one_line(text_of(DOCS / "wire-formats.md"))
    assert (
        f"`int8+outlier` costs {cost['int8+outlier']:.2f} % of the loss, `int6+hadamard+outlier` "
        f"{cost['int6+hadamard+outlier']:.2f} %, and what is learned with `int4+hadamard+outlier` "
        f"{cost['int4+hadamard+outlier, evaluated in fp32']:.2f} %"
    ) in page
    advice = f"and has cost [{cost['int6+hadamard+outlier']:.2f} % of the loss](results.md"
    assert advice in one_line(text_of(DOCS / "fine-tuning.md"))


def test_most_of_what_four_bits_cost_a_fine_tuning_is_of_the_evaluation() -> None:
    losses = by_name("convergence_finetune")
    name = "int4+hadamard+outlier forward, int8 backward"
    over_wire = mean(above(losses, name))
    exported = mean(above(losses, f"{name}, evaluated in fp32"))
    both_ways = mean(above(losses, "int4+hadamard+outlier, evaluated in fp32"))
    section = in_results("What fewer bits cost a fine-tuning")
    assert f"seem to cost {over_wire:.1f} %" in section
    assert f"has lost {exported:.2f} %, and {both_ways:.2f} % with four bits both ways" in section


def test_losses_of_bottlenecks_vary_by_seed() -> None:
    losses = by_name("convergence_narrow")
    spreads = []
    for width, num_bytes in ((16, 65), (8, 33), (4, 17)):
        seeds = above(losses, f"{width} numbers a token, {num_bytes} bytes")
        assert len(seeds) == 3
        spreads.append(max(seeds) - min(seeds))
    section = in_results("What a model made for narrow links costs in loss")
    assert f"varies by {min(spreads):.1f} to {max(spreads):.1f} % from seed to seed" in section
    assert min(above(losses, "2 numbers a token, 9 bytes")) > 1


def parameters(layers: Iterable[Callable[[], nn.Module]]) -> int:
    return sum(value.numel() for layer in layers for value in layer().parameters())


def test_parameters_that_bottlenecks_add() -> None:
    sizes = {"vocab_size": 256, "num_layers": 8, "width": 128, "num_heads": 4, "context": 128}
    plain = parameters(gpt(**sizes, dropout=0, tied=False).layers)
    for width in (16, 2):
        one_each = {"bottleneck_width": width, "bottleneck_every": 1}
        narrow = parameters(narrow_gpt(**sizes, **one_each, dropout=0, tied=False).layers)
        assert round(5 * (narrow / plain - 1)) == 1
    section = in_results("What a model made for narrow links costs in loss")
    assert "of 256 bytes and 128 positions: a fifth more parameters than the plain one" in section


def test_what_the_fine_tuned_model_answers() -> None:
    printed = (ROOT / "scripts/results/finetune.txt").read_text(encoding="utf-8")
    (answer,) = re.findall(r"artificial intelligence\? -> '(.*)'$", printed, flags=re.MULTILINE)
    assert f'and after: "{answer}"' in in_results("Fine-tuning a published model")


def test_time_that_a_watched_step_takes_more() -> None:
    most = max(line["time"] for line in lines_of("watching"))
    assert most < 1.005
    assert "a step takes less than 0.5 % longer" in one_line(text_of(DOCS / "watching.md"))


GROUPS = (
    "two stages, each of two tensor-parallel ranks",
    "two stages, each of two tensor-parallel ranks, twice as wide",
)
EXCHANGES = 44  # of a tensor-parallel group in a step of two stages, as scripts/wakes.py counts


def test_core_time_of_messages() -> None:
    lines = lines_of("real_compute")
    section = in_results("Real compute on two cores")
    alone = [line for line in lines if "tensor-parallel" not in line["name"]]
    sizes = sorted(line["message_us"] / 1e3 for line in alone)
    rates = sorted(line["us_per_mb"] / 1e3 for line in alone)
    said = (
        f"{sizes[0]:.1f} to {sizes[-1]:.1f} ms and {rates[0]:.1f} to {rates[-1]:.1f} ms a megabyte"
    )
    assert said in section


def test_what_is_left_of_an_exchange() -> None:
    left_ms = []
    lines = lines_of("real_compute")
    for name in GROUPS:
        own = [line for line in lines if line["name"] == name]
        measured = median(line["measured_ms"] for line in own)
        predicted = median(line["parts_ms"]["messages"] for line in own)
        left_ms.append((measured - predicted) / EXCHANGES)
    narrow, wide = left_ms
    section = in_results("Real compute on two cores")
    assert f"some {EXCHANGES} exchanges a step" in section
    assert f"is {narrow:.1f} ms an exchange, and {wide:.1f} ms" in section


def of_groups(
    key: str, file: str = "real_compute", times: int = 3
) -> Iterator[tuple[list[float], list[float]]]:
    """Of each, pinned to both cores and not."""
    lines = lines_of(file)
    for name in GROUPS:
        pinned, free = (
            [line[key] for line in lines if line["name"] == of]
            for of in (f"{name}, pinned to both cores", name)
        )
        assert len(pinned) == len(free) == times
        yield pinned, free


def test_two_groups_that_are_pinned_take_what_is_predicted() -> None:
    pinned, free = zip(*of_groups("ratio"), strict=True)
    assert all(0.92 < ratio < 1.08 for each in pinned for ratio in each)
    of_pinned, of_free = (
        " and ".join(f"{median(of):.2f}" for of in each) for each in (pinned, free)
    )
    section = in_results("Real compute on two cores")
    assert f"{of_pinned} of the predicted time, beside {of_free} where they are not" in section


def test_what_pinning_two_groups_saves() -> None:
    said = []
    for pinned, free in of_groups("measured_ms"):
        first, second, third = (f"{a / b:.2f}" for a, b in zip(pinned, free, strict=True))
        said.append(f"{first}, {second} and {third}")
    narrow, wide = said
    section = in_results("Real compute on two cores")
    assert f"{narrow} of the time in three turns" in section
    assert f"and {wide} twice as wide" in section


def test_what_pinning_two_groups_saves_on_slower_cores() -> None:
    section = in_results("Real compute on two cores")
    times = []
    for pinned, free in of_groups("measured_ms", "real_compute_slower", 2):
        times.append(" and ".join(f"{a / b:.2f}" for a, b in zip(pinned, free, strict=True)))
    narrow, wide = times
    assert f"{narrow}, and {wide} twice as wide" in section
    ratios = list(of_groups("ratio", "real_compute_slower", 2))
    of_pinned, of_free = (
        [f"{ratio:.2f}" for each in ratios for ratio in each[which]] for which in (0, 1)
    )
    assert f"{', '.join(of_pinned[:3])} and {of_pinned[3]} of the predicted time" in section
    assert f"{', '.join(of_free[:3])} and {of_free[3]} where nobody had pinned" in section


LOSSY = ("finetuning_lossy", "finetuning_lossy_cubic", "finetuning_lossy_others")


def test_steps_over_lossy_links_are_near_their_prediction() -> None:
    lines = [line for name in LOSSY for line in lines_of(name)]
    off = [abs(line["measured_s"] / line["predicted_s"] - 1) for line in lines]
    assert (len(lines), max(off) <= 0.1) == (20, True)
    means = [mean(line["steps_s"][1:]) / line["predicted_s"] for line in lines]
    said = f"by the means of all steps behind the first: {max(means):.2f} of the prediction at most"
    assert said in in_results("Links that lose and delay packets, measured")


def test_steps_between_homes_are_near_their_prediction() -> None:
    lines = [line for line in lines_of("gpt3xl_home") if line["engine"] != "torch"]
    off = [abs(line["measured_s"] / line["predicted_s"] - 1) for line in lines]
    said = f"Every row of dpipe's is within {100 * max(off):.1f} % of its prediction"
    assert len(lines) == 7
    assert said in in_results("Links that lose and delay packets, measured")


def test_steps_with_bbr_that_was_asked_for() -> None:
    def seconds(name: str) -> dict[tuple[str, str], float]:
        return {
            (line["network"]["name"], line["wire"]): line["measured_s"] for line in lines_of(name)
        }

    begun_anew = seconds("finetuning_lossy")
    as_it_is = seconds("finetuning_lossy_bbr")
    longer = max(as_it_is[cell] / begun_anew[cell] - 1 for cell in begun_anew)
    said = f"its steps take up to {100 * longer:.0f} % longer"
    assert said in one_line(text_of(DOCS / "networks.md"))
