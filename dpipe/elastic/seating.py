"""Who takes which rank, who keeps whose copies, and who has which pieces of the state.

ranks of the last epoch     a  b  c  d      spares  e
c is lost                   a  b  e  d              who stays keeps its rank: it has the state

With tensor parallelism ranks come in groups, each of them on one machine:

machine 1: a b   2: c d     a  b  c  d      spares  e f (3)  g (1)
b is lost                   a  g  c  d      another on its machine
c is lost                   a  g  e  f      none there: d waits as a spare
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from dpipe.elastic.agents import Agent


def num_seats(agents: Iterable[Agent], group_size: int) -> int:
    """The most ranks that these agents can have, where each group of ranks is on one machine."""
    by_machine = Counter(_machine(agent, group_size) for agent in agents)
    return sum(count // group_size * group_size for count in by_machine.values())


def seated(
    free: Sequence[Agent], last: Sequence[str], world_size: int, group_size: int = 1
) -> tuple[str, ...]:
    """By rank, an agent's id: those of the last epoch where they were, others in the order in which
    they joined. `free` have `num_seats` for `world_size` ranks.

    A group that has lost ranks gets others on its machine, or else moves to another one.
    """
    machine_of = {agent.id: _machine(agent, group_size) for agent in free}
    staying = {}
    for rank, agent_id in enumerate(last[:world_size]):
        if agent_id in machine_of:
            staying[rank] = agent_id
    waiting = _waiting(free, last, staying.values(), group_size)
    groups = [range(first, first + group_size) for first in range(0, world_size, group_size)]
    # Whole ones first, so that they lose nobody to another group.
    groups.sort(key=lambda ranks: sum(rank not in staying for rank in ranks))
    seats: dict[int, str] = {}
    moving = []
    for ranks in groups:
        homes = [machine_of[staying[rank]] for rank in ranks if rank in staying]
        if homes and len(waiting[homes[0]]) >= group_size:
            seats |= _filled(ranks, staying, waiting[homes[0]])
        else:
            moving.append(ranks)
    for ranks in moving:
        fitting = (ids for ids in waiting.values() if len(ids) >= group_size)
        seats |= _filled(ranks, staying, next(fitting))
    return tuple(seats[rank] for rank in range(world_size))


def _machine(agent: Agent, group_size: int) -> str:
    # Ranks that need no other on their machine may be anywhere.
    return agent.enlistment.machine if group_size > 1 else ""


def _waiting(
    free: Iterable[Agent], last: Collection[str], staying: Collection[str], group_size: int
) -> dict[str, list[str]]:
    """By machine, in the order in which they get a rank: who has none to go back to first."""

    def turn(agent: Agent) -> tuple[bool, bool, float, str]:
        # Who had a rank beyond the last one, then who waited longest.
        return (agent.id in staying, agent.id not in last, agent.joined_at, agent.id)

    waiting: dict[str, list[str]] = {}
    for agent in sorted(free, key=turn):
        waiting.setdefault(_machine(agent, group_size), []).append(agent.id)
    return waiting


def _filled(ranks: range, staying: Mapping[int, str], waiting: list[str]) -> dict[int, str]:
    """By rank of the group, who of `waiting` gets it, and waits no longer."""
    seats = {}
    for rank in ranks:
        if staying.get(rank) in waiting:
            seats[rank] = staying[rank]
            waiting.remove(staying[rank])
    for rank in ranks:
        if rank not in seats:
            seats[rank] = waiting.pop(0)
    return seats


def holders(agents: Iterable[Agent], step: int) -> dict[int, tuple[str, ...]]:
    """By piece, the keepers of its state of `step`."""
    sources: dict[int, tuple[str, ...]] = {}
    for agent in agents:
        for piece in agent.held.get(step, ()):
            known = sources.get(piece, ())
            sources[piece] = (*known, agent.keeper)
    return sources


def guardians(
    seats: Sequence[str],
    agents: Mapping[str, Agent],
    copies: int,
) -> tuple[tuple[str, ...], ...]:
    """By rank, the keepers that it sends its copies to: spares first, which then have what they
    need to take over; then ranks half a pipeline away, since neighbours are lost together. On
    another machine wherever there is one.
    """
    spares = []
    for agent in agents.values():
        if agent.is_free and agent.id not in seats:
            spares.append(agent)
    spares.sort(key=lambda agent: (agent.joined_at, agent.id))
    by_rank = []
    for rank, own_id in enumerate(seats):
        own_host = agents[own_id].enlistment.host
        candidates = list(spares)
        for other in _farthest_first(rank, len(seats)):
            other_id = seats[other]
            candidates.append(agents[other_id])
        # A sort keeps the order of those that are alike.
        candidates.sort(key=lambda agent: agent.enlistment.host == own_host)
        keepers = [agent.keeper for agent in candidates[:copies]]
        by_rank.append(tuple(keepers))
    return tuple(by_rank)


def _farthest_first(rank: int, world_size: int) -> list[int]:
    """The other ranks, in a ring, from the opposite one to the neighbours."""

    def nearness(other: int) -> int:
        distance = (other - rank) % world_size
        return -min(distance, world_size - distance)

    # In the order of the ring, so that two ranks do not choose the same one.
    others = []
    for step in range(1, world_size):
        others.append((rank + step) % world_size)
    return sorted(others, key=nearness)
