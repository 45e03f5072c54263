"""What an agent and the coordinator say to each other, as JSON, each message with its `kind`.

    agent ──▶ coordinator    enlist       I am a7, I run dpipe 0.1.0, I hold that.
    coordinator ──▶ agent    enlisted     You are in. Drop what is newer than step 40.
                             refused      You are not, because ...
                             assigned     You are rank 2 of epoch 4: ...
                             standby      Others begin epoch 4.
    agent ──▶ coordinator    beat         My clock shows 17.
    coordinator ──▶ agent    answered     You said 17.
    agent ──▶ coordinator    committed    Step 41 is made.
                             row          Rank 0 measured that in step 41.
                             agreed       All ranks have the state of step 40 whole.
                             vouched      My pieces of step 40 have these digests.
    coordinator ──▶ agent    retire       Copies from before step 40 can go.
                             stop         End epoch 4, after this step or at once.
    agent ──▶ coordinator    ended        My part of epoch 4 is over; I hold that.
    coordinator ──▶ agent    ask          What do you hold?
    agent ──▶ coordinator    holds        I hold that.
                             leave        I want to go within 100 s.
    coordinator ──▶ agent    release      Go.

Texts are made visible and sizes are bounded here: an agent may be the machine of a stranger.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from dpipe.elastic.agents import Enlistment, EpochOutcome, EpochReport
from dpipe.elastic.lineage import Held
from dpipe.wire.schema import Count, Finite, Schema, Sha256, Shape, Text

PROTOCOL = 3
METHOD = "/dpipe.elastic.v1.Agents/Attend"
JOB_METHOD = "/dpipe.elastic.v1.Agents/Job"
STATUS_METHOD = "/dpipe.elastic.v1.Agents/Status"
RELEASE_METHOD = "/dpipe.elastic.v1.Agents/Release"
MESSAGE_BYTES = 4 << 20  # what gRPC takes

AgentId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
KeeperAddress = Annotated[str, Field(max_length=300, pattern=r"^[\w.:%\[\]-]+:[0-9]{1,5}$")]
# Of the state: `keeper.pieces`
Pieces = Annotated[list[Count], Field(max_length=100_000)]
HeldPieces = Annotated[dict[Count, Pieces], Field(max_length=1000)]
Seconds = Annotated[float, Field(ge=0, le=30 * 86_400)]


class WorkReport(Shape):
    epoch: Count
    outcome: EpochOutcome
    reason: Annotated[Text, Field(max_length=1000)] = ""


class Enlist(Shape):
    kind: Literal["enlist"] = "enlist"
    protocol: Count
    version: Text
    run: Text  # whose configuration it has; empty: of none yet
    agent: AgentId
    name: Text
    host: Text
    keeper: KeeperAddress
    machine: Text = ""
    memory_bytes: Count
    epoch: Count
    working: bool
    held: HeldPieces
    last: WorkReport | None = None

    def enlistment(self) -> Enlistment:
        return Enlistment(
            agent=self.agent,
            name=self.name,
            host=self.host,
            keeper=self.keeper,
            machine=self.machine,
            epoch=self.epoch,
            working=self.working,
            held=as_sets(self.held),
            last=None if self.last is None else as_epoch_report(self.last),
        )


class Beat(Shape):
    kind: Literal["beat"] = "beat"
    sent_at: Finite


class Committed(Shape):
    kind: Literal["committed"] = "committed"
    epoch: Count
    step: Count
    loss: Finite | None = None  # of the step before that state


class Agreed(Shape):
    """All ranks of the epoch have the state of `step` whole."""

    kind: Literal["agreed"] = "agreed"
    epoch: Count
    step: Count


class Vouched(Shape):
    """By piece, SHA-256 of the copy that the agent's rank has made of it, as others keep it."""

    kind: Literal["vouched"] = "vouched"
    epoch: Count
    step: Count
    digests: Annotated[dict[Count, Sha256], Field(max_length=100_000)]


class Row(Shape):
    """A row of metrics.jsonl, from rank 0."""

    kind: Literal["row"] = "row"
    epoch: Count
    row: Annotated[dict[Text, Any], Field(max_length=1000)]


class Ended(Shape):
    kind: Literal["ended"] = "ended"
    report: WorkReport
    held: HeldPieces


class Holds(Shape):
    kind: Literal["holds"] = "holds"
    epoch: Count
    held: HeldPieces


class Leave(Shape):
    kind: Literal["leave"] = "leave"
    within_s: Seconds


FromAgent = Enlist | Beat | Committed | Agreed | Vouched | Row | Ended | Holds | Leave
FROM_AGENT = Schema[FromAgent](Annotated[FromAgent, Field(discriminator="kind")])


class Enlisted(Shape):
    kind: Literal["enlisted"] = "enlisted"
    run: Text
    term: Count | None = None  # the coordinator's; None: no other one can take over
    epoch: Count
    newest_valid: Count | None  # None: all of its copies are good
    newest_step: Count
    first_row: Count  # of metrics, that the coordinator has not
    silence_s: Seconds


class Refusal(Shape):
    kind: Literal["refused"] = "refused"
    reason: Annotated[str, Field(max_length=10_000)]


class Assigned(Shape):
    kind: Literal["assigned"] = "assigned"
    resume_step: Count
    assignment: dict[str, Any]  # `epoch.assignment.Assignment`, read there


class Standby(Shape):
    kind: Literal["standby"] = "standby"
    epoch: Count
    resume_step: Count


class Retire(Shape):
    """Copies of steps before that one are needed no longer."""

    kind: Literal["retire"] = "retire"
    epoch: Count
    before: Count


class Stop(Shape):
    kind: Literal["stop"] = "stop"
    epoch: Count
    after_step: bool


class Ask(Shape):
    kind: Literal["ask"] = "ask"


class Release(Shape):
    kind: Literal["release"] = "release"


class Answered(Shape):
    kind: Literal["answered"] = "answered"
    sent_at: Finite


ToAgent = Enlisted | Refusal | Assigned | Standby | Retire | Stop | Ask | Release | Answered
TO_AGENT = Schema[ToAgent](Annotated[ToAgent, Field(discriminator="kind")])


class JobOffer(Shape):
    """The job that machines join for, as all its ranks run it."""

    version: Text  # of dpipe
    config: dict[str, dict[str, Any]]  # without [node]
    layer_costs: Annotated[str, Field(max_length=1 << 20)]  # probe/launcher_costs.py


JOB_OFFER = Schema[JobOffer](JobOffer)


class LeaveRequest(Shape):
    """What `dpipe leave` asks for."""

    name: Text
    within_s: Seconds


class StatusRequest(Shape):
    """What `dpipe status` and `dpipe watch` ask for."""

    rows_from: Count | None = None  # also rows of metrics, of this step and later; None: no rows


LEAVE_REQUEST = Schema[LeaveRequest](LeaveRequest)
STATUS_REQUEST = Schema[StatusRequest](StatusRequest)


def as_lists(held: Held) -> dict[int, list[int]]:
    return {step: sorted(pieces) for step, pieces in held.items()}


def as_report(report: EpochReport) -> WorkReport:
    return WorkReport(epoch=report.epoch, outcome=report.outcome, reason=report.reason)


def as_sets(held: dict[int, list[int]]) -> dict[int, frozenset[int]]:
    return {step: frozenset(pieces) for step, pieces in held.items()}


def as_epoch_report(report: WorkReport) -> EpochReport:
    return EpochReport(report.epoch, report.outcome, report.reason)
