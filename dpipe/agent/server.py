"""`ElasticServer`: the agents' connections around one `Rendezvous`, and the epoch's coordinator.

agent a ══stream══ reader ──┐   one lock     ┌── outbox ══stream══ agent a
agent b ══stream══ reader ──┼─▶ Rendezvous ──┼── outbox ══stream══ agent b
             clock thread ──┘       │        └── CoordinatorServer of epoch e
                                    └── journal

A stream that breaks is simply opened again: an agent says first what it does and holds.
"""

import ctypes
import gc
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from dpipe import __version__
from dpipe.agent import knocking
from dpipe.agent.digests import Digests
from dpipe.agent.goodput import Goodput
from dpipe.agent.job import ElasticJob
from dpipe.agent.methods import handler_of
from dpipe.agent.serving import Serving, past_of
from dpipe.agent.standing import standing_of
from dpipe.coordinator.server import CoordinatorServer
from dpipe.elastic import messages
from dpipe.elastic.agents import Epoch
from dpipe.elastic.journal import RunJournal
from dpipe.elastic.messages import FROM_AGENT, PROTOCOL, Enlist, ToAgent
from dpipe.elastic.rendezvous import Rendezvous, Settings
from dpipe.elastic.servers import ServerMoved, ServersKnown, moved
from dpipe.epoch.assignment import Assignment
from dpipe.errors import ConfigError, JoinError, TermLost
from dpipe.terms.tenancy import Tenancy, Undisputed
from dpipe.wire.rpc import Security, serve

LOG = logging.getLogger("dpipe")
_TICKS = 32  # in the time after which an agent is lost
_MOST_AGENTS = 1000  # connections at once; each holds a thread
_UNDISPUTED = Undisputed()
_LATE_S = 2.0  # of the clock, on a busy machine
_STOP_S = 2.0
_RETURN_S = 1.0  # for the threads of an epoch that is closed to end
_EVENTS_SHOWN = 10
_TOKEN_BYTES = 16
_OUTBOX = 1000  # messages that an agent has not read


@dataclass(eq=False)
class _Connection:
    agent: str
    context: grpc.ServicerContext
    outbox: "queue.Queue[ToAgent | None]" = field(
        default_factory=lambda: queue.Queue(maxsize=_OUTBOX)
    )

    def tell(self, message: ToAgent | None) -> None:
        try:
            self.outbox.put_nowait(message)
        except queue.Full:
            # It reads nothing: as good as a connection that broke.
            self.context.cancel()


