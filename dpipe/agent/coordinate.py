"""What `dpipe coordinate` does: check the job, open its folder and journal, and serve the machines
that join until the run is over. Killed and started again, it goes on.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from dpipe.agent.claiming import Successor, address_of, claim_term, store_of
from dpipe.agent.rows import RunRows
from dpipe.agent.server import ElasticServer
from dpipe.agent.serving import Serving
from dpipe.config.elastic import check_elastic
from dpipe.config.load import Config, load
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.elastic.servers import ADDRESSES
from dpipe.epoch.assignment import AssignedRun
from dpipe.epoch.pieces import kept_at, pieces_of
from dpipe.errors import ConfigError, DpipeError, RunError, TermLost
from dpipe.memory.copies import copies_bytes
from dpipe.plan.forecast import without_search
from dpipe.plan.machine import held_bytes
from dpipe.plan.run_plan import RunPlan, draft
from dpipe.probe.launcher_costs import to_text
from dpipe.processes.environment import environment, process_info
from dpipe.processes.signals import stop_on_signals
from dpipe.report.display import Display, lasting
from dpipe.report.tracking import Tracking
from dpipe.run.join import security_of
from dpipe.run.resume import stages_at
from dpipe.store.checkpoint import latest
from dpipe.store.identity import identity_of
from dpipe.store.run_folder import (
    absent,
    checkpoint_url,
    held,
    keep_upload,
    logging_to,
    opened,
    refuse_changes,
    refuse_links,
    save_configuration,
    take_back,
)
from dpipe.terms.copying import RunCopies
from dpipe.terms.holding import HeldTerm
from dpipe.terms.policy import TermTimes
from dpipe.terms.storing import TermStore
from dpipe.terms.tenancy import Tenancy, Undisputed
from dpipe.trackers.kinds import refuse_missing

LOG = logging.getLogger("dpipe")
_JOIN = "machines join: dpipe join HOST:PORT"
_POLL_S = 0.5
_GOODBYE_S = 10.0  # for the agents to go
_REST_S = 60.0  # for the step under way, where the machines end with the coordinator
_MOVE_S = 15.0  # what it costs to stop, seat machines anew and go on


class OwnMachines(Protocol):
    """Machines that end with the coordinator, which started them."""

    are_all: bool  # the run has no others: all reach its folder, and none outlives its coordinator

    def start(self, port: int, folder: Path) -> None:
        """The run is in `folder`, and its coordinator listens on `port`."""

    def look(self, newest_step: int) -> None:
        """Replace those that have ended. Raises `RunError` where that leads nowhere."""


def coordinate(
    path: str,
    overrides: tuple[str, ...],
    bind: str,
    *,
    patience_s: float,
    epoch_ports: str = "0",
    standby: bool = False,
    trust_code: bool = False,
    say: Callable[[str], None],
    token: str = "",
    machines: OwnMachines | None = None,
) -> Path | None:
    """Serve the run of a configuration until it is over, or this is asked to stop. Returns the
    folder of a run that has finished. A `standby` waits until the run's coordinator is gone.

    `token`: in the place of the environment's. With `machines`, which are not there when this is
    started again, it stops after a checkpoint, and all machines of the run with it.

    Raises `InputError` for what can be mended before, `RunError` where the run has failed.
    """
    config = load(path, overrides, trust_code=trust_code)
    check_elastic(config)
    refuse_missing(config.run.trackers)
    host, port = parse_address(bind)
    serving = replace(
        _serving(config, token),
        is_alone=machines is not None and machines.are_all,
        saves_when_stopped=machines is not None,
        bind=host,
        port=port,
        patience_s=patience_s,
        epoch_ports=parse_ports(epoch_ports),
    )
    run_plan = draft(config, choose=without_search, predicts_memory=False)
    # Machines that end with the coordinator have no use for another one.
    store = store_of(config, standby=standby) if machines is None else None
    with _place_of(config, store, say, standby=standby) as place:
        if place is None:
            return None
        return _coordinate_in(place, run_plan, serving, machines, say)


def _coordinate_in(
    place: "_Place",
    run_plan: RunPlan,
    serving: Serving,
    machines: OwnMachines | None,
    say: Callable[[str], None],
) -> Path | None:
    config = run_plan.config
    with ExitStack() as stack:
        journal = _journal(place.folder, stack)
        save_configuration(place.folder, config)
        tenancy = _tenancy(config, place, journal)
        stack.callback(tenancy.close)
        job = PlannedJob(run_plan, place.folder, stack, in_folder=serving.is_alone)
        kept = journal.get("servers")
        if kept is not None:
            job.move_servers(tuple(ADDRESSES.read(kept.encode())))
        server = ElasticServer(job, journal, serving, config.guard.copies, tenancy)
        stack.callback(server.close)
        # First of all, so that nothing waits for a URL which does not answer.
        stack.callback(tenancy.stop_waiting)
        tenancy.start(address_of(config, serving.bind, server.port))
        say(f"coordinating {place.folder} at {serving.bind}:{server.port}; {_JOIN}")
        _serve(server, tenancy, place.folder, machines)
        say(_end(server, tenancy, job, rests=machines is not None))
        return place.folder if server.over.is_set() else None


@dataclass(frozen=True)
class _Place:
    """A folder that this process has open, and where the terms of its run are kept, if anywhere."""

    folder: Path
    store: TermStore | None
    taken: int = 0  # the term that a standby has taken already


def _tenancy(config: Config, place: _Place, journal: RunJournal) -> Tenancy:
    store = place.store
    if store is None:
        return Undisputed()
    number = place.taken or claim_term(store, place.folder, journal)
    copies = RunCopies(store, number, place.folder, journal)
    return HeldTerm(store, number, TermTimes.of(config.timeouts.heartbeat), copies)


def _journal(folder: Path, stack: ExitStack) -> RunJournal:
    # Open as long as anything could still be written to it.
    journal = RunJournal(folder / NAME)
    stack.callback(journal.close)
    if journal.get("over") is not None:
        raise ConfigError(f"the run in {folder} is over; choose another run.folder")
    return journal


def _serve(
    server: ElasticServer, tenancy: Tenancy, folder: Path, machines: OwnMachines | None
) -> None:
    """Until the run is over, or a signal asks to stop. Raises `RunError` where another coordinator
    has taken over.
    """
    with stop_on_signals("stopping; the journal is kept") as wants_stop:
        if machines is not None:
            machines.start(server.port, folder)
        # In pieces, because a signal is only noted, and wakes nobody.
        while not (wants_stop() or server.over.wait(_POLL_S)):
            if tenancy.is_lost:
                raise TermLost(tenancy.lost_to())
            if machines is not None:
                machines.look(server.newest_step)


def _end(server: ElasticServer, tenancy: Tenancy, job: "PlannedJob", *, rests: bool) -> str:
    """What there is to say. Raises `RunError` where the run has failed."""
    # Where it is now: of a run that was taken over the identity names another machine's folder.
    if server.over.is_set():
        server.wait_for_agents(_GOODBYE_S)
        # Behind their goodbye: a machine that lost its connection meanwhile finds this one still.
        tenancy.close("over", server.failure)
        if server.failure is not None:
            raise RunError(f"the run in {job.folder.absolute()} has failed: {server.failure}")
        return f"the run in {job.folder.absolute()} has finished"
    if rests:
        return _rest(server, job)
    return "stopped; start it again within a minute, and the machines go on"


def _rest(server: ElasticServer, job: "PlannedJob") -> str:
    """Stop with a checkpoint. Returns what there is to say."""
    if not server.rest(_REST_S):
        LOG.warning("the step under way has not ended within %g s", _REST_S)
    server.wait_for_agents(_GOODBYE_S)
    step = job.checkpoint()
    if step is None:
        return "stopped before there was a checkpoint: the same command begins again"
    return f"stopped; the same command goes on from the checkpoint of step {step}"


def _serving(config: Config, token: str) -> Serving:
    process = process_info(environment())
    security = security_of(config, replace(process, token=token or process.token))
    timeouts = config.timeouts
    return Serving(security=security, heartbeat_s=timeouts.heartbeat, join_s=timeouts.join)


def _needed_bytes(run_plan: RunPlan, rank: int) -> int:
    """What a rank holds, and the copies beside it: its own, and those that others leave there."""
    config = run_plan.config
    forecast = run_plan.forecast
    stages = stages_at(forecast.schedule, config.ranks_of(rank).pp_rank)
    parameter_bytes = sum(forecast.cost.reduce_bytes[stage] for stage in stages)
    others = min(config.guard.copies, config.world_size - 1)
    # Norms, which each rank of a group has, are little.
    part_bytes = parameter_bytes // config.tensor_parallel.size
    copies = copies_bytes(part_bytes, others, config.train.optimizer)
    return held_bytes(run_plan, rank) + copies


def parse_address(bind: str) -> tuple[str, int]:
    """Raises `ConfigError` where it is not HOST:PORT."""
    host, _, port = bind.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65_536):
        raise ConfigError(f"{bind!r} must be HOST:PORT, such as 0.0.0.0:7000")
    return host, int(port)


def parse_ports(text: str) -> range:
    """FIRST-LAST, or 0 for any. Raises `ConfigError` where it is neither."""
    if text == "0":
        return range(1)
    first, _, last = text.partition("-")
    is_range = first.isdecimal() and last.isdecimal()
    if not (is_range and 0 < int(first) < int(last) < 65_536):
        raise ConfigError(
            f"{text!r} must be FIRST-LAST, at least two ports, such as 7001-7004: an epoch may "
            "still close as the next one begins"
        )
    return range(int(first), int(last) + 1)


@contextmanager
def _place_of(
    config: Config, store: TermStore | None, say: Callable[[str], None], *, standby: bool
) -> Iterator[_Place | None]:
    """None where there is nothing to coordinate."""
    if not standby:
        with _folder_of(config) as folder, logging_to(folder, 0, config.run):
            yield _Place(folder, store)
        return
    assert store is not None, "`store_of` refuses a standby without one"
    successor = Successor(store, config)
    with _standing_in(config) as folder, logging_to(folder, 0, config.run):
        say(f"standing by for the run at {store.url}")
        taken = successor.wait(folder)
        if taken is not None:
            yield _Place(folder, store, taken.number)
            return
    if successor.end is not None and successor.end.failure is not None:
        raise RunError(f"the run at {store.url} has failed: {successor.end.failure}")
    say("stopped" if successor.end is None else f"the run at {store.url} has finished")
    yield None


@contextmanager
def _standing_in(config: Config) -> Iterator[Path]:
    """The folder of a standby: an empty one, or one that the run was in before."""
    folder = Path(config.run.folder)
    made = absent(folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    refuse_links(folder)
    log = folder / "logs" / "rank-0.log"
    with held(log, f"another coordinator has the run in {folder} ({log} says how far it is)"):
        try:
            yield folder
        finally:
            # Nothing is left of a standby that was not needed.
            take_back(folder, made)


@contextmanager
def _folder_of(config: Config) -> Iterator[Path]:
    """The run's folder, new or that of a run that goes on."""
    folder = Path(config.run.folder)
    if not (folder / NAME).exists():
        with opened(config, resume=False, rank=0) as new:
            yield new
        return
    refuse_links(folder)
    refuse_changes(config, ())
    log = folder / "logs" / "rank-0.log"
    with held(log, f"another coordinator has the run in {folder} ({log} says how far it is)"):
        yield folder


