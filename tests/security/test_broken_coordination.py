"""The connection of a rank with the coordinator is cut, reset, swallowed and taken over: what was
said arrives once and in order, and a process that is really gone is known at once.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from fakes.broken_path import BrokenPath
from support.coordinator_stranger import Stranger
from support.settled import settled

from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer, Knock, _knock
from dpipe.errors import RunAborted
from dpipe.wire.rpc import Security

OPEN = Security()
Meet = Callable[..., "Met"]


class Met:
    """A coordinator and two ranks, of which rank 1 comes through a path that can break."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        reset_after: float = float("inf"),
        seed: int = 0,
        security: Security = OPEN,
        heartbeat_s: float = 8.0,
    ) -> None:
        options: dict[str, Any] = {"security": security, "heartbeat_s": heartbeat_s}
        self.uploads: list[tuple[int, str, bytes]] = []
        self.server = CoordinatorServer(
            2, on_upload=lambda *upload: self.uploads.append(upload), **options
        )
        stack.callback(self.server.close, wait_s=0.0)
        self.path = BrokenPath(self.server.port, reset_after=reset_after, seed=seed)
        stack.enter_context(self.path)
        # Where rank 1 says that its process listens.
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        addresses = [f"127.0.0.1:{self.server.port}", self.path.address]
        own = f"127.0.0.1:{listener.getsockname()[1]}"

        def join(rank: int) -> Coordinator:
            return Coordinator.join(addresses[rank], rank, 2, shared={}, advertised=own, **options)

        with ThreadPoolExecutor(2) as pool:
            self.first, self.second = pool.map(join, range(2))
        for rank in (self.first, self.second):
            stack.callback(rank.close)

    def talk(self, count: int, start: int = 0) -> None:
        """Gathers of all sizes, several at once."""
        for begin in range(start, start + count, 5):
            numbers = range(begin, begin + 5)
            under_way = [
                (number, rank.gather(f"step/{number}", part(number, rank.rank)))
                for number in numbers
                for rank in (self.first, self.second)
            ]
            for number, gathered in under_way:
                assert gathered.wait(30) == (part(number, 0), part(number, 1))


def part(number: int, rank: int) -> bytes:
    return bytes([number, rank]) * [0, 10, 3_000, 400_000][number % 4]


@pytest.fixture
def meet() -> Iterator[Meet]:
    with ExitStack() as stack:

        def make(**options: Any) -> Met:
            return Met(stack, **options)

        yield make


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_once_and_in_order_whatever_is_reset(meet: Meet, seed: int) -> None:
    met = meet(reset_after=1e6, seed=seed)
    met.talk(40)
    met.path.heal()
    assert met.path.num_resets > 3
    met.second.upload("trace", b"spans" * 100_000)
    met.second.leave()
    met.first.leave()
    assert met.uploads == [(1, "trace", b"spans" * 100_000)]


def test_stream_with_certificates_goes_on_after_resets(meet: Meet, authority) -> None:
    met = meet(security=authority().security("token"))
    met.talk(5)
    met.path.reset()
    met.talk(5, start=5)
    assert met.path.num_connections > 1


def test_leave_is_heard_although_the_connection_breaks(meet: Meet) -> None:
    met = meet()
    met.path.delay_s = 0.2
    leaving = threading.Thread(target=met.second.leave)
    leaving.start()
    time.sleep(0.1)
    met.path.reset()
    leaving.join(10)
    assert not leaving.is_alive()
    met.first.leave()


def test_path_that_swallows_is_left_for_another(meet: Meet) -> None:
    met = meet()
    met.path.swallow()
    start = time.monotonic()
    met.talk(5)
    assert time.monotonic() - start < 8.0
    assert met.path.num_connections > 1


def test_cut_of_more_than_a_silence_is_waited_out(meet: Meet) -> None:
    met = meet()
    met.path.cut()
    threading.Timer(3.0, met.path.restore).start()
    met.talk(5)


def test_cut_of_more_than_a_heartbeat_loses_the_rank_at_both_ends(meet: Meet) -> None:
    met = meet(heartbeat_s=3.0)
    under_way = [rank.gather("step/1", b"") for rank in (met.first, met.second)]
    met.path.cut()
    with pytest.raises(RunAborted, match=r"lost rank 1 \(127.0.0.1:\d+\): no sign of life for 3 s"):
        under_way[0].wait(15)
    with pytest.raises(RunAborted, match="lost the coordinator"):
        under_way[1].wait(15)


