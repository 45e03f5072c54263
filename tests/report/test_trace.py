import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpipe.errors import ConfigError
from dpipe.network.link import Host, Network
from dpipe.report.processor_time import StepCpu
from dpipe.report.trace import (
    StepSpans,
    TraceInputs,
    dump_steps,
    load_inputs,
    load_steps,
    load_trace,
    measured_cost,
    measured_hosts,
    save_inputs,
    write_chrome,
)
from dpipe.schedule.action import parse_action
from dpipe.schedule.exchange import direct, parameter_server
from dpipe.schedule.generate import generate
from dpipe.schedule.lower import lower
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.simulate import simulate
from dpipe.timeline.span import Lane, Span

SCHEDULE = lower(generate("1f1b", 2, 2))
COST = Cost.uniform(2, 10, 20, message_bytes=1000)
INPUTS = TraceInputs(SCHEDULE, COST, None)
CROWDED = TraceInputs(SCHEDULE, COST, "slow.toml", 2, (Host((0, 1), cores=1),))
REPLICATED = TraceInputs(
    SCHEDULE,
    replace(COST, reduce_bytes=(8, 9)),
    None,
    replicas=Replicas(direct(3, 2), delayed=True),
)
PARAMETER_SERVER = TraceInputs(
    SCHEDULE, COST, None, replicas=Replicas(parameter_server(2, barrier=True), servers=(0, 4))
)
STALE = TraceInputs(
    SCHEDULE, COST, None, replicas=Replicas(parameter_server(2, stale=True), servers=(4, 4))
)


def span(rank: int, action: str, start_us: float, end_us: float, lane: Lane = Lane.COMPUTE) -> Span:
    return Span(rank, lane, parse_action(action), start_us, end_us)


def test_spans_survive_the_upload() -> None:
    step = StepSpans(
        7,
        (
            span(1, "1F0", 0.5, 2.0),
            Span(1, Lane.SEND, parse_action("1SEND_B0"), 2.0, 3.0, 4000, peer=3),
        ),
        StepCpu(5.0, 6.5),
    )
    assert load_steps(dump_steps([step]), rank=1) == [step]


@pytest.mark.parametrize(
    "inputs",
    [
        *(INPUTS, CROWDED, REPLICATED, PARAMETER_SERVER, STALE),
        replace(INPUTS, tensor_size=2),
        replace(INPUTS, waits_for_verdict=True),
        replace(INPUTS, seats=("b", "a")),
    ],
)
def test_inputs_survive_their_file(inputs: TraceInputs, tmp_path: Path) -> None:
    save_inputs(tmp_path, inputs)
    assert load_inputs(tmp_path) == inputs


def test_inputs_of_a_run_of_before_there_was_a_vote_are_read(tmp_path: Path) -> None:
    save_inputs(tmp_path, INPUTS)
    table = json.loads((tmp_path / "plan.json").read_text())
    del table["waits_for_verdict"], table["cost"]["vote_us"]
    table["programs"] = [
        [text for text in program if not text.endswith(("COMPLETE", "VOTE"))]
        for program in table["programs"]
    ]
    (tmp_path / "plan.json").write_text(json.dumps(table))
    inputs = load_inputs(tmp_path)
    assert (inputs.cost, inputs.ballots) == (COST, None)
    lanes = {span.lane for span in simulate(inputs.schedule, inputs.cost, Network()).spans}
    assert Lane.UPDATE in lanes


@pytest.mark.parametrize(("headers", "delay_ms"), [(True, 50), (False, 0.1)])
def test_vote_crosses_the_network_unless_the_transport_imitates_it(
    headers: bool, delay_ms: float, tmp_path: Path
) -> None:
    (tmp_path / "far.toml").write_text("delay_ms = 50\nbandwidth_gbps = 1\n")
    far = replace(INPUTS, network=str(tmp_path / "far.toml"), headers=headers)
    assert far.ballots is None
    ballots = replace(far, waits_for_verdict=True).ballots
    assert ballots is not None
    assert ballots.link(0, 1).delay_ms == delay_ms


