"""`Serving`: where and how an elastic run's coordinator listens, and what it goes on from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dpipe.elastic.journal import RunJournal
from dpipe.elastic.rendezvous import Past
from dpipe.wire.rpc import Security


@dataclass(frozen=True)
class Serving:
    """Where and how the server listens."""

    bind: str = "127.0.0.1"
    port: int = 0
    security: Security = field(default_factory=Security)
    heartbeat_s: float = 40.0
    join_s: float = 120.0
    patience_s: float = 30.0
    # Of the epochs' own coordinators, in turns: one may still close as the next one opens.
    epoch_ports: Sequence[int] = (0,)
    # No machine outlives the coordinator: none of before comes back to one that is started again.
    is_alone: bool = False
    saves_when_stopped: bool = False  # a rank that is told to stop writes a checkpoint


def past_of(journal: RunJournal, settings: Serving) -> Past:
    past = journal.past()
    epoch = past.resumed_at[-1][0] if past.resumed_at else 0
    # Nobody of before comes back, where all were told to go.
    has_rested = journal.get("rested_after") == str(epoch)
    return replace(past, seats=()) if settings.is_alone or has_rested else past
