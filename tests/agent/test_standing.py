from dpipe.agent import inquiry
from dpipe.agent.standing import standing_of
from dpipe.elastic.agents import Agent, Enlistment
from dpipe.elastic.rendezvous import Phase, Rendezvous, Settings


def test_status_says_how_fast_each_rank_is() -> None:
    rendezvous = Rendezvous(Settings(num_pieces=2, world_size=2, num_steps=9), None)  # type: ignore[arg-type]
    rendezvous.phase = Phase.RUNNING
    rendezvous.seats = ("b", "a")
    for name in "abc":
        enlistment = Enlistment(name, name, "host", f"{name}:1")
        rendezvous.agents[name] = Agent(enlistment, joined_at=1.0, heard_at=9.5)
    row = {"step": 4, "step_s": 0.3, "compute_ms": {"0": 120.0, "1": 90.0}, "relayed": ["0->1"]}
    status = standing_of(rendezvous, row, now=10.0)
    of_run = {"run": "run", "steps": 9, "wanted": 2, "goodput": 0.5, "lost_s": 1.0, "run_s": 2.0}
    servers = ["10.0.0.5:7100"]
    text = inquiry.as_text(inquiry.RunStatus(**status, **of_run, servers=servers, events=[]))
    assert text.splitlines()[2:] == [
        "  rank 0   b (host) for 9 s, computes 120 ms of 300 ms a step, heard 0.5 s ago",
        "  rank 1   a (host) for 9 s, computes 90 ms of 300 ms a step, heard 0.5 s ago",
        "  spare    c (host) for 9 s, heard 0.5 s ago",
        "  parameter servers: 10.0.0.5:7100",
        "  relayed by the coordinator's machine: 0->1",
    ]
