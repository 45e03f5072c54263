"""The measurement of the loopback link: the arithmetic on given time stamps, and one real
measurement.
"""

import pytest
from support.settled import settled

from dpipe.bench.loopback import SMALL_BYTES, Loopback, loopback_of, measure_loopback

MB = 1_000_000


def test_link_delay_is_from_small_messages_and_rate_from_large_ones() -> None:
    sent = [[(10.0, 0.0), (20.0, 0.0)], [(30.0, 0.0), (40.0, 0.0)]]
    received = [[(10.001, 0.0), (20.001, 0.0)], [(30.002, 0.0), (40.002, 0.0)]]
    link = loopback_of(sent, received, MB + SMALL_BYTES).link
    assert link.delay_ms == pytest.approx(1.0)
    assert link.bandwidth_gbps == pytest.approx(8.0)  # a megabyte in the other millisecond


def test_core_time_is_that_of_one_end() -> None:
    sent = [[(0.0, 100e-6)], [(0.0, 300e-6)]]
    received = [[(1e-3, 200e-6)], [(2e-3, 800e-6)]]
    machine = loopback_of(sent, received, MB + SMALL_BYTES)
    assert machine.message_us == pytest.approx(150.0)
    assert machine.link.delay_ms == pytest.approx(0.7)  # of a millisecond one way
    assert machine.us_per_mb == pytest.approx(400.0)


@pytest.mark.alone
def test_measured_rate_is_possible_for_a_socket() -> None:
    def is_possible(machine: Loopback) -> bool:
        return 0.1 < machine.link.bandwidth_gbps < 1_000

    # Where small messages had to wait for a core, large ones seem to take no longer.
    machine = settled(lambda: measure_loopback("tcp x1", pause_s=0.001), is_possible)
    assert is_possible(machine)
    assert 0 <= machine.link.delay_ms < 1_000  # what the two ends' work leaves of a message's time
    assert machine.message_us > 0