class ElasticServer:
    """Listens from the constructor until `close`. `over` is set once the run has ended; `failure`
    then says why it went wrong, or is None. Raises `JoinError` where it cannot bind.
    """

    def __init__(
        self,
        job: ElasticJob,
        journal: RunJournal,
        settings: Serving,
        copies: int = 1,
        tenancy: Tenancy = _UNDISPUTED,
    ) -> None:
        self.over = threading.Event()
        self.failure: str | None = None
        self._job = job
        self._journal = journal
        self._settings = settings
        self._tenancy = tenancy
        self._lock = threading.RLock()
        self._connections: dict[str, _Connection] = {}
        self._epoch_server: CoordinatorServer | None = None
        self._closers: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._digests = Digests()
        self._goodput = Goodput(self._newest_kept())
        self._rendezvous = Rendezvous(
            Settings(
                num_pieces=job.num_pieces,
                group_size=job.group_size,
                world_size=job.world_size,
                num_steps=job.num_steps,
                silence_s=settings.heartbeat_s,
                gather_s=settings.join_s,
                patience_s=settings.patience_s,
                copies=copies,
            ),
            self,
            past_of(journal, settings),
            time.monotonic(),
        )
        self._server = serve(
            [handler_of(self)],
            settings.bind,
            settings.port,
            settings.security,
            max_workers=_MOST_AGENTS,
            silence_s=settings.heartbeat_s,
        )
        self._clock = threading.Thread(target=self._tick, name="elastic clock", daemon=True)
        self._clock.start()

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        self._stopped.set()
        with self._lock:
            self.close_epoch("the coordinator has stopped")
            connections = list(self._connections.values())
        for connection in connections:
            connection.tell(None)
        self._clock.join(_STOP_S)
        self._server.stop(_STOP_S)
        self._server.join(2 * _STOP_S)
        for closer in self._closers:
            closer.join(3 * _STOP_S)

    @property
    def newest_step(self) -> int:
        return self._rendezvous.newest_step

    def rest(self, within_s: float) -> bool:
        """End the epoch after the step under way, begin no other, and let all agents go; whether it
        has ended in that time.
        """
        deadline = time.monotonic() + within_s
        with self._lock:
            self._rendezvous.rest(within_s, time.monotonic())
        while not self._rendezvous.is_at_rest and time.monotonic() < deadline:
            time.sleep(0.05)
        with self._lock:
            for agent_id in self._connections:
                self.release(agent_id)
            self._journal.put("rested_after", str(self._rendezvous.epoch))
        return self._rendezvous.is_at_rest

    def wait_for_agents(self, timeout_s: float) -> None:
        """Until the last one has gone."""
        deadline = time.monotonic() + timeout_s
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.05)

    def _tick(self) -> None:
        interval_s = min(self._settings.heartbeat_s / _TICKS, 1.0)
        ticked_at = time.monotonic()
        while not self._stopped.wait(interval_s):
            if not self._tenancy.holds:
                continue
            with self._lock, suppress(TermLost):
                now = time.monotonic()
                # Stopped, or not sure to coordinate: what came meanwhile is unread.
                if now - ticked_at > max(_LATE_S, self._settings.heartbeat_s / 8):
                    self._rendezvous.was_away(now)
                ticked_at = now
                self._rendezvous.tick(now)

    # Connections

    def attend(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One agent's stream."""
        try:
            enlist = FROM_AGENT.read(next(incoming))
            self._refuse_steps(enlist)
        except (StopIteration, ValueError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this is not an agent: {error}")
        if not isinstance(enlist, Enlist):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an agent enlists first")
        connection = _Connection(enlist.agent, context)
        try:
            self._tenancy.check()
            refusal = self._objection(enlist) or self._enlist(enlist, connection)
        except TermLost as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        if refusal is not None:
            LOG.warning("refused %s (%s): %s", enlist.name, enlist.host, refusal)
            yield _encode(messages.Refusal(reason=refusal))
            return
        reader = threading.Thread(
            target=self._read, args=(incoming, connection), name="agent reader", daemon=True
        )
        reader.start()
        while (message := connection.outbox.get()) is not None:
            yield _encode(message)

    def _objection(self, enlist: Enlist) -> str | None:
        if enlist.protocol != PROTOCOL or enlist.version != __version__:
            return (
                f"it runs dpipe {enlist.version}, the coordinator {__version__}; install one "
                "version everywhere"
            )
        if enlist.run and enlist.run != self._job.run.id:
            return (
                f"it was in run {enlist.run}, and this is run {self._job.run.id}: another "
                "coordinator listens here now; start it again to join this run"
            )
        needed = self._job.memory_bytes(self._job.world_size)
        if enlist.memory_bytes < needed:
            return (
                f"it has {enlist.memory_bytes / 1e9:,.2f} GB of memory, and a rank needs "
                f"{needed / 1e9:,.2f} GB; join with a larger machine, or set pipeline.memory_gb to "
                "what a rank may hold"
            )
        return None

    def _enlist(self, enlist: Enlist, connection: _Connection) -> str | None:
        agent_id = connection.agent
        with self._lock:
            earlier = self._connections.pop(agent_id, None)
            if earlier is not None:
                earlier.tell(None)
            rendezvous = self._rendezvous
            newest = rendezvous.newest_valid(enlist.epoch)
            self._connections[agent_id] = connection
            # First: what `enlist` decides is said behind it.
            connection.tell(
                messages.Enlisted(
                    run=self._job.run.id,
                    term=self._tenancy.number,
                    epoch=rendezvous.epoch,
                    newest_valid=None if newest == float("inf") else int(newest),
                    newest_step=rendezvous.newest_step,
                    first_row=self._job.rows.first_missing,
                    silence_s=self._settings.heartbeat_s,
                )
            )
            refusal = rendezvous.enlist(enlist.enlistment(), time.monotonic())
            if refusal is not None:
                self._connections.pop(agent_id, None)
        return refusal

    def _read(self, incoming: Iterator[bytes], connection: _Connection) -> None:
        try:
            for content in incoming:
                self._tenancy.check()
                self._take(FROM_AGENT.read(content), connection)
        except (grpc.RpcError, TermLost):
            pass  # the stream is over, which follows below
        except ValueError as error:
            LOG.warning(
                "put out agent %s: it sent what no agent sends: %s", connection.agent, error
            )
        except Exception as error:
            # Nothing can be kept any more, or a bug: not to be passed over in silence.
            LOG.exception("the coordinator cannot go on")
            with self._lock:
                self.finish(f"{type(error).__name__}: {error}")
        connection.tell(None)
        with self._lock:
            if self._connections.get(connection.agent) is connection:
                del self._connections[connection.agent]
                self._rendezvous.disconnected(connection.agent)
                agent = self._rendezvous.agents.get(connection.agent)
                if agent is not None:
                    knocking.watch(
                        agent.keeper,
                        partial(self._gone, connection.agent),
                        partial(self._is_settled, connection.agent),
                    )

    def _gone(self, agent_id: str) -> None:
        with self._lock, suppress(TermLost):
            self._tenancy.check()
            if not self._is_settled(agent_id):
                self._rendezvous.gone(agent_id, "its process has ended", time.monotonic())

    def _is_settled(self, agent_id: str) -> bool:
        """Whether it is back, or lost, or the server has stopped."""
        if self._stopped.is_set():
            return True
        agent = self._rendezvous.agents.get(agent_id)
        return agent is None or agent.connected

    def _refuse_steps(self, message: messages.FromAgent) -> None:
        """Raises `ValueError` for a step that the run does not have: all that are below the newest
        are gone through at its end.
        """
        steps: Iterable[int] = ()
        match message:
            case messages.Committed() | messages.Agreed() | messages.Vouched():
                steps = (message.step,)
            case messages.Ended() | messages.Holds() | messages.Enlist():
                steps = message.held
        if max(steps, default=0) > self._job.num_steps:
            raise ValueError(f"step {max(steps)} of {self._job.num_steps}")

    def _take(self, message: messages.FromAgent, connection: _Connection) -> None:
        agent_id = connection.agent
        self._refuse_steps(message)
        with self._lock:
            if self._connections.get(agent_id) is not connection:
                raise ValueError("it has another connection by now")
            now = time.monotonic()
            rendezvous = self._rendezvous
            match message:
                case messages.Beat():
                    rendezvous.beat(agent_id, now)
                    connection.tell(messages.Answered(sent_at=message.sent_at))
                case messages.Committed():
                    self._hear(message)
                    rendezvous.committed(agent_id, message.epoch, message.step, now)
                case messages.Agreed():
                    rendezvous.agreed(agent_id, message.epoch, message.step, now)
                case messages.Vouched():
                    self._take_digests(agent_id, message)
                case messages.Row():
                    self._take_row(message)
                case messages.Ended():
                    report = messages.as_epoch_report(message.report)
                    held = messages.as_sets(message.held)
                    rendezvous.ended(agent_id, report, held, now)
                case messages.Holds():
                    held = messages.as_sets(message.held)
                    rendezvous.holds(agent_id, message.epoch, held, now)
                case messages.Leave():
                    rendezvous.leave(agent_id, message.within_s, now)
                case messages.Enlist():
                    raise ValueError("it has enlisted already")

    def _take_digests(self, agent_id: str, message: messages.Vouched) -> None:
        seats = self._rendezvous.seats
        if message.epoch != self._rendezvous.epoch or agent_id not in seats:
            return
        own = self._job.pieces(len(seats))[seats.index(agent_id)]
        self._digests.take(message.step, own, message.digests)

    def _hear(self, message: messages.Committed) -> None:
        if message.step <= self._rendezvous.newest_valid(message.epoch):
            self._job.rows.hear(message.step - 1, message.loss)

    def _take_row(self, message: messages.Row) -> None:
        # The step that it is of may have been dropped with its epoch.
        step = message.row.get("step")
        end = min(self._job.num_steps, self._rendezvous.newest_valid(message.epoch))
        if isinstance(step, int) and step < end:
            self._job.rows.take(self._goodput.added_to(message.row, time.monotonic()))

    # What `Rendezvous` acts through (`elastic.agents.Agents`), with the lock held

    def begin(self, epoch: Epoch) -> None:
        self._keep_beginning(epoch)
        self._tenancy.publish()
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        address = self._open_epoch(epoch, token)
        start = secrets.token_hex(8)
        for agent_id, connection in self._connections.items():
            if agent_id not in epoch.seats:
                connection.tell(messages.Standby(epoch=epoch.number, resume_step=epoch.resume_step))
                continue
            assignment = self._assignment(epoch, epoch.seats.index(agent_id), address, token, start)
            connection.tell(
                messages.Assigned(
                    resume_step=epoch.resume_step, assignment=assignment.model_dump(mode="json")
                )
            )

    def _keep_beginning(self, epoch: Epoch) -> None:
        repeated = self._goodput.begin(epoch.resume_step, time.monotonic())
        self._journal.begin(epoch)
        self._job.rows.begin(epoch.resume_step)
        again = f", {repeated} steps again" if repeated else ""
        self.note(f"epoch {epoch.number} begins at step {epoch.resume_step}{again}")

    def _assignment(
        self, epoch: Epoch, rank: int, address: str, token: str, start: str
    ) -> Assignment:
        return Assignment(
            epoch=epoch.number,
            rank=rank,
            world_size=epoch.world_size,
            config=self._job.config(epoch.world_size),
            layer_costs=self._job.layer_costs(epoch.world_size),
            coordinator=address,
            token=token,
            run=self._job.run,
            start=start,
            # None: nothing is held, not even what a run begins with.
            resume_step=epoch.resume_step if epoch.sources else None,
            checkpoint=epoch.from_checkpoint,
            sources={piece: list(keepers) for piece, keepers in epoch.sources.items()},
            digests=self._digests.resumed_at(epoch.resume_step),
            guards=list(epoch.guards[rank]),
            saves_when_stopped=self._settings.saves_when_stopped,
        )

    def _newest_kept(self) -> int:
        return int(self._journal.get("newest_step") or 0)

    def _open_epoch(self, epoch: Epoch, token: str) -> str:
        settings = self._settings
        if epoch.world_size == 1:
            return f"{settings.bind}:{self.port}"  # nobody dials it
        secured = settings.security
        security = Security(token, secured.cert, secured.key, secured.ca)
        self._epoch_server = self._listen(epoch, security)
        return f"{settings.bind}:{self._epoch_server.port}"

    def _listen(self, epoch: Epoch, security: Security) -> CoordinatorServer:
        """Raises `JoinError` where none of the ports is free."""
        settings = self._settings
        ports = settings.epoch_ports
        first = epoch.number % len(ports)
        refusal = None
        for port in (*ports[first:], *ports[:first]):
            try:
                return CoordinatorServer(
                    epoch.world_size,
                    bind=settings.bind,
                    port=port,
                    security=security,
                    heartbeat_s=settings.heartbeat_s,
                    join_s=settings.join_s,
                    on_upload=self._job.take_upload,
                    gate=self._tenancy.check,
                )
            except JoinError as error:
                refusal = error
        raise JoinError(f"no port is left for epoch {epoch.number}: {refusal}; give more ports")

    def close_epoch(self, reason: str) -> None:
        server = self._epoch_server
        self._epoch_server = None
        self._goodput.end(time.monotonic())
        if server is None:
            return
        server.abort(reason)
        closer = threading.Thread(target=self._close, args=([server],), name="closing an epoch")
        closer.start()
        self._closers = [other for other in self._closers if other.is_alive()]
        self._closers.append(closer)

    def _close(self, servers: list[CoordinatorServer]) -> None:
        """`servers` has one. It is a list because an argument is held until the thread ends."""
        servers.pop().close(0.0)
        # Reference cycles keep its connections, with their descriptors. A thread that is still in
        # one of its methods would keep it, too.
        self._stopped.wait(_RETURN_S)
        gc.collect()
        # What its threads have freed glibc keeps for other threads of this process.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def _tell(self, agent: str, message: ToAgent | None) -> None:
        connection = self._connections.get(agent)
        if connection is not None:
            connection.tell(message)

    def stop(self, agent: str, epoch: int, *, after_step: bool) -> None:
        self._tell(agent, messages.Stop(epoch=epoch, after_step=after_step))

    def retire(self, agent: str, epoch: int, before: int) -> None:
        self._tell(agent, messages.Retire(epoch=epoch, before=before))

    def ask(self, agent: str) -> None:
        self._tell(agent, messages.Ask())

    def release(self, agent: str) -> None:
        self._tell(agent, messages.Release())

    def hang_up(self, agent: str) -> None:
        connection = self._connections.pop(agent, None)
        if connection is not None:
            connection.tell(None)

    def finish(self, reason: str | None) -> None:
        if self.over.is_set():
            return
        self.failure = reason
        self._job.rows.fill(self._rendezvous.newest_step)
        self._journal.put("over", reason or "finished")
        self._tenancy.publish()
        self.note("the run has finished" if reason is None else f"the run has failed: {reason}")
        self.over.set()

    def keep_step(self, step: int) -> None:
        if step > self._newest_kept():
            self._goodput.reach(step, time.monotonic())
            self._journal.put("newest_step", str(step))

    def note(self, text: str) -> None:
        LOG.info("%s", text)
        self._journal.note(text)

    def checkpoint(self) -> int | None:
        return self._job.checkpoint()

    def fewer(self, num_agents: int) -> int | None:
        return self._job.fewer(num_agents)

    def pays(self, ranks: int, more: int, steps_left: int) -> bool:
        return self._job.pays(ranks, more, steps_left)

    # Inquiries

    def offer(self) -> messages.JobOffer:
        ranks = self._job.world_size
        config = self._job.config(ranks)
        costs = self._job.layer_costs(ranks)
        return messages.JobOffer(version=__version__, config=config, layer_costs=costs)

    def status(self, rows_from: int | None = None) -> dict[str, Any]:
        with self._lock:
            # With the lock: what was heard before it was got has come before now.
            now = time.monotonic()
            rendezvous = self._rendezvous
            rows: list[str] = []
            if rows_from is not None:
                rows = self._job.rows.since(rows_from)
            standing = standing_of(rendezvous, self._job.rows.newest, now)
            return {
                **standing,
                "run": self._job.run.folder,
                "servers": list(self._job.servers),
                "steps": self._job.num_steps,
                "wanted": self._job.world_size,
                "goodput": self._goodput.share,
                "lost_s": round(self._goodput.lost_s(now), 1),
                "run_s": round(self._goodput.run_s(now), 1),
                "events": self._journal.events(_EVENTS_SHOWN),
                "rows": rows,
            }

    def move_server(self, message: ServerMoved) -> ServersKnown:
        """The run's parameter server, or one of several, is at another address now."""
        self._tenancy.check()
        with self._lock:
            before = self._job.servers
            try:
                servers = moved(before, message)
                if servers != before:
                    self._job.move_servers(servers)
            except (ValueError, ConfigError) as error:
                return ServersKnown(addresses=list(before), refusal=str(error))
            if servers != before:
                self._journal.put("servers", json.dumps(servers))
                self._tenancy.publish()
                why = f"a parameter server has moved to {message.address}"
                self._rendezvous.renew(why, time.monotonic())
        return ServersKnown(addresses=list(servers))

    def let_go(self, request: messages.LeaveRequest) -> int:
        """Have the agents of that name leave; returns how many there are."""
        self._tenancy.check()
        with self._lock:
            named = [
                agent.id
                for agent in self._rendezvous.agents.values()
                if agent.enlistment.name == request.name
            ]
            for agent_id in named:
                self._rendezvous.leave(agent_id, request.within_s, time.monotonic())
        return len(named)


def _encode(message: ToAgent) -> bytes:
    return message.model_dump_json().encode()
