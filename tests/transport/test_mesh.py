"""Transports between processes: connecting, refusing, backpressure, closing without leftovers, TLS.

Over real sockets, and each test over gRPC and over TCP.
"""

import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from ends import SCALAR, End, Make, address, assert_link_works, connect

from dpipe.errors import JoinError, PeerLost, RunAborted
from dpipe.transport.mesh import CLOSE_S
from dpipe.wire.rpc import Security
from dpipe.wire.spec import TensorSpec


def hangs_up(stranger: socket.socket) -> bool:
    with suppress(ConnectionError):
        while stranger.recv(4096):
            pass
    return True


KILLED = """
import importlib, sys, time
end = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(1)
sys.stdout.write(f"{end.port}\\n")
sys.stdout.flush()
end.connect({0: None, 1: f"127.0.0.1:{end.port}"}, [0])
time.sleep(60)
"""


# Connecting


@pytest.mark.parametrize(
    "hidden", [(), (0,), (2,)], ids=["all reachable", "lowest behind NAT", "highest behind NAT"]
)
def test_links_open_whichever_end_can_be_reached(make: Make, hidden: tuple[int, ...]) -> None:
    ends = [make(rank) for rank in range(3)]
    connect(*ends, hidden=hidden)
    for source in ends:
        for target in ends:
            if source is not target:
                assert_link_works(source, target)


def test_connect_refuses_two_ranks_without_an_address(make: Make) -> None:
    with pytest.raises(JoinError, match=r"rank 0 and rank 1 cannot meet: .* node\.advertise"):
        make(0).connect({0: None, 1: None}, [1])


def test_connect_names_every_blocked_peer_and_its_address(make: Make) -> None:
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addresses = {
            peer: f"127.0.0.1:{s.getsockname()[1]}" for peer, s in ((1, closed), (2, silent))
        }
        with pytest.raises(JoinError) as error:
            make(0, connect_timeout_s=0.5).connect({0: None, **addresses}, [1, 2])
    first, refused, unanswered = str(error.value).splitlines()
    assert first == "rank 0 cannot open every link:"
    assert f"rank 1 ({addresses[1]})" in refused
    assert "refused" in refused
    assert "firewall" in refused
    assert f"rank 2 ({addresses[2]}) did not answer within 0.5 s" in unanswered


def test_connect_names_a_peer_that_does_not_dial(make: Make) -> None:
    end = make(1, connect_timeout_s=0.2)
    with pytest.raises(
        JoinError, match=r"rank 0 \(10.0.0.1:1\) has not dialled 10.0.0.2:2 within 0.2 s"
    ):
        end.connect({0: "10.0.0.1:1", 1: "10.0.0.2:2"}, [0])


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a peer that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_abort_before_links_are_opened_is_raised_in_their_place(make: Make, silent: str) -> None:
    """The error was lost, and after timeouts.connect another peer was blamed."""
    end = make(0, connect_timeout_s=2.0)
    end.fail(RunAborted("rank 2 failed"))
    with pytest.raises(RunAborted, match="rank 2 failed"):
        end.connect({0: None, 1: silent}, [1])


def test_abort_while_links_are_opened_ends_the_wait_and_is_raised(make: Make, silent: str) -> None:
    end = make(0)
    threading.Timer(0.2, end.fail, [RunAborted("rank 2 failed")]).start()
    start = time.monotonic()
    with pytest.raises(RunAborted, match="rank 2 failed"):
        end.connect({0: None, 1: silent}, [1])
    assert time.monotonic() - start < 10  # and not the 20 s in which links must open


def test_port_in_use_is_refused(make: Make) -> None:
    with pytest.raises(JoinError, match=r"cannot listen on 127\.0\.0\.1"):
        make(1, port=make(0).port)


def test_wrong_token_is_said_to_the_one_who_dials(make: Make) -> None:
    dialler = make(0, security=Security(token="guess"))
    with pytest.raises(JoinError, match=r"rank 1 .*wrong token: node\.token"):
        dialler.connect({0: None, 1: address(make(1, security=Security(token="secret")))}, [1])


def test_connection_counts_that_differ_are_refused(make: Make) -> None:
    ends = make(0, connections=2), make(1, connections=1, connect_timeout_s=0.5)
    with pytest.raises(JoinError, match=r"rank 1 has transport\.connections = 1, rank 0 2"):
        connect(*ends)


# Refusing


def test_random_bytes_to_the_port_are_refused_and_links_go_on(make: Make) -> None:
    ends = make(0), make(1)
    connect(*ends)
    noise = random.Random(0)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", ends[1].port), timeout=5) as stranger:
            stranger.sendall(noise.randbytes(4096))
            hangs_up(stranger)
    assert_link_works(*ends)


