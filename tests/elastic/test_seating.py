"""Who takes which rank, where ranks that hold their layers together must be on one machine."""

from dpipe.elastic.agents import Agent, Enlistment
from dpipe.elastic.seating import num_seats, seated


def agents(**machines: str) -> list[Agent]:
    """By machine, the agents there, one a letter, in the order in which they joined."""
    made = []
    for machine, names in machines.items():
        for name in names:
            enlistment = Enlistment(name, name, machine, f"{name}:1", machine=machine)
            made.append(Agent(enlistment, joined_at=float(ord(name)), heard_at=0.0))
    return made


def seats(free: list[Agent], last: str, world_size: int) -> str:
    return "".join(seated(free, list(last), world_size, group_size=2))


def test_first_ranks_go_to_machines_that_have_enough_agents() -> None:
    assert seats(agents(one="a", two="bcd", three="ef"), "", 4) == "bcef"


def test_lost_rank_is_replaced_on_the_machine_of_its_group() -> None:
    assert seats(agents(one="ag", two="cd", three="ef"), "abcd", 4) == "agcd"


def test_group_that_cannot_be_filled_moves_to_another_machine() -> None:
    assert seats(agents(one="ab", two="d", three="ef"), "abcd", 4) == "abef"


def test_groups_that_have_lost_a_rank_each_become_one() -> None:
    assert seats(agents(one="ad", two="ef"), "abcd", 4) == "adef"


def test_whole_group_loses_nobody_to_another() -> None:
    assert seats(agents(one="bcd", two="ef"), "abcd", 4) == "efcd"


def test_group_is_replaced_by_who_waits_not_by_who_has_a_rank() -> None:
    assert seats(agents(one="acefgh"), "abcdef", 6) == "agchef"


def test_ranks_are_those_that_groups_can_have() -> None:
    scattered = agents(one="abc", two="d", three="ef")
    assert num_seats(scattered, 1) == 6
    assert num_seats(scattered, 2) == 4
    assert num_seats(scattered, 4) == 0
