"""Who has which rank, since when and how fast: what `dpipe status` shows of the machines."""

from collections.abc import Mapping
from typing import Any

from dpipe.elastic.agents import Agent
from dpipe.elastic.rendezvous import Phase, Rendezvous


def standing_of(rendezvous: Rendezvous, row: Mapping[str, Any], now: float) -> dict[str, Any]:
    """What an `inquiry.RunStatus` says of phase and machines. `row`: the newest one of the epoch's
    metrics, or an empty one.
    """
    agents = [_agent(agent, rendezvous, row, now) for agent in rendezvous.agents.values()]
    return {
        "phase": str(rendezvous.phase),
        "epoch": rendezvous.epoch,
        "step": rendezvous.newest_step,
        "step_s": row.get("step_s"),
        "relayed": row.get("relayed", []),
        "ranks": len(rendezvous.seats),
        "agents": agents,
    }


def _agent(
    agent: Agent, rendezvous: Rendezvous, row: Mapping[str, Any], now: float
) -> dict[str, Any]:
    rank = None
    if rendezvous.phase is Phase.RUNNING and agent.id in rendezvous.seats:
        rank = rendezvous.seats.index(agent.id)
    by_rank = row.get("compute_ms", {})
    return {
        "name": agent.enlistment.name,
        "host": agent.enlistment.host,
        "rank": rank,
        "compute_ms": by_rank.get(str(rank)),
        "for_s": round(now - agent.joined_at, 1),
        "silent_s": round(now - agent.heard_at, 1),
        "leaving": agent.leave_by is not None,
    }
