"""How a coordinator comes to its term: the first one, or one after that of this folder; or, as a
standby, after any other.
"""

import logging
import secrets
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

from dpipe.config.load import Config
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.errors import ConfigError, JoinError
from dpipe.processes.signals import stop_on_signals
from dpipe.run.join import advertised_host
from dpipe.store.identity import identity_of
from dpipe.store.run_folder import refuse_changes
from dpipe.terms.copying import fetch
from dpipe.terms.policy import TermTimes
from dpipe.terms.records import HolderBeat, Term
from dpipe.terms.standing_by import Claimant, TakenTerm, await_term
from dpipe.terms.storing import TermStore

LOG = logging.getLogger("dpipe")
_HOLDER = "holder"  # in the journal: the random name of the folder among coordinators
_ANYWHERE = "192.0.2.1"  # of no machine (RFC 5737): it stands for where a default route leads


def store_of(config: Config, *, standby: bool) -> TermStore | None:
    """Where terms are kept; None without a URL that can. Raises `ConfigError` where a standby needs
    one.
    """
    url = config.run.checkpoint_url
    if url is None:
        if standby:
            raise ConfigError(
                "a standby finds the run by run.checkpoint_url: set it, for all coordinators, to a "
                "place that all machines reach, such as s3://bucket/run or file:///shared/run"
            )
        return None
    store = TermStore(url)
    try:
        store.refuse_unfit()
    except ConfigError as error:
        if standby:
            raise
        LOG.warning("no standby can take this run over: %s", error)
        return None
    return store


def claim_term(store: TermStore, folder: Path, journal: RunJournal) -> int:
    """The number of the next term, which follows one of this folder, or none. Raises `ConfigError`
    where another coordinator has the run.
    """
    identity = identity_of(folder)
    assert identity is not None, "the folder has been opened"
    # Who has this folder open is alone with its name: the process before has ended.
    holder = journal.get(_HOLDER) or secrets.token_hex(8)
    journal.put(_HOLDER, holder)
    number = store.newest()
    term = store.term(number)
    if term is not None:
        _refuse_others(store, number, term, identity.id, holder)
    ours = Term(run=identity.id, holder=holder, host=socket.gethostname())
    if not store.claim(number + 1, ours):
        raise ConfigError(f"another coordinator has begun at {store.url} at this moment: stop it")
    return number + 1


def _refuse_others(store: TermStore, number: int, term: Term, run: str, holder: str) -> None:
    beat = store.beat(number)
    is_over = beat is not None and beat.state == "over"
    where = term.host if beat is None else beat.address
    if term.run != run and not is_over:
        raise ConfigError(
            f"{where} coordinates another run at {store.url}: set another run.checkpoint_url, or, "
            f"if that run is no longer needed, delete {store.place}"
        )
    if term.run == run and term.holder != holder:
        remedy = "with --standby this one takes over when that one is gone"
        if is_over:
            remedy = "the run has ended there"
        raise ConfigError(
            f"another coordinator, at {where}, has taken this run over (term {number}): {remedy}"
        )


class Successor:
    """A standby: `wait` ends with a term, or with `end`, the last beat where the run is over."""

    def __init__(self, store: TermStore, config: Config) -> None:
        self.end: HolderBeat | None = None
        self._store = store
        self._config = config

    def wait(self, folder: Path) -> TakenTerm | None:
        """With the run in `folder` as it was left. Raises `ConfigError` and `CheckpointError` where
        this process could not go on with it.
        """
        silence_s = self._config.timeouts.heartbeat
        with stop_on_signals("no longer standing by") as wants_stop:
            claimant = Claimant(
                holder=secrets.token_hex(8),
                times=TermTimes.of(silence_s),
                look_at=lambda term: self._refuse(term, folder),
                wants_stop=wants_stop,
            )
            found = await_term(self._store, claimant)
        if not isinstance(found, TakenTerm):
            self.end = found
            return None
        # Over what this folder may have from an earlier term.
        fetch(self._store, found.term.run, folder)
        journal = RunJournal(folder / NAME)
        journal.put(_HOLDER, found.term.holder)
        journal.close()
        return found

    def _refuse(self, term: Term, folder: Path) -> None:
        identity = identity_of(folder)
        if identity is not None and identity.id != term.run:
            raise ConfigError(
                f"{folder} holds {identity}, and another run is coordinated at {self._store.url}: "
                "choose another run.folder"
            )
        # Tried now, while there is time to mend it: a journal that is damaged, another job.
        with TemporaryDirectory() as name:
            copy = Path(name)
            fetch(self._store, term.run, copy)
            RunJournal(copy / NAME).close()
            refuse_changes(self._config.with_(run__folder=name), ())


def address_of(config: Config, host: str, port: int) -> str:
    """Where machines reach a coordinator that listens at `host`, also those that it has not met."""
    try:
        reached = advertised_host(host, config.node.advertise, _ANYWHERE)
    except JoinError:
        reached = socket.gethostname()
        LOG.warning(
            "machines that look for this coordinator are told %s: set node.advertise to an address "
            "at which they reach it",
            reached,
        )
    return f"{reached or host}:{port}"
