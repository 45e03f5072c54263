"""How a machine finds the coordinator that has taken over, and stays where it is otherwise."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from dpipe.terms import following
from dpipe.terms.following import HolderSearch
from dpipe.terms.records import HolderBeat, Term
from dpipe.terms.storing import TermStore


@dataclass
class Machine:
    term: int | None = 0
    is_unanswered: bool = False
    moves: list[str] = field(default_factory=list)

    def move(self, address: str) -> None:
        self.moves.append(address)


@pytest.fixture
def store() -> TermStore:
    return TermStore(f"memory://{secrets.token_hex(8)}/run")


Search = Callable[[Machine, int], None]


@pytest.fixture
def search(store: TermStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Search]:
    """Has a machine look, until it has moved so often, and on for a while: it moves no further."""
    monkeypatch.setattr(following, "_EVERY_S", 0.005)
    searches: dict[int, HolderSearch] = {}

    def look(machine: Machine, moves: int) -> None:
        if id(machine) not in searches:
            searches[id(machine)] = HolderSearch(store, machine)
            searches[id(machine)].start()
        deadline = time.monotonic() + 10
        while len(machine.moves) < moves and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)
        assert len(machine.moves) == moves

    yield look
    for each in searches.values():
        each.close()


def begin(store: TermStore, number: int) -> None:
    assert store.claim(number, Term(run="0" * 16, holder=f"{number:016x}", host="here"))
    store.say(number, HolderBeat(count=1, address=f"10.0.0.{number}:7000"))


def test_machine_moves_once_where_its_coordinator_is_silent(store, search) -> None:
    begin(store, 1)
    machine = Machine(term=1)
    search(machine, 0)
    begin(store, 2)
    search(machine, 0)
    machine.is_unanswered = True
    search(machine, 1)
    assert machine.moves == ["10.0.0.2:7000"]
    begin(store, 3)
    search(machine, 2)
    assert machine.moves == ["10.0.0.2:7000", "10.0.0.3:7000"]


def test_term_that_began_before_the_first_look_is_found(store, search) -> None:
    """A standby takes over within a second: the machine was enlisted by the first coordinator, and
    has not looked at the URL yet.
    """
    begin(store, 1)
    begin(store, 2)
    machine = Machine(term=1)
    search(machine, 0)
    machine.is_unanswered = True
    search(machine, 1)
    assert machine.moves == ["10.0.0.2:7000"]


@pytest.mark.parametrize("term", [2, None], ids=["newest", "without a standby"])
def test_silent_coordinator_is_waited_for_where_no_other_can_have_taken_over(
    store, search, term: int | None
) -> None:
    begin(store, 2)
    search(Machine(term, is_unanswered=True), 0)


def test_term_without_a_sign_of_life_is_waited_for(store, search) -> None:
    store.claim(2, Term(run="0" * 16, holder="a" * 16, host="here"))
    machine = Machine(term=1, is_unanswered=True)
    search(machine, 0)
    store.say(2, HolderBeat(count=1, address="10.0.0.2:7000"))
    search(machine, 1)
