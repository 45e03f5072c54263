import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from click.testing import CliRunner

from dpipe.bench import rate
from dpipe.errors import JoinError
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.transfer import Moved

MS = 1_000_000  # nanoseconds
MB = 1_000_000


@pytest.fixture
def ends() -> Iterator[list[TcpTransport]]:
    both = [TcpTransport(rank, connections=2, connect_timeout_s=30.0) for rank in (0, 1)]
    addresses = {end.rank: f"127.0.0.1:{end.port}" for end in both}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end.connect(addresses, {1 - end.rank}), both))
        yield both
        list(pool.map(TcpTransport.close, both))


def test_rate_is_all_that_moved_from_the_first_byte_to_the_last() -> None:
    """Of any tensor: stripes on several connections overtake each other."""
    moved = [
        Moved(20 * MS, 100 * MS, 5 * MB),
        Moved(10 * MS, 110 * MS, 5 * MB),
        Moved(30 * MS, 105 * MS, 5 * MB),
    ]
    assert rate.rate_gbps(moved) == pytest.approx(15 * 8e-3 / 0.100)


def test_clock_starts_when_the_warm_up_has_arrived(ends: list[TcpTransport]) -> None:
    """Otherwise bytes of the warm-up that are still in buffers would count as carried in no
    time.
    """
    sender, receiver = ends
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(rate.send, sender, 0.1, 0.05)
        coming = rate._expect(receiver)
        warm_up, counted = rate._take(receiver, coming), rate._take(receiver, coming)
        sending.result(30)
    assert max(moved.end_ns for moved in warm_up) < min(moved.start_ns for moved in counted)


def test_interval_of_no_time_is_one_tensor(ends: list[TcpTransport]) -> None:
    sender, receiver = ends
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(rate.send, sender, 0.0, 0.0)
        assert rate.receive(receiver) > 0
        sending.result(30)


def test_two_ends_connect_and_the_receiver_prints_the_rate() -> None:
    # The port is fixed, and scripts/link.py's tests take it on other addresses at the same time.
    words = ["127.0.7.1", "127.0.7.2", "--seconds", "0.05", "--warm-up", "0", "--connections", "2"]

    def start_sender() -> None:
        """It may only be started when the receiver listens."""
        for _ in range(200):
            with suppress(JoinError):
                rate.main(["0", *words], standalone_mode=False)
                return
            time.sleep(0.1)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(start_sender)
        result = CliRunner().invoke(rate.main, ["1", *words])
        sending.result(30)
    assert float(result.output.split()[-1]) > 0
