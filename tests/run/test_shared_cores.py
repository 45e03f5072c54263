"""Which ranks share the cores of a machine, by what each may use."""

from dpipe.network.link import Host
from dpipe.run.results import hosts_of

BOTH = ("a", [0, 1])


def test_ranks_of_a_machine_share_its_cores() -> None:
    assert hosts_of([BOTH, BOTH, ("b", [0, 1])], 1, 1) == (Host((0, 1), 2), Host((2,), 2))


def test_ranks_that_are_pinned_apart_share_nothing() -> None:
    assert hosts_of([("a", [0]), ("a", [1])], 1, 1) == (Host((0,), 1), Host((1,), 1))


def test_ranks_that_share_one_core_of_several_share_a_host() -> None:
    ranks = [("a", [0, 1]), ("a", [4]), ("a", [1, 2, 3])]
    assert set(hosts_of(ranks, 1, 2)) == {Host((1,), 1, 2), Host((0, 2), 4, 2)}


def test_tensor_parallel_group_is_one_rank_on_the_cores_of_all() -> None:
    """Of a schedule; its threads are those of all its ranks."""
    ranks = [("a", [0]), ("a", [1]), BOTH, BOTH]
    assert hosts_of(ranks, 2, 2) == (Host((0, 1), 2, 2),)
    assert hosts_of(ranks[:2], 2, 2) == (Host((0,), 2, 2),)
