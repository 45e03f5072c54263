"""Who is let in, and who is named where somebody is not."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from dpipe.errors import JoinError
from dpipe.measure.connections import Connections
from dpipe.processes.launch import free_port
from dpipe.session import greeting
from dpipe.transport.mesh import PROTOCOL
from dpipe.wire.rpc import Security
from dpipe.wire.v1.transport_pb2 import Hello


@pytest.fixture
def two() -> Iterator[list[Connections]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Connections(rank))) for rank in range(2)]


def opened(ends: list[Connections], addresses: dict[int, str | None]) -> list[dict[int, str]]:
    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(lambda end: end.open(addresses, 2.0), ends))


def addresses_of(ends: list[Connections]) -> dict[int, str | None]:
    return {end.rank: f"127.0.0.1:{end.port}" for end in ends}


def test_pair_has_a_connection_for_notes_and_some_for_bytes(two) -> None:
    assert opened(two, addresses_of(two)) == [{}, {}]
    for end in two:
        end.seal()
    assert two[0].peers[1].complete
    assert len(two[0].peers[1].data) == len(two[1].peers[0].data) >= 1


def test_higher_rank_dials_where_it_cannot_be_dialled(two) -> None:
    addresses = addresses_of(two) | {1: None}
    assert opened(two, addresses) == [{}, {}]
    assert two[0].peers[1].complete


def test_pair_without_any_address_is_named(two) -> None:
    reasons, _ = opened(two, {0: None, 1: None})
    assert "neither has an address that the other can reach" in reasons[1]


def test_address_where_nobody_listens_is_named(two) -> None:
    address = f"127.0.0.1:{free_port()}"
    reasons, _ = opened(two, addresses_of(two) | {1: address})
    assert reasons == {1: f"rank 1 at {address}: Connection refused"}


def test_address_that_does_not_answer_takes_the_deadline_and_no_longer(two) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        began = time.monotonic()
        reasons = two[0].open({0: None, 1: address}, 0.3)
        assert time.monotonic() - began < 20
    assert reasons == {1: f"rank 1 at {address} does not answer"}


def test_wrong_token_is_refused() -> None:
    with (
        closing(Connections(0, security=Security(token="a"))) as first,
        closing(Connections(1, security=Security(token="b"))) as second,
    ):
        reasons, _ = opened([first, second], addresses_of([first, second]))
        assert "wrong token" in reasons[1]
        assert second.peers == {}


def test_long_refusal_is_cut(two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two[1], "_refusal", lambda hello: "\x1b" + 3000 * "x")
    reasons, _ = opened(two, addresses_of(two))
    assert len(reasons[1]) < 600
    assert "\\x1bxxx" in reasons[1]


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        ({"protocol": 1}, "rank 1 speaks dpipe transport"),
        ({"resumes": True}, "rank 1 speaks dpipe transport"),
        ({"to_rank": 0}, "rank 1 listens here, not rank 0"),
        ({"from_rank": 1}, "rank 1 knows no rank 1"),
        ({"from_rank": 2}, "rank 1 knows no rank 2"),
        ({"connection": 17}, "rank 1 takes no connection 17"),
        ({}, "rank 1 takes no further connection 0 with rank 0"),
    ],
)
def test_stranger_is_refused_and_told_why(two, hello: dict, refusal: str) -> None:
    opened(two, addresses_of(two))
    said = {"protocol": PROTOCOL, "from_rank": 0, "to_rank": 1, "connection": 0, **hello}
    with (
        socket.create_connection(("127.0.0.1", two[1].port)) as sock,
        pytest.raises(JoinError, match=refusal),
    ):
        greeting.call(sock, Hello(**said), b"", time.monotonic() + 5)


def test_no_connection_is_taken_once_all_are_there(two) -> None:
    opened(two, addresses_of(two))
    two[1].seal()
    with (
        socket.socket() as late,
        pytest.raises(JoinError, match="takes no further connection 9 with rank 0"),
    ):
        two[1]._keep(0, 9, late)


def test_half_of_a_pair_is_dropped(two) -> None:
    opened(two, addresses_of(two))
    two[0].peers[1].opened.pop(0).close()
    two[0].seal()
    assert two[0].peers == {}


def test_port_that_is_taken_is_named(two) -> None:
    with pytest.raises(JoinError, match="set node.bind and node.port"):
        Connections(2, port=two[0].port)


def test_joined_rank_dials_under_no_other_number(two) -> None:
    """It knows the token: it was taken for whom it said that it was, if it was the first."""
    addresses = addresses_of(two)
    told: list[dict[int, bytes]] = [{1: b"of 0 and 1", 2: b"of 0 and 2"}, {0: b"of 0 and 1"}]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(two[1].open, addresses, 5.0, told[1])
        claims = Hello(protocol=PROTOCOL, from_rank=0, to_rank=1, connection=0)
        with (
            socket.create_connection(("127.0.0.1", two[1].port)) as sock,
            pytest.raises(JoinError, match="wrong token"),
        ):
            greeting.call(sock, claims, told[0][2], time.monotonic() + 5)
        assert two[0].open(addresses, 5.0, told[0]) == {}
        assert other.result() == {}
    assert two[1].peers[0].complete


def test_rank_that_answers_at_the_address_of_another_is_not_taken_for_it(two) -> None:
    addresses = addresses_of(two)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(two[1].open, addresses, 2.0, {0: b"of 0 and 2"})
        reasons = two[0].open(addresses, 2.0, {1: b"of 0 and 1"})
        other.result()
    assert "wrong token" in reasons[1]
    assert two[0].peers == {}