# Who is gone

JOIN_AND_WAIT = """
import socket, sys, time
from dpipe.coordinator.client import Coordinator
listener = socket.create_server(("127.0.0.1", 0))
own = sys.argv[3] or f"127.0.0.1:{listener.getsockname()[1]}"
Coordinator.join(sys.argv[1], 1, 2, shared={}, advertised=own, heartbeat_s=float(sys.argv[2]))
print("joined", flush=True)
time.sleep(60)
"""


def killed_for(python: str, *, heartbeat_s: float, own: str = "") -> float:
    """How many seconds it takes until the end of a process is known."""
    server = CoordinatorServer(2, heartbeat_s=heartbeat_s)
    address = f"127.0.0.1:{server.port}"
    words = [python, "-c", JOIN_AND_WAIT, address, str(heartbeat_s), own]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        honest = Coordinator.join(address, 0, 2, shared={}, heartbeat_s=heartbeat_s)
        assert process.stdout is not None
        process.stdout.readline()
        under_way = honest.gather("step/1", b"")
        os.kill(process.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RunAborted, match="lost rank 1 .*its process ended"):
            under_way.wait(10)
        took_s = time.monotonic() - start
    honest.close()
    server.close()
    return took_s


def test_process_that_is_gone_is_known_within_a_second(warm_python: str) -> None:
    """Its host refuses connections, where a path that broke would lead to one who listens."""

    def look() -> float:
        return killed_for(warm_python, heartbeat_s=40.0)

    # Half a second, and what a busy machine adds.
    assert settled(look, lambda took_s: took_s < 1.0) < 1.0


def test_host_that_is_far_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process behind a round trip of more than 0.1 s was known to be gone after a heartbeat."""

    def refuse_late(address: tuple[str, int], timeout: float) -> socket.socket:
        time.sleep(min(0.3, timeout))
        raise ConnectionRefusedError if timeout > 0.3 else TimeoutError

    monkeypatch.setattr("dpipe.coordinator.server.socket.create_connection", refuse_late)
    assert _knock("10.0.0.7:29500") is Knock.REFUSED


def test_process_that_is_gone_without_a_port_that_refuses_is_known_soon(
    monkeypatch: pytest.MonkeyPatch, warm_python: str
) -> None:
    """Behind a NAT, or where closed ports are dropped silently: known after a heartbeat."""

    def drop(address: tuple[str, int], timeout: float) -> socket.socket:
        time.sleep(min(0.1, timeout))
        raise TimeoutError

    monkeypatch.setattr("dpipe.coordinator.server.socket.create_connection", drop)
    assert _knock(None) is Knock.NOTHING
    took_s = killed_for(warm_python, heartbeat_s=8.0, own="10.0.0.7:9")
    assert took_s < 4.0  # an eighth of a heartbeat, and the machine has something else to do


# Who may go on


def refused(met: Met, **hello: object) -> str:
    """Why one who says that it is rank 1, which dials again, is refused."""
    stranger = Stranger(met.server.port, **{"rank": 1, "resumes": True, **hello})
    with pytest.raises(grpc.RpcError) as error:
        stranger.greeting()
    stranger.close()
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(error.value.details())


def test_nobody_else_takes_a_stream_over(meet: Meet) -> None:
    met = meet()
    said = "this is not the end that opened this stream, or the run is over"
    own = met.first._session.secret
    for secret in (b"", b"x" * 32, own):
        assert refused(met, secret=secret) == said
    assert refused(met, rank=7, secret=met.second._session.secret) == said
    met.talk(5)


@pytest.mark.parametrize("received", [0, 10**15])
def test_forged_count_of_what_arrived_is_refused(meet: Meet, received: int) -> None:
    met = meet()
    met.talk(20)
    time.sleep(0.5)  # for the last acknowledgement
    secret = met.second._session.secret
    assert f"it says that {received} bytes have arrived" in refused(
        met, secret=secret, received=received
    )
    met.talk(5, start=20)


def test_stranger_of_another_version_is_told_so(meet: Meet) -> None:
    met = meet()
    assert "it speaks protocol 1, the coordinator 3" in refused(met, protocol=1, resumes=False)
    met.talk(5)
