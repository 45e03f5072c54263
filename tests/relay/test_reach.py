"""Who dials whom, by what each rank could reach."""

import json
import socket
from typing import Any

import pytest

from dpipe.relay.ends import RelayEnds
from dpipe.relay.reach import Ways, ways_of
from dpipe.wire.rpc import Security


class Asked:
    """A directory, asked by `rank`, in which the others have reached what a test says."""

    def __init__(
        self, rank: int, addresses: list[str | None], reached: dict[int, list[int]]
    ) -> None:
        self.rank = rank
        self.addresses = dict(enumerate(addresses))
        self.reached = reached
        self.own: Any = None

    def share(self, key, value, timeout_s, schema):
        self.own = value
        ranks = set(self.addresses)
        others = {
            rank: {"peers": sorted(ranks - {rank}), "reached": self.reached.get(rank, [])}
            for rank in ranks
        }
        return [
            schema.read(json.dumps({**others, self.rank: value}[rank]).encode())
            for rank in sorted(ranks)
        ]


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return f"127.0.0.1:{gone.getsockname()[1]}"


def test_ranks_of_one_machine_are_not_asked(address: str) -> None:
    assert ways_of(Asked(0, [address, address], {}), [1], 1.0) is None


def test_lower_rank_dials_where_both_could(address: str) -> None:
    directory = Asked(0, [None, address, address], {1: [2], 2: [1]})
    ways = ways_of(directory, [1, 2], 1.0)
    assert ways == Ways({(0, 1): 0, (0, 2): 0, (1, 2): 1}, ())
    assert directory.own == {"peers": [1, 2], "reached": [1, 2]}


def test_higher_rank_dials_where_it_alone_reaches_the_other() -> None:
    # Rank 0 has an address that nothing answers at; rank 1 has one, too.
    directory = Asked(0, [closed_port(), closed_port(), None], {1: [0], 2: [0, 1]})
    assert ways_of(directory, [1, 2], 1.0) == Ways({(0, 1): 1, (0, 2): 2, (1, 2): 2}, ())


def test_link_that_neither_end_can_open_is_relayed(address: str) -> None:
    directory = Asked(0, [None, closed_port(), address], {})
    assert ways_of(directory, [1, 2], 1.0) == Ways({(0, 2): 0}, ((0, 1), (1, 2)))


def test_links_that_are_not_wanted_take_no_way(address: str) -> None:
    directory = Asked(0, [None, None, address], {})
    ways = ways_of(directory, [2], 1.0)
    assert ways is not None
    assert (0, 1) not in ways.relayed


def test_each_rank_learns_whom_it_dials() -> None:
    ways = Ways({(0, 1): 1, (1, 2): 1}, ())
    addresses: dict[int, str | None] = {0: "a:1", 1: "b:1", 2: "c:1"}
    ends = RelayEnds(1, "127.0.0.1:1", Security(), {}, 40.0)
    assert ways.routes(1, addresses, "b:1", ends) == {0: "a:1", 2: "c:1"}
    assert ways.routes(0, addresses, "a:1", ends) == {1: None}
    assert ways.routes(2, addresses, "c:1", ends) == {1: None}