class PlannedJob:
    """See `job.ElasticJob`. `stack` closes what it opens. `in_folder`: the machines reach the
    run's folder, and so the checkpoints in it.
    """

    def __init__(
        self, run_plan: RunPlan, folder: Path, stack: ExitStack, *, in_folder: bool = False
    ) -> None:
        identity = identity_of(folder)
        assert identity is not None, "the folder has been opened"
        config = run_plan.config
        self.run = AssignedRun(**identity.as_table())
        self.num_pieces = sum(run_plan.forecast.split) * pieces_of(config).num_parts
        self.group_size = config.tensor_parallel.size
        self.world_size = config.world_size
        self.num_steps = config.train.steps
        self.folder = folder
        self.servers = config.data_parallel.address
        self._in_folder = in_folder
        self._plans: dict[int, RunPlan | None] = {self.world_size: run_plan}
        console = Console(file=lasting(sys.stdout))
        display = stack.enter_context(Display(console, 0, self.num_steps))
        tensorboard = config.run.tensorboard
        tracking = stack.enter_context(Tracking(config, folder, environment()))

        def show(row: Mapping[str, Any]) -> None:
            display.show(row)
            tracking.take(row)

        self.rows = RunRows(
            folder,
            num_steps=self.num_steps,
            every=config.run.log_every,
            tensorboard=tensorboard,
            show=show,
        )
        stack.callback(self.rows.close)

    def move_servers(self, addresses: tuple[str, ...]) -> None:
        whole = self._plan(self.world_size)
        config = whole.config.with_(data_parallel__address=addresses)
        run_plan = draft(config, probed=whole.probed, choose=without_search, predicts_memory=False)
        self.servers = addresses
        self._plans = {self.world_size: run_plan}

    def config(self, ranks: int) -> dict[str, dict[str, Any]]:
        config = self._plan(ranks).config
        return config.model_dump(mode="json", exclude={"node"})

    def layer_costs(self, ranks: int) -> str:
        run_plan = self._plan(ranks)
        return to_text(run_plan.config.digest(), run_plan.probed)

    def pieces(self, ranks: int) -> list[list[int]]:
        run_plan = self._plan(ranks)
        return [kept_at(run_plan, rank) for rank in range(ranks)]

    def memory_bytes(self, ranks: int) -> int:
        run_plan = self._plan(ranks)
        if run_plan.config.pipeline.memory_gb is not None or run_plan.model is None:
            return 0  # who says what a rank may hold is believed
        return max(_needed_bytes(run_plan, rank) for rank in range(ranks))

    def fewer(self, num_agents: int) -> int | None:
        # Replicas stay as many as they are: fewer would make other gradients.
        config = self._plan(self.world_size).config
        group = config.data_parallel.replicas * config.tensor_parallel.size
        most = min(num_agents, self.world_size)
        for ranks in range(most // group * group, 0, -group):
            if self._planned(ranks) is not None:
                return ranks
        return None

    def pays(self, ranks: int, more: int, steps_left: int) -> bool:
        now_us = self._plan(ranks).forecast.step_us
        then_us = self._plan(more).forecast.step_us
        return steps_left * (now_us - then_us) / 1e6 > _MOVE_S

    def checkpoint(self) -> int | None:
        # In a folder of each machine, no other machine finds it.
        config = self._plan(self.world_size).config
        reaches_all = self._in_folder or config.run.checkpoint_url is not None
        return latest(checkpoint_url(config)) if reaches_all else None

    def take_upload(self, rank: int, kind: str, payload: bytes) -> None:
        keep_upload(self.folder, rank, kind, payload)

    def _plan(self, ranks: int) -> RunPlan:
        run_plan = self._planned(ranks)
        assert run_plan is not None, "`fewer` has said that it can be planned"
        return run_plan

    def _planned(self, ranks: int) -> RunPlan | None:
        """The job cut anew for so many ranks; None where it cannot be."""
        if ranks not in self._plans:
            self._plans[ranks] = None
            with suppress(DpipeError):
                self._plans[ranks] = self._draft(ranks)
        return self._plans[ranks]

    def _draft(self, ranks: int) -> RunPlan:
        whole = self._plan(self.world_size)
        config = whole.config
        group = config.data_parallel.replicas * config.tensor_parallel.size
        stages = ranks // group * config.pipeline.stages_per_rank
        changes: dict[str, Any] = {"pipeline__stages": stages}
        if config.data_parallel.servers == "per-stage":
            changes["data_parallel__address"] = self.servers[:stages]
        if config.pipeline.splits:
            changes["pipeline__splits"] = ()
        if isinstance(config.pipeline.split, tuple):
            changes["pipeline__split"] = "estimated"
        fewer = config.with_(**changes)
        return draft(fewer, probed=whole.probed, choose=without_search, predicts_memory=False)
