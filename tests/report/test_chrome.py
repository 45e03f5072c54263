import json
from dataclasses import replace

from dpipe.network.link import Link, Network
from dpipe.report.chrome import chrome_trace
from dpipe.schedule.exchange import direct
from dpipe.schedule.generate import gpipe
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from dpipe.timeline.span import Lane, Timeline

STEP = simulate_alone(
    Scenario(
        gpipe(2, 1),
        Cost.uniform(2, 10, 20, message_bytes=500, update_us=5),
        Network(default=Link(0.001, 1.0)),
    )
)


def events(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_trace_has_a_slice_for_each_span_at_the_time_of_its_step():
    slices = events(chrome_trace([(0.0, STEP), (1000.0, STEP)]), "X")
    assert len(slices) == 2 * len(STEP.spans)
    forwards = [(e["pid"], e["ts"], e["dur"]) for e in slices if e["name"] == "1F0"]
    assert forwards == [(2, 15.0, 10.0), (2, 1015.0, 10.0)]


def test_trace_puts_the_prediction_beside_the_measurement():
    trace = chrome_trace([(1000.0, STEP), (2000.0, STEP)], predicted=STEP)
    names = {e["pid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 0, predicted", 2: "rank 1", 3: "rank 1, predicted"}
    assert [e["ts"] for e in events(trace, "X") if e["name"] == "0F0"] == [1000.0, 2000.0, 1000.0]


def test_trace_names_the_lanes():
    trace = chrome_trace([(0.0, STEP)])
    lanes = [
        e["args"]["name"]
        for e in events(trace, "M")
        if e["name"] == "thread_name" and e["pid"] == 0
    ]
    assert lanes == ["compute", "send", "recv", "update", "wait"]


def test_trace_tells_waiting_from_working():
    names = [e["name"] for e in events(chrome_trace([(0.0, STEP)]), "X") if e["pid"] == 0]
    assert "wait for 0B0" in names


def test_trace_draws_an_arrow_from_each_send_to_its_receive():
    trace = chrome_trace([(0.0, STEP), (1000.0, STEP)])
    starts = {e["id"]: (e["pid"], e["ts"]) for e in events(trace, "s")}
    ends = {e["id"]: (e["pid"], e["ts"]) for e in events(trace, "f")}
    assert (starts["0:0:0SEND_F0"], ends["0:0:0SEND_F0"]) == ((0, 10.0), (2, 11.0))
    assert (starts["1:0:1SEND_B0"], ends["1:0:1SEND_B0"]) == ((2, 1045.0), (0, 1046.0))
    assert len(starts) == len(ends) == 4


def test_trace_of_a_run_that_was_cut_short_leaves_arrows_out():
    cut = Timeline(2, tuple(span for span in STEP.spans if span.lane != Lane.RECV))
    assert events(chrome_trace([(0.0, cut)]), "s") == []


def test_trace_of_a_prediction_alone_survives_json():
    trace = json.loads(json.dumps(chrome_trace([], predicted=STEP)))
    assert min(e["ts"] for e in events(trace, "X")) == 0.0


def test_trace_draws_arrows_within_each_replica():
    cost = replace(Cost.uniform(2, 10, 20, message_bytes=500), reduce_bytes=(1000, 1000))
    step = simulate_alone(
        Scenario(gpipe(2, 1), cost, Network(default=Link(0.001, 1.0)), replicas=Replicas(direct(2)))
    )
    trace = chrome_trace([(0.0, step)])
    ends = {e["id"]: e["pid"] // 2 for e in events(trace, "f")}
    arrows = sorted((e["pid"] // 2, ends[e["id"]]) for e in events(trace, "s"))
    assert arrows == [(0, 1), (1, 0), (2, 3), (3, 2)]


def test_trace_says_to_which_replica_a_part_went():
    cost = replace(Cost.uniform(1, 10, 20, message_bytes=0), reduce_bytes=(1000,))
    step = simulate_alone(Scenario(gpipe(1, 1), cost, Network(), replicas=Replicas(direct(2))))
    parts = [
        e["args"] for e in events(chrome_trace([(0.0, step)]), "X") if e["cat"] == "REDUCE_GRAD"
    ]
    assert {(part["to rank"], part["bytes"]) for part in parts} == {(0, 500), (1, 500)}


def test_trace_draws_arrows_within_the_ranks_that_have_the_same_part():
    """Two ranks hold each of two stages together: 0 and 1 the first, 2 and 3 the second."""
    both = [span._replace(rank=2 * span.rank + part) for span in STEP.spans for part in (0, 1)]
    trace = chrome_trace([(0.0, Timeline(4, tuple(both), tensor_size=2))])
    starts = {e["id"]: e["pid"] // 2 for e in events(trace, "s")}
    ends = {e["id"]: e["pid"] // 2 for e in events(trace, "f")}
    assert {(starts[name], ends[name]) for name in starts} == {(0, 2), (2, 0), (1, 3), (3, 1)}
