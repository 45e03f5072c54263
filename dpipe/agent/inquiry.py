"""What `dpipe join`, `status` and `leave` ask the coordinator of an elastic run, and its answer as
text.
"""

import socket
import time
from typing import Annotated, TypeVar

from pydantic import Field

from dpipe import __version__
from dpipe.agent.control_stream import ask_once
from dpipe.elastic.messages import (
    JOB_METHOD,
    JOB_OFFER,
    RELEASE_METHOD,
    STATUS_METHOD,
    JobOffer,
    LeaveRequest,
    StatusRequest,
)
from dpipe.errors import JoinError
from dpipe.wire.rpc import Security
from dpipe.wire.schema import Count, Finite, Schema, Shape, Text

T = TypeVar("T")
_ANSWER_S = 10.0


class AgentStatus(Shape):
    name: Text
    host: Text
    rank: Count | None  # None: a spare
    compute_ms: Finite | None = None  # of a step's time
    for_s: Finite  # since it joined
    silent_s: Finite  # since it was heard
    leaving: bool  # it hands over, or has been asked to


class RunStatus(Shape):
    run: Text
    phase: Text  # a `Phase`
    epoch: Count
    step: Count  # that is done
    steps: Count
    step_s: Finite | None = None  # of the newest
    relayed: Annotated[list[Text], Field(max_length=100_000)] = Field(default_factory=list)
    # Parameter servers by themselves, as the next epoch calls them
    servers: Annotated[list[Text], Field(max_length=100_000)] = Field(default_factory=list)
    ranks: Count
    wanted: Count  # ranks that the job asks for
    agents: Annotated[list[AgentStatus], Field(max_length=100_000)]
    goodput: Finite | None
    lost_s: Finite  # without a new step since an epoch ended, of `run_s`
    run_s: Finite  # since the first epoch of this coordinator
    events: Annotated[list[tuple[Finite, Text]], Field(max_length=1000)]
    # Rows of metrics as JSON, where they were asked for; whoever reads one checks it.
    rows: list[Annotated[str, Field(max_length=1 << 20)]] = Field(
        default_factory=list, max_length=1000
    )


STATUS = Schema[RunStatus](RunStatus)
_NUM_AGENTS = Schema[int](Count)


def job(address: str, security: Security, wait_s: float) -> JobOffer:
    """Raises `JoinError`, also where its dpipe is of another version."""
    answer = ask_once(address, security, JOB_METHOD, b"", wait_s)
    offer = _read(JOB_OFFER, answer, address)
    if offer.version != __version__:
        raise JoinError(
            f"this is dpipe {__version__}, the coordinator at {address} runs {offer.version}; "
            "install one version everywhere"
        )
    return offer


def status(
    address: str,
    security: Security,
    rows_from: int | None = None,
    wait_s: float = _ANSWER_S,
) -> RunStatus:
    """With rows of metrics from the step `rows_from`. Raises `JoinError`."""
    request = StatusRequest(rows_from=rows_from).model_dump_json().encode()
    answer = ask_once(address, security, STATUS_METHOD, request, wait_s)
    return _read(STATUS, answer, address)


def _read(schema: Schema[T], answer: bytes, address: str) -> T:
    try:
        return schema.read(answer)
    except ValueError as error:
        raise JoinError(
            f"what listens at {address} does not answer as dpipe's coordinator does: {error}"
        ) from None


def leave(address: str, security: Security, name: str | None, within_s: float) -> int:
    """Have the agents of that name leave, by default this host's; returns how many there are.
    Raises `JoinError`, also where there is none.
    """
    name = name or socket.gethostname()
    request = LeaveRequest(name=name, within_s=within_s)
    answer = ask_once(
        address, security, RELEASE_METHOD, request.model_dump_json().encode(), _ANSWER_S
    )
    num_agents = _NUM_AGENTS.read(answer)
    if num_agents == 0:
        raise JoinError(f"no agent at {address} is called {name!r}; dpipe status lists them")
    return num_agents


def as_text(run: RunStatus) -> str:
    lines = [
        f"{run.run}: {run.phase}, epoch {run.epoch}, step {run.step} of {run.steps}, "
        f"{run.ranks} of {run.wanted} ranks"
    ]
    if run.goodput is not None:
        lines.append(
            f"goodput {run.goodput:.1%} of the steps made; {run.lost_s:.0f} s of {run.run_s:.0f} s "
            "lost to changes of machines"
        )
    for agent in sorted(run.agents, key=lambda agent: (agent.rank is None, agent.rank or 0)):
        seat = "spare" if agent.rank is None else f"rank {agent.rank}"
        leaving = ", leaving" if agent.leaving else ""
        lines.append(
            f"  {seat:<8} {agent.name} ({agent.host}) for {agent.for_s:.0f} s, "
            f"{_rate(run, agent)}heard {agent.silent_s:.1f} s ago{leaving}"
        )
    if run.servers:
        lines.append(f"  parameter servers: {', '.join(run.servers)}")
    if run.relayed:
        lines.append(f"  relayed by the coordinator's machine: {', '.join(run.relayed)}")
    for at, text in run.events:
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        lines.append(f"  {clock}  {text}")
    return "\n".join(lines)


def _rate(run: RunStatus, agent: AgentStatus) -> str:
    if agent.compute_ms is None or run.step_s is None:
        return ""
    return f"computes {agent.compute_ms:.0f} ms of {run.step_s * 1e3:.0f} ms a step, "
