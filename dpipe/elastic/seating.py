"""Who takes which rank, who keeps whose copies, and who has which layers.

ranks of the last epoch     a  b  c  d      spares  e
c is lost                   a  b  e  d              who stays keeps its rank: it has the layers
"""

from collections.abc import Iterable, Mapping, Sequence

from dpipe.elastic.agents import Agent


def seated(free: Sequence[Agent], last: Sequence[str], world_size: int) -> tuple[str, ...]:
    """By rank, an agent's id: those of the last epoch where they were, others in the order in which
    they joined. There are at least `world_size` agents in `free`.
    """
    ids = {agent.id for agent in free}
    staying = {}
    for rank, agent_id in enumerate(last[:world_size]):
        if agent_id in ids:
            staying[rank] = agent_id
    seated_ids = set(staying.values())
    others = [agent for agent in free if agent.id not in seated_ids]
    # Who had a rank beyond the last one, then who waited longest.
    others.sort(key=lambda agent: (agent.id not in last, agent.joined_at, agent.id))
    waiting = iter(others)
    seats = []
    for rank in range(world_size):
        if rank in staying:
            seats.append(staying[rank])
        else:
            newcomer = next(waiting)
            seats.append(newcomer.id)
    return tuple(seats)


def holders(agents: Iterable[Agent], step: int) -> dict[int, tuple[str, ...]]:
    """By layer, the keepers of its state of `step`."""
    sources: dict[int, tuple[str, ...]] = {}
    for agent in agents:
        for layer in agent.held.get(step, ()):
            known = sources.get(layer, ())
            sources[layer] = (*known, agent.keeper)
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