def test_ranks_are_predicted_on_the_machines_that_the_plan_placed_them_on(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(
        "[default_link]\ndelay_ms = 1\nbandwidth_gbps = 1\n"
        + "".join(f'[[machine]]\nname = "{name}"\n' for name in "abc")
        + '[[link]]\nfrom = "a"\nto = "c"\ndelay_ms = 50\nbandwidth_gbps = 1\n'
    )
    in_order = replace(INPUTS, network=str(tmp_path / "m.toml"))
    placed = replace(in_order, seats=("c", "a"))
    assert in_order.assumed_network.link(0, 1).delay_ms == 1
    assert placed.assumed_network.link(0, 1).delay_ms == 50


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """The folder of a run of two ranks with a trace."""
    folder = tmp_path / "trace"
    folder.mkdir()
    save_inputs(folder, INPUTS)
    for rank in range(2):
        spans = (span(rank, f"{rank}F0", 0.0, 2.0),)
        (folder / f"rank-{rank}.json").write_bytes(dump_steps([StepSpans(7, spans)]))
    return tmp_path


def test_trace_is_written_beside_its_parts(traced: Path) -> None:
    assert json.loads(write_chrome(traced).read_text())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rank-1.json", None, r"rank-1\.json cannot be read: No such file"),
        ("rank-1.json", b'[{"step": 7, "spa', r"rank-1\.json is damaged: Invalid JSON"),
        (
            "rank-1.json",
            b'[{"step": 7, "spans": [["compute", "what", 0, 1]]}]',
            r"rank-1\.json is damaged",
        ),
        ("rank-1.json", b"[]", r"holds different steps for each rank, by rank \[\[7\], \[\]\]"),
        ("plan.json", b"", r"plan\.json is damaged: Invalid JSON"),
        ("plan.json", b"{}", r"plan\.json is damaged: num_microbatches: Field required"),
        ("plan.json", b"[]", r"plan\.json is damaged: Input should be"),
    ],
)
def test_part_of_a_trace_that_is_damaged_is_named(
    traced: Path, name: str, content: bytes | None, message: str
) -> None:
    path = traced / "trace" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        write_chrome(traced)


def test_trace_shows_the_steps_that_every_rank_has_sent(traced: Path) -> None:
    """A rank whose trace exceeds the upload limit sends fewer steps. The trace was refused, as if
    its files were from two runs.
    """
    earlier = StepSpans(6, (span(0, "0F0", 0.0, 3.0),))
    last = StepSpans(7, (span(0, "0F0", 5.0, 7.0),))
    (traced / "trace" / "rank-0.json").write_bytes(dump_steps([earlier, last]))
    assert [step for step, _, _ in load_trace(traced).steps] == [7]


def test_trace_that_cannot_be_written_is_named(traced: Path) -> None:
    (traced / "trace.json").mkdir()
    with pytest.raises(
        ConfigError, match=r"trace\.json cannot be written: Is a directory; copy the run"
    ):
        write_chrome(traced)


def steps_of(*spans: Span, cpu: StepCpu | None = None) -> list[list[StepSpans]]:
    """One step of each rank of `SCHEDULE`."""
    by_rank = [[span for span in spans if span.rank == rank] for rank in range(2)]
    return [[StepSpans(7, tuple(own), cpu)] for own in by_rank]


def test_cost_is_the_mean_of_what_was_measured() -> None:
    voted = [span(1, "1VOTE", 50, 57, Lane.UPDATE), span(1, "1VOTE", 57, 90, Lane.WAIT)]
    computed = [span(0, "0F0", 0, 10), span(0, "0F1", 10, 30), span(1, "1B0", 0, 50)]
    cost = measured_cost(INPUTS, steps_of(*computed, *voted))
    assert cost.vote_us == (0.0, 7.0)
    assert cost.forward_us == (15.0, 0.0)
    assert cost.backward_us == (0.0, 50.0)
    assert (cost.python_us, cost.between_us) == ((0.0, 0.0), (0.0, 0.0))


