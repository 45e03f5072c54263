"""`await_term`: what a standby does, until the next term is its own."""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from dpipe.terms.policy import Choice, TermTimes, TermWatch
from dpipe.terms.records import HolderBeat, Term
from dpipe.terms.storing import TermStore, TermStoreError

LOG = logging.getLogger("dpipe")


@dataclass(frozen=True)
class Claimant:
    """Who stands by. `look_at` is called once, for the first term that has a beat: it refuses a run
    that this process could not go on with.
    """

    holder: str
    times: TermTimes
    look_at: Callable[[Term], None]
    wants_stop: Callable[[], bool]


@dataclass(frozen=True)
class TakenTerm:
    number: int
    term: Term


def await_term(store: TermStore, claimant: Claimant) -> TakenTerm | HolderBeat | None:
    """The term that is this standby's; or the last beat of a run that is over; None where it was
    asked to stop. Raises `CheckpointError` for a record that is damaged.
    """
    watch = TermWatch(claimant.times.patience_s)
    is_known = False
    while not claimant.wants_stop():
        # Before the look: a count that rises during it is seen by the next one.
        began_at = time.monotonic()
        try:
            number = store.newest()
            term = store.term(number)
            beat = store.beat(number)
            # With a beat its journal is there, too.
            if term is not None and beat is not None and not is_known:
                claimant.look_at(term)
                is_known = True
            if term is None:
                choice = Choice.WAIT
                watch.saw_nothing()
            else:
                choice = watch.seen(number, beat, began_at)
            if choice is Choice.OVER:
                return beat
            if choice is Choice.CLAIM:
                assert term is not None
                LOG.warning("%s; taking over, as term %d", _why(beat, number), number + 1)
                ours = Term(run=term.run, holder=claimant.holder, host=socket.gethostname())
                if store.claim(number + 1, ours):
                    return TakenTerm(number + 1, ours)
        except TermStoreError as error:
            LOG.warning("%s; nothing is known of the coordinator meanwhile", error)
            watch.saw_nothing()
        time.sleep(claimant.times.beat_s)
    return None


def _why(beat: HolderBeat | None, number: int) -> str:
    if beat is None:
        return f"the coordinator of term {number} has never shown a sign of life"
    if beat.state == "left":
        return f"the coordinator at {beat.address} has left"
    return f"the coordinator at {beat.address} shows no sign of life any more"
