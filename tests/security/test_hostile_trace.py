"""`dpipe trace` of a foreign folder: counts are checked before they are used."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.bounds import quickly

from dpipe.errors import ConfigError
from dpipe.network.link import Host
from dpipe.report.trace import StepSpans, TraceInputs, dump_steps, save_inputs, write_chrome
from dpipe.schedule.action import parse_action
from dpipe.schedule.exchange import direct
from dpipe.schedule.generate import generate
from dpipe.schedule.lower import lower
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.span import Lane, Span

MANY = 1_000_000_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two replicas of two ranks, of which every part is whole."""
    folder = tmp_path / "trace"
    folder.mkdir()
    inputs = TraceInputs(
        lower(generate("1f1b", 2, 2), reduce=True),
        Cost.uniform(2, 10, 20, message_bytes=1000),
        None,
        hosts=(Host((0, 1), cores=1),),
        replicas=Replicas(direct(2)),
    )
    save_inputs(folder, inputs)
    for rank in range(4):
        span = Span(rank, Lane.COMPUTE, parse_action(f"{rank % 2}F0"), 0.0, 2.0)
        (folder / f"rank-{rank}.json").write_bytes(dump_steps([StepSpans(7, (span,))]))
    return tmp_path


def change(path: Path, keys: tuple[Any, ...], value: Any) -> None:
    table = json.loads(path.read_text())
    inner = table
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(table))


def test_unchanged_trace_is_written(run: Path) -> None:
    assert json.loads(write_chrome(run).read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("num_microbatches",), MANY, "computations a step, too many"),
        (("num_microbatches",), 10**30, "num_microbatches: Input should be less"),
        (("num_microbatches",), 0, "num_microbatches: Input should be greater"),
        (("num_microbatches",), 1000, "actions are none of 2 stages and 1000 micro-batches"),
        (("rank_of_stage",), [0] * 5000, "5000 stages are too many"),
        (("rank_of_stage",), [0] * 1000, "are none of 1000 stages"),
        (("rank_of_stage",), [], "rank_of_stage"),
        (("rank_of_stage", 1), 7, "1 stages on rank 7 of 2"),
        (("rank_of_stage", 1), 0, "does not belong there"),
        (("programs", 0), ["0F0"] * 14, "there twice"),
        (("programs", 0, 0), "9F0", "9F0 on rank 0 does not belong there"),
        (("programs", 0, 0), "0F9", "0F9 on rank 0 does not belong there"),
        (("programs", 0, 0), "1" * 4000 + "F0", "programs.0.0"),
        (("programs", 0, 0), "1" * 40 + "F0", "is not an action"),
        (("replicas", "exchange", "num_replicas"), 60_000, "too many"),
        (("replicas", "exchange", "num_replicas"), MANY, "num_replicas"),
        (("replicas", "exchange", "num_replicas"), 1, "num_replicas must be at least 2"),
        (("replicas", "exchange", "num_parts"), 60_000, "num_parts"),
        (("replicas", "exchange", "name"), "x", "no exchange is called"),
        (("replicas", "exchange", "name"), "parameter-server", "needs servers"),
        (("replicas", "servers"), [0], "1 servers for 2 stages"),
        (("tensor_size",), 60_000, "ranks are too many"),
        (("hosts", 0, 1), 0, "hosts.0.1"),
        (("cost", "forward_us"), [1.0] * 50_000, "must have 50000 values"),
        (("cost", "forward_us", 0), float("nan"), "cost.forward_us"),
        (("cost", "activation_bytes", 0), 10**400, "cost.activation_bytes"),
        (("cost", "new_us"), 1, "unexpected keyword argument"),
        (("network",), "x" * 5000, "network"),
        (("connections",), MANY, "connections"),
    ],
)  # fmt: skip
def test_plan_that_counts_more_than_a_run_has_is_refused_at_once(
    run: Path, keys: tuple[Any, ...], value: Any, words: str
) -> None:
    """A billion micro-batches took 700 MB in 90 s."""
    change(run / "trace/plan.json", keys, value)
    with quickly(), pytest.raises(ConfigError, match=r"plan\.json is damaged") as caught:
        write_chrome(run)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 800
    assert not (run / "trace.json").exists()


def test_ranks_that_have_no_file_are_not_simulated(run: Path) -> None:
    change(run / "trace/plan.json", ("replicas", "exchange", "num_replicas"), 400)
    with quickly(), pytest.raises(ConfigError, match=r"rank-4\.json cannot be read: No such file"):
        write_chrome(run)


def test_schedule_that_cannot_end_is_refused_without_its_grid(run: Path) -> None:
    programs = [["0F0", "0F1", "0SEND_F0", "0SEND_F1"], ["1RECV_F0", "1B0", "1F0"]]
    change(run / "trace/plan.json", ("programs",), programs)
    with quickly(), pytest.raises(ConfigError, match=r"plan\.json is damaged: schedule") as caught:
        write_chrome(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["compute", "0F0", "0", 1], "spans.0.2"),
        (["compute", "0F0", 0, float("inf")], "spans.0.3"),
        (["compute", "0F0", 0, 1e300], "spans.0.3"),
        (["compute", "0F0", 0, 1, 10**30], "spans.0.4"),
        (["compute", "0F0", 0, 1, 1, 1, {}], "spans.0.6"),
        (["compute", "0F0", 0, 1, 1, 1, 1, 1], "spans.0"),
        (["elsewhere", "0F0", 0, 1], "spans.0.0"),
        (["compute", "1" * 20 + "F0", 0, 1], "is not an action"),
    ],
)
def test_span_of_another_shape_is_refused(run: Path, row: list[Any], words: str) -> None:
    path = run / "trace/rank-1.json"
    path.write_text(json.dumps([{"step": 7, "spans": [row]}]))
    with pytest.raises(ConfigError, match=r"rank-1\.json is damaged") as caught:
        write_chrome(run)
    assert words in str(caught.value)


def test_steps_without_spans_are_drawn(run: Path) -> None:
    for path in run.glob("trace/rank-*.json"):
        path.write_text('[{"step": 7, "spans": []}]')
    assert json.loads(write_chrome(run).read_text())


@pytest.mark.parametrize("name", ["plan.json", "rank-1.json"])
def test_file_that_no_run_writes_is_not_read(run: Path, name: str) -> None:
    with (run / "trace" / name).open("wb") as file:
        file.truncate(65 << 20)
    with quickly(), pytest.raises(ConfigError, match="a run writes no such file"):
        write_chrome(run)