def test_killed_peer_is_lost_at_once_and_by_name(
    make: Make, kind: type[End], warm_python: str
) -> None:
    with subprocess.Popen(
        [warm_python, "-c", KILLED, kind.__module__, kind.__name__],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        end = make(0)
        end.connect({0: None, 1: f"127.0.0.1:{port}"}, [1])
        pending = end.recv(SCALAR, 1, "x")
        process.kill()
        start = time.monotonic()
        with pytest.raises(PeerLost, match=rf"rank 0 lost rank 1 \(127\.0\.0\.1:{port}\)"):
            pending.wait()
        assert time.monotonic() - start < 5.0


# Backpressure


def test_sender_is_held_back_while_the_buffer_of_its_peer_is_full(make: Make) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32)  # 4 MiB
    like, num_sends = TensorSpec.of(tensor), 48
    ends = make(0), make(1, buffer_bytes=2 * like.num_bytes)
    connect(*ends)
    sends = [ends[0].send(tensor, 1, str(i)) for i in range(num_sends)]
    held_back = -1
    while held_back != (held_back := ends[0].bytes_sent(1)):
        time.sleep(0.5)
    assert (
        held_back < num_sends / 2 * like.num_bytes
    )  # two in the buffer, some in HTTP/2 windows and sockets
    for i in range(num_sends):
        assert torch.equal(ends[1].recv(like, 0, str(i)).wait(), tensor)
    sends[-1].wait()
    assert ends[0].bytes_sent(1) == num_sends * like.num_bytes


def test_tensor_larger_than_the_buffer_waits_for_its_receive(make: Make) -> None:
    ends = make(0), make(1, buffer_bytes=1000)
    connect(*ends)
    tensor = torch.arange(100_000)
    ends[0].send(tensor, 1, "x")
    time.sleep(0.1)
    assert torch.equal(ends[1].recv(TensorSpec.of(tensor), 0, "x").wait(), tensor)


# Leaving


def test_close_leaves_no_thread(make: Make) -> None:
    before = set(threading.enumerate())
    ends = [make(rank, connections=2) for rank in range(3)]
    connect(*ends)
    assert_link_works(ends[0], ends[2])
    for end in ends:
        end.close()
    deadline = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


def test_close_is_bounded_while_the_peer_takes_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.transport.mesh.CLOSE_S", 0.5)
    ends = make(0), make(1, buffer_bytes=0)
    connect(*ends)
    ends[0].send(torch.zeros(8 << 20), 1, "x")
    start = time.monotonic()
    ends[0].close()
    assert time.monotonic() - start < 4.0


def test_close_after_a_failure_does_not_wait_for_queued_sends(make: Make) -> None:
    ends = make(0), make(1, buffer_bytes=0)
    connect(*ends)
    ends[0].send(torch.zeros(8 << 20), 1, "x")
    ends[0].fail(RuntimeError("out of memory"))
    start = time.monotonic()
    ends[0].close()
    assert time.monotonic() - start < CLOSE_S


def test_sent_tensor_is_let_go_when_its_bytes_are_handed_over(make: Make) -> None:
    ends = make(0), make(1)
    connect(*ends)
    sent = ends[0].send(torch.zeros(10), 1, "x")
    assert sent.tensor is not None or sent.done()
    sent.wait()
    assert sent.tensor is None
    assert sent.view is None


# TLS


def test_link_with_certificates_of_one_authority_works(make: Make, authority) -> None:
    one = authority()
    ends = [make(rank, security=one.security("secret"), connections=2) for rank in (0, 1)]
    connect(*ends)
    assert_link_works(*ends)


def test_both_directions_move_at_once_over_tls(make: Make, authority) -> None:
    one = authority()
    ends = [make(rank, security=one.security("secret"), connections=2) for rank in (0, 1)]
    connect(*ends)
    tensors = [torch.arange(1 << 20) + rank for rank in (0, 1)]
    pending = [
        ends[rank].recv(TensorSpec.of(tensors[1 - rank]), 1 - rank, str(i))
        for rank in (0, 1)
        for i in range(4)
    ]
    for i in range(4):
        for rank in (0, 1):
            ends[rank].send(tensors[rank], 1 - rank, str(i))
    assert all(torch.equal(p.wait(), tensors[1 - i // 4]) for i, p in enumerate(pending))


def test_certificate_of_another_authority_is_refused(make: Make, authority) -> None:
    ends = [
        make(rank, security=authority().security("secret"), connect_timeout_s=3.0)
        for rank in (0, 1)
    ]
    with pytest.raises(JoinError, match=r"rank 1 .*certificates of one authority \(node\.tls_\*\)"):
        ends[0].connect({0: None, 1: address(ends[1])}, [1])


def test_peer_without_a_certificate_is_refused(make: Make, authority) -> None:
    server = make(1, security=authority().security("secret"))
    with pytest.raises(JoinError, match=r"node\.tls_\*"):
        make(0, connect_timeout_s=3.0).connect({0: None, 1: address(server)}, [1])
