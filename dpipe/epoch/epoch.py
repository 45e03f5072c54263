"""`run_epoch`: a rank's part of one epoch, in a process that stays.

    plan ─▶ fetch layers ─▶ join ─▶ stages ─▶ restore ─▶ train ──┬─▶ finished  all steps are done
            from keepers    links                                ├─▶ left      asked to stop
                                                                 ├─▶ aborted   somebody is gone
                                                                 └─▶ failed    would come again
                                    its own state, if it is whole, into its keeper ◀──┘

To the other ranks it is a run like any other. What differs is where its state comes from, and that
nothing is written into a run's folder. Threads, sockets and memory of an epoch end with it.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from traceback import clear_frames
from typing import Literal

from dpipe.config.elastic import check_elastic
from dpipe.config.load import Config, build
from dpipe.config.run import NodeConfig
from dpipe.config.trust import refuse_untrusted
from dpipe.coordinator.base import Coordination
from dpipe.engine.rehearsal import rehearse
from dpipe.engine.trainer import Job, Trainer
from dpipe.engine.update import Verdict
from dpipe.epoch.assignment import Assignment
from dpipe.epoch.cadence import Cadence
from dpipe.epoch.control import EpochControl
from dpipe.epoch.guard import Guard, Vouch
from dpipe.epoch.idle_time import IdleTime, WatchedLinks
from dpipe.epoch.pieces import kept_at, needed_at, pieces_of
from dpipe.epoch.state import EpochState
from dpipe.errors import ConfigError, DpipeError, InputError, JoinError, NumericError
from dpipe.keeper.client import Fetching, KeeperClient
from dpipe.keeper.copies import PieceCopy, unpack
from dpipe.keeper.keeper import Keeper
from dpipe.keeper.pieces import Pieces
from dpipe.paramserver.stage_server import session_of
from dpipe.plan.run_plan import RunPlan
from dpipe.processes.environment import ProcessInfo
from dpipe.report.rows import OnRow
from dpipe.run.build import (
    adopt_plan_of_rank_0,
    assemble,
    checked_plan,
    peers_of,
    resources_of,
)
from dpipe.run.join import joined
from dpipe.run.parameter_servers import ServedEpoch
from dpipe.run.resume import find_start, restore
from dpipe.store.checkpoint import Loaded
from dpipe.store.identity import RunIdentity, check_writer, claim
from dpipe.store.run_folder import checkpoint_url
from dpipe.streams import Streams, streams_of

LOG = logging.getLogger("dpipe")
Committed = Callable[[int, float | None], None]


@dataclass(frozen=True)
class EpochEnd:
    """How an epoch ended for this rank."""

    outcome: Literal["finished", "left", "aborted", "failed"]
    reason: str = ""
    last_committed: int | None = None  # steps that are done; None where it never trained


def run_epoch(
    assignment: Assignment,
    keeper: Keeper,
    *,
    node: NodeConfig,
    control: EpochControl,
    committed: Committed = lambda next_step, loss: None,
    on_row: OnRow | None = None,
    vouch: Vouch = lambda step, digests: None,
    trust_code: bool = False,
) -> EpochEnd:
    """Train the assigned rank until the epoch ends, and say how.

    `node` is this process's own section; the token of its links is the assignment's. `committed`
    gets, after each step, how many are done, and the loss of the last where ranks wait for the
    verdict; and `on_row` on rank 0 each row of metrics: both on this thread. `vouch` is that of
    `Guard`, `trust_code` that of `dpipe.load`.

    Where the state is whole at the end, `keeper` holds it. Raises only what is a bug, or no
    `Exception`.
    """
    epoch = _Epoch(assignment, keeper, control, committed, on_row, vouch)
    try:
        with control.watched():
            epoch.train(node, trust_code)
        end = EpochEnd("finished" if epoch.is_done else "left", "", epoch.next_step)
    except (DpipeError, OSError) as error:
        end = EpochEnd(_outcome_of(error), str(error), epoch.next_step)
        LOG.warning("epoch %d ends: %s", assignment.epoch, end.reason)
        # A thread that is not over yet may hold the error, and by its traceback the model.
        clear_frames(error.__traceback__)
    # After the error is gone, whose traceback holds what the epoch was made of.
    epoch.keep_state()
    del epoch
    # Circles of objects hold the model until then.
    gc.collect()
    return end


def _outcome_of(error: Exception) -> Literal["aborted", "failed"]:
    if isinstance(error, NumericError):
        return "failed"
    if isinstance(error, InputError) and not isinstance(error, JoinError):
        return "failed"
    return "aborted"


class _Epoch:
    """One call of `run_epoch`."""

    def __init__(
        self,
        assignment: Assignment,
        keeper: Keeper,
        control: EpochControl,
        committed: Committed,
        on_row: OnRow | None,
        vouch: Vouch,
    ) -> None:
        self._assignment = assignment
        self._keeper = keeper
        self._control = control
        self._committed = committed
        self._on_row = on_row
        self._vouch = vouch
        self._loaded: Loaded | None = None
        self._copies: list[PieceCopy] = []  # that it goes on from
        self._state: EpochState | None = None
        self._steps = 0
        self._kept_step: int | None = None  # the newest whose state its keeper has
        self._pieces = Pieces()

    @property
    def next_step(self) -> int | None:
        return None if self._state is None else self._state.next_step

    @property
    def is_done(self) -> bool:
        return self.next_step == self._steps

    def train(self, node: NodeConfig, trust_code: bool) -> None:
        assigned = self._assignment
        self._keeper.fence(assigned.epoch, assigned.resume_step or 0)
        config = self._config(node, trust_code)
        self._steps = config.train.steps
        self._pieces = pieces_of(config)
        process = ProcessInfo(
            assigned.rank,
            assigned.world_size,
            coordinator=assigned.coordinator,
            token=assigned.token,
            layer_costs=assigned.layer_costs,
            coordinator_is_elsewhere=True,
        )
        run_plan = checked_plan(config, process)
        self._loaded = self._start(run_plan)
        streams = streams_of(run_plan.config.node.device)
        peers = peers_of(run_plan, assigned.rank)
        with joined(config, process, peers, None, streams, self._attempt) as (coordinator, links):
            run_plan = adopt_plan_of_rank_0(run_plan, coordinator)
            self._train_with(run_plan, process, coordinator, WatchedLinks(links), streams)

    def _train_with(
        self,
        run_plan: RunPlan,
        process: ProcessInfo,
        coordinator: Coordination,
        links: WatchedLinks,
        streams: Streams,
    ) -> None:
        """The ranks have met."""
        assigned = self._assignment
        with ExitStack() as stack:
            resources = resources_of(
                run_plan,
                process,
                coordinator,
                links,
                streams,
                stack,
                stopping=nullcontext(self._control.wants_stop),
                identity=RunIdentity(**assigned.run.model_dump(), start=assigned.start),
                epoch=ServedEpoch(
                    session_of(assigned.run.id, assigned.epoch), self._keeper.security
                ),
            )
            job = assemble(run_plan, resources, stack)
            restore(self._loaded, job.stages, job.update, job.here)
            first_step = 0 if self._loaded is None else self._loaded.step
            # What it begins with is held as it came: here it may be cut otherwise.
            self._kept_step = first_step
            self._loaded = None  # as large as the model and its moments
            coordinator.barrier("assembled", job.timeout_s)
            # Until the run is over, not the epoch: nobody releases it while another rank claims.
            if job.checkpoint_url is not None:
                claim(job.checkpoint_url, job.identity, takes_unmarked=first_step > 0)
            self._train(job, first_step, links, run_plan)

    def keep_state(self) -> None:
        """Into the keeper, where it is whole: what this rank has done beyond the last guarded
        step.
        """
        state = self._state
        self._state = None
        if state is not None and state.is_whole:
            self._keep(state)

    def _keep(self, state: EpochState) -> None:
        if state.next_step == self._kept_step:
            return
        try:
            copies = state.take(state.next_step)
        except (DpipeError, OSError) as error:
            # Of what replicas exchange behind a step, something has not come any more.
            LOG.info("the state before step %d is not whole here: %s", state.next_step, error)
            return
        self._keeper.hold(copies)
        self._kept_step = state.next_step

    def _config(self, node: NodeConfig, trust_code: bool) -> Config:
        """Raises `ConfigError`, also for what an epoch cannot do yet."""
        own = node.model_dump() | {"token": self._assignment.token, "token_file": None}
        config = build({**self._assignment.config, "node": own})
        refuse_untrusted(config.model.layers, trust_code=trust_code)
        if config.world_size != self._assignment.world_size:
            raise ConfigError(
                f"the job needs {config.world_size} ranks, and {self._assignment.world_size} were "
                "assigned"
            )
        check_elastic(config)
        return config

    def _start(self, run_plan: RunPlan) -> Loaded | None:
        """The state to go on from; fetched before anybody is met, who would wait for it."""
        assigned = self._assignment
        if assigned.checkpoint:
            config = run_plan.config
            start = find_start(config, run_plan, assigned.rank)
            identity = RunIdentity(**assigned.run.model_dump())
            check_writer(checkpoint_url(config), start.run, identity)
            return start
        step = assigned.resume_step
        if step is None:
            return None
        own = kept_at(run_plan, assigned.rank)
        needed = self._fetched(step, needed_at(run_plan, assigned.rank))
        # Own ones last: other replicas may have other buffers.
        needed.sort(key=lambda copy: copy.piece in own)
        copies = [copy for copy in needed if copy.piece in own]
        # Where each epoch ends soon, the states of all of them would add up.
        self._keeper.keep(own, self._keeper.fallbacks(step))
        # Others may need them from here before the next copies are taken.
        self._keeper.hold(copies)
        self._copies = copies
        return unpack(needed, self._pieces)

    def _fetched(self, step: int, pieces: Iterable[int]) -> list[PieceCopy]:
        """Those pieces, from this keeper or from others."""
        assigned = self._assignment
        copies = []
        missing = []
        for piece in pieces:
            copy = self._keeper.find(step, piece)
            known = assigned.digests.get(piece, [])
            # What is here may be another's.
            if copy is None or (known and copy.digest not in known):
                missing.append(piece)
            else:
                copies.append(copy)
        security = self._keeper.security
        with Fetching(assigned.epoch, security, self._connected, self._pieces) as fetching:
            for piece in missing:
                sources = assigned.sources.get(piece, [])
                known = assigned.digests.get(piece, [])
                copies.append(fetching.fetch(step, piece, sources, known))
        return copies

    def _connected(self, client: KeeperClient) -> None:
        self._control.on_abort("fetch", lambda error: client.cancel())

    def _attempt(self, coordinator: Coordination) -> None:
        self._control.on_abort("join", coordinator.give_up)

    def _train(self, job: Job, first_step: int, transport: WatchedLinks, run_plan: RunPlan) -> None:
        config = run_plan.config
        cadence = Cadence(config, run_plan.forecast)
        transport.rehearse(partial(rehearse, job, first_step))
        with ExitStack() as stack:
            guard = Guard(
                self._keeper,
                epoch=self._assignment.epoch,
                every=cadence.every,
                addresses=self._assignment.guards,
                security=self._keeper.security,
                take=lambda step: self._whole_state().take(step),
                resumed=first_step,
                copies=self._copies,
                before_chunk=IdleTime(transport.is_sending).wait,
                vouch=self._vouch,
            )
            stack.callback(guard.close)
            self._copies = []
            job = replace(
                job,
                on_row=self._on_row if job.here.rank == 0 else None,
                saves_when_stopped=self._assignment.saves_when_stopped,
                after_step=partial(self._after_step, guard, cadence),
                guarded=lambda: guard.whole,
            )
            # Not before a step that is not due: the run that went on has evaluated there.
            evaluates = job.train.eval_every
            due = evaluates is not None and first_step % evaluates == 0
            trainer = Trainer(job, first_step, evaluates_first=due)
            self._state = EpochState(job, trainer, config)
            trainer.run()
            # As long as other ranks are there: it may need an exchange with them.
            self._keep(self._whole_state())

    def _whole_state(self) -> EpochState:
        assert self._state is not None, "a step has been taken"
        return self._state

    def _after_step(
        self, guard: Guard, cadence: Cadence, next_step: int, verdict: Verdict | None
    ) -> None:
        self._whole_state().copy_buffers()
        if verdict is not None:
            cadence.hear(verdict)
        guard.every = cadence.every
        guard.after_step(next_step, verdict)
        loss = None
        if verdict is not None and verdict.step == next_step - 1:
            loss = verdict.loss
        self._committed(next_step, loss)
