import json
from dataclasses import replace

import pytest

from dpipe.network.link import Link, Network
from dpipe.schedule.action import parse_action
from dpipe.schedule.exchange import direct
from dpipe.schedule.generate import gpipe
from dpipe.schedule.lower import lower
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from dpipe.timeline.span import Lane, Span, Timeline
from dpipe.timeline.summary import summarise

SCHEDULE = lower(gpipe(2, 2))
LANES = {"c": Lane.COMPUTE, "s": Lane.SEND, "u": Lane.UPDATE, "w": Lane.WAIT}


def timeline(*rows: str) -> Timeline:
    """Spans from texts such as "rank lane action start-end bytes"."""
    spans = []
    for row in rows:
        rank, lane, action, interval, *num_bytes = row.split()
        start, end = map(float, interval.split("-"))
        spans.append(
            Span(
                int(rank),
                LANES[lane],
                parse_action(action),
                start,
                end,
                int(num_bytes[0]) if num_bytes else 0,
            )
        )
    return Timeline(2, tuple(spans))


def test_summary_of_a_predicted_step():
    cost = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=500, update_us=10)
    step = simulate_alone(Scenario(SCHEDULE, cost, Network(default=Link(0.001, 1.0))))
    summary = summarise(step, SCHEDULE)
    # rank 0: two F to 20, two B from 60 to 100, the update to 110. rank 1: the same work from 15 to
    # 85; its vote waits until what it sent has left, at 79 + 10.
    assert summary.step_us == 110
    assert summary.bubble == pytest.approx((4 / 11, 4 / 11))
    assert summary.waiting == pytest.approx((40 / 110, (15 + 4) / 110))
    assert summary.overlap == pytest.approx((0.5, 0.5))
    assert summary.link_bytes == {(0, 1): 1000, (1, 0): 1000}
    assert summary.sent_bytes == (1000, 1000)
    assert summary.peak_in_flight == (2, 2)


def test_summary_of_replicas_counts_what_they_exchange():
    cost = replace(Cost.uniform(2, 10, 20, message_bytes=500), reduce_bytes=(1000, 600))
    step = simulate_alone(
        Scenario(gpipe(2, 2), cost, Network(default=Link(0.001, 1.0)), replicas=Replicas(direct(2)))
    )
    summary = summarise(step, lower(gpipe(2, 2), reduce=True))
    # ranks 0 and 2 are the first stage of the two replicas, 1 and 3 the second
    assert summary.reduce_bytes == (1000, 600, 1000, 600)
    assert summary.sent_bytes == (2000, 1600, 2000, 1600)
    assert summary.link_bytes[0, 1] == summary.link_bytes[3, 2] == 1000
    assert summary.link_bytes[0, 2] == 1000
    assert summary.link_bytes[3, 1] == 600
    assert summary.peak_in_flight == (2, 2, 2, 2)


def test_traffic_of_a_parameter_server_is_counted_where_it_is_sent():
    push = Span(0, Lane.REDUCE, parse_action("0REDUCE_GRAD"), 0, 4, 100, peer="server")
    pull = Span(0, Lane.REDUCE, parse_action("0REDUCE_GRAD"), 4, 8, 300)
    summary = summarise(Timeline(2, (push, pull)), SCHEDULE)
    assert summary.reduce_bytes == (100, 0)
    assert summary.link_bytes == {(0, "server"): 100}


def test_bubble_is_the_time_without_compute_or_update():
    summary = summarise(
        timeline("0 c 0F0 0-4", "0 w 0B0 4-6", "0 c 0B0 6-7", "0 u 0STEP 7-8", "1 c 1F0 2-10"),
        SCHEDULE,
    )
    assert summary.bubble == pytest.approx((0.4, 0.2))
    assert summary.waiting == pytest.approx((0.2, 0.0))
    assert summary.mean_bubble == pytest.approx(0.3)


def test_overlap_is_the_share_of_sending_that_compute_hides():
    step = timeline(
        "0 c 0F0 0-4", "0 s 0SEND_F0 3-7", "0 c 0F1 6-8", "0 s 0SEND_F1 8-10", "1 c 1F0 9-10"
    )
    summary = summarise(step, SCHEDULE)
    assert summary.overlap == pytest.approx((2 / 6, 1.0))
    assert summary.mean_overlap == pytest.approx(4 / 6)


def test_sends_that_overlap_each_other_count_once():
    step = timeline("0 c 0F0 0-10", "0 s 0SEND_F0 4-8", "0 s 0SEND_F1 6-12")
    assert summarise(step, SCHEDULE).overlap[0] == pytest.approx(6 / 8)


def test_link_bytes_add_up_by_direction():
    step = timeline("0 s 0SEND_F0 0-1 30", "0 s 0SEND_F1 1-2 12", "1 s 1SEND_B0 2-3 5")
    assert summarise(step, SCHEDULE).link_bytes == {(0, 1): 42, (1, 0): 5}


def test_summary_survives_json():
    step = timeline("0 s 0SEND_F0 0-8 3", "0 c 0F0 4-10", "1 c 1F0 0-10")
    read = json.loads(json.dumps(summarise(step, SCHEDULE).as_dict()))
    assert read["link_bytes"] == {"0->1": 3}
    assert read["mean_bubble"] == pytest.approx(0.2)


def test_summary_refuses_a_step_without_time():
    with pytest.raises(ValueError, match="no time passes"):
        summarise(Timeline(2, ()), SCHEDULE)
