import threading

import pytest

from dpipe.network.link import Link
from netem import probe
from netem.probe import Observed, Row
from netem.shell import NetemError

PINGED = """PING 10.100.0.2 (10.100.0.2) 56(84) bytes of data.
64 bytes from 10.100.0.2: icmp_seq=1 ttl=63 time=102 ms
64 bytes from 10.100.0.2: icmp_seq=3 ttl=63 time=100.4 ms

--- 10.100.0.2 ping statistics ---
3 packets transmitted, 2 received, 33% packet loss, time 2002ms
rtt min/avg/max/mdev = 100.4/101.2/102/0.8 ms
"""


def test_ping_is_read_packet_by_packet():
    assert probe.parse_ping(PINGED) == [102, 100.4]


@pytest.mark.parametrize(
    ("gbps", "round_trip_ms", "connections"),
    [(10, 0.2, 2), (1, 20, 3), (1, 100, 12), (10, 100, probe.MAX_CONNECTIONS)],
)
def test_connections_grow_with_the_bytes_in_flight(gbps, round_trip_ms, connections):
    assert probe.connections_for(gbps, round_trip_ms) == connections


def test_comparison_has_the_delay_of_both_directions_and_the_rate_of_one():
    rows = probe.compare(
        Link(10, 1), Link(20, 2), Observed(round_trip_ms=31, lost_percent=0, bandwidth_gbps=0.8)
    )
    assert [str(row) for row in rows] == [
        "round trip, ms     expected    30.000   observed    31.000   ok",
        "rate, Gbit/s       expected     1.000   observed     0.800   OFF",
    ]


@pytest.mark.parametrize(
    ("observed", "close"), [(0.89, False), (0.91, True), (1.09, True), (1.11, False)]
)
def test_ten_percent_is_close(observed, close):
    assert Row("rate", 1.0, observed).close is close


def test_rate_is_measured_against_a_real_receiver():
    up = threading.Event()
    port = 17_990  # below the ports that Linux gives to outgoing connections
    answering = threading.Thread(target=probe.answer, args=(port, 0.5, up.set))
    answering.start()
    assert up.wait(10)
    assert 0.05 < probe.rate_gbps("127.0.0.1", port, gbps=10, round_trip_ms=0.1, seconds=0.2) < 1000
    answering.join(10)  # it ends by itself after 0.5 s without a connection
    assert not answering.is_alive()


def test_missing_receiver_says_what_to_run():
    with pytest.raises(NetemError, match=r"127.0.0.1:9 .* run there: python -m netem answer"):
        probe.rate_gbps("127.0.0.1", 9, gbps=1, round_trip_ms=1, seconds=0.1)


def test_ping_without_an_answer_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "ping").write_text("#!/bin/sh\necho '3 packets transmitted, 0 received'\n")
    (tmp_path / "ping").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        NetemError, match="10.9.9.9 answers no ping: 3 packets transmitted, 0 received"
    ):
        probe.ping("10.9.9.9", count=3)