def worked(rank: int, action: str, cpu_us: float, lane: Lane = Lane.COMPUTE) -> Span:
    return Span(rank, lane, parse_action(action), 0, 30, cpu_us=cpu_us)


def test_cost_of_ranks_that_share_cores_is_processor_time() -> None:
    steps = steps_of(worked(0, "0F0", 10))
    assert measured_cost(CROWDED, steps).forward_us == (10.0, 0.0)
    assert measured_cost(INPUTS, steps).forward_us == (30.0, 0.0)


def test_ballot_is_written_in_the_wait_for_the_verdict() -> None:
    voted = [worked(0, "0VOTE", 4, Lane.UPDATE), worked(0, "0VOTE", 2, Lane.WAIT)]
    assert measured_cost(CROWDED, steps_of(*voted)).vote_us == (6.0, 0.0)


def test_cost_of_a_tensor_parallel_group_has_its_exchanges() -> None:
    """Ranks 0 and 1 both run 0F0, and wait in it for other threads: one after the other. What they
    exchange to vote is the vote's.
    """
    group = replace(CROWDED, tensor_size=2)
    first = (
        worked(0, "0F0", 10),
        worked(0, "0F0", 3, Lane.TENSOR),
        worked(0, "0F0", 1, Lane.TENSOR),
        worked(0, "0VOTE", 4, Lane.UPDATE),
        worked(0, "0VOTE", 2, Lane.TENSOR),
    )
    second = (
        worked(1, "0F0", 12),
        worked(1, "0F0", 6, Lane.TENSOR),
        worked(1, "0F0", 0, Lane.TENSOR),
    )
    steps = steps_of(*first, *second)
    cost = measured_cost(group, steps)
    assert (cost.forward_us[0], cost.vote_us[0]) == (11.0, 6.0)
    assert (cost.exchange_forward_us, cost.exchange_backward_us) == ((10.0, 0.0), (0.0, 0.0))
    assert cost.exchanges == (2, 0)
    # By the clock the exchanges are in the computation already.
    assert measured_cost(replace(group, hosts=()), steps).exchanges == (0, 0)


def test_cost_on_shared_cores_has_what_python_does_beside_computing() -> None:
    """Of rank 0: 40 us of its thread, of which spans have 34; two computations share the rest."""
    beside = (worked(0, "0VOTE", 4, Lane.BETWEEN), worked(0, "0VOTE", 5, Lane.BETWEEN))
    steps = steps_of(
        worked(0, "0F0", 10), worked(0, "0F1", 15), *beside, cpu=StepCpu(own_us=40, others_us=0)
    )
    cost = measured_cost(CROWDED, steps)
    assert cost.between_us == (9.0, 0.0)
    assert cost.python_us[0] == 3.0


def test_message_takes_what_other_threads_did() -> None:
    """Rank 0: two messages, its ballot and verdict, and the coordinator's of both ranks."""
    sent = [Span(0, Lane.SEND, parse_action(f"0SEND_F{m}"), 0, 1, 500_000) for m in (0, 1)]
    received = Span(1, Lane.RECV, parse_action("1RECV_F0"), 0, 1, 500_000)
    # 100 us each, and 60 us a megabyte.
    cpu = {0: StepCpu(0, 8 * 100 + 60), 1: StepCpu(0, 3 * 100 + 30)}
    steps = [[StepSpans(7, tuple(sent), cpu[0])], [StepSpans(7, (received,), cpu[1])]]
    (host,) = measured_hosts(CROWDED, steps)
    assert host.cores == 1
    assert (host.message_us, host.us_per_mb) == pytest.approx((100, 60))


def test_message_of_before_processor_time_was_measured_takes_none() -> None:
    assert measured_hosts(CROWDED, steps_of(worked(0, "0F0", 10))) == CROWDED.hosts


def test_threads_of_torch_are_not_taken_for_messages() -> None:
    threaded = replace(CROWDED, hosts=(Host((0, 1), cores=4, threads=2),))
    steps = steps_of(worked(0, "0F0", 10), cpu=StepCpu(10, 1000))
    assert measured_hosts(threaded, steps) == threaded.hosts
