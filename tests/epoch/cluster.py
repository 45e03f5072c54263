"""A run whose ranks are threads of this process, each with a keeper that outlives epochs."""

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpipe.config.load import Config
from dpipe.config.run import NodeConfig
from dpipe.coordinator.server import CoordinatorServer
from dpipe.epoch.assignment import ASSIGNMENT, Assignment
from dpipe.epoch.control import EpochControl
from dpipe.epoch.epoch import EpochEnd, run_epoch
from dpipe.epoch.pieces import pieces_of
from dpipe.keeper.keeper import Keeper
from dpipe.wire.rpc import Security

RUN = {"id": "0123456789abcdef", "folder": "run", "host": "here"}
END_S = 60.0
HEARS_S = 1.0


@dataclass
class Epoch:
    """One under way. What its ranks did is in `ends` once `join` has returned."""

    server: CoordinatorServer
    controls: list[EpochControl]
    threads: list[threading.Thread] = field(default_factory=list)
    ends: dict[int, EpochEnd] = field(default_factory=dict)
    raised: list[BaseException] = field(default_factory=list)

    def join(self) -> list[EpochEnd]:
        for thread in self.threads:
            thread.join(END_S)
            assert not thread.is_alive(), f"{thread.name} has not ended"
        self.server.close(wait_s=0)
        for error in self.raised:
            raise error
        return [self.ends[rank] for rank in sorted(self.ends)]

    def abort(self, reason: str = "a machine is gone") -> None:
        """Each machine hears it by a thread of its own: one that drops a torch group waits until
        the others have.
        """
        hearing = [
            threading.Thread(target=control.abort, args=(reason,), daemon=True)
            for control in self.controls
        ]
        for thread in hearing:
            thread.start()
        for thread in hearing:
            thread.join(HEARS_S)


class Cluster:
    """Agents that take seats in one epoch after another; the test is their coordinator."""

    def __init__(self, config: Config, num_agents: int) -> None:
        self.config = config
        self.keepers = [Keeper(security=Security("run")) for _ in range(num_agents)]
        self.rows: list[dict[str, Any]] = []
        self.num_epochs = 0
        self.on_step: Callable[[int, int], None] = lambda agent, next_step: None

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.close()

    @property
    def losses(self) -> dict[int, float]:
        """By step; of one that was repeated the last."""
        return {row["step"]: row["loss"] for row in self.rows if "loss" in row}

    def newest_held(self) -> int | None:
        """The newest step before which somebody holds every piece."""
        pieces: dict[int, set[int]] = {}
        for keeper in self.keepers:
            for step, held in keeper.held().items():
                pieces.setdefault(step, set()).update(held)
        # The embedding and the head are layers too.
        num_layers = self.config.model.num_layers + 2
        num_pieces = num_layers * pieces_of(self.config).num_parts
        whole = [step for step, held in pieces.items() if len(held) == num_pieces]
        return max(whole, default=None)

    def begin(
        self,
        agents: Sequence[int],
        *,
        absent: Sequence[int] = (),
        prepare: Callable[[EpochControl], None] = lambda control: None,
        **changes: Any,
    ) -> Epoch:
        """The agents take the seats of the next epoch, in order of ranks, and go on from the newest
        step that is held. Those at the seats `absent` never come.
        """
        self.num_epochs += 1
        step = self.newest_held()
        world_size = len(agents)
        server = CoordinatorServer(
            world_size,
            security=Security("epoch"),
            heartbeat_s=self.config.timeouts.heartbeat,
            join_s=self.config.timeouts.join,
        )
        epoch = Epoch(server, [EpochControl() for _ in agents])
        for control in epoch.controls:
            prepare(control)
        config = changes.pop("config", self.config)
        fields: dict[str, Any] = {
            "epoch": self.num_epochs,
            "world_size": world_size,
            "config": config.model_dump(mode="json", exclude={"node"}),
            "coordinator": f"127.0.0.1:{server.port}",
            "token": "epoch",
            "run": RUN,
            "start": secrets.token_hex(8),
            "resume_step": step,
            "sources": {} if step is None else self._sources(step),
            **changes,
        }
        for rank, agent in enumerate(agents):
            if rank in absent:
                continue
            guard = self.keepers[agents[(rank + 1) % world_size]].address
            guards = [guard] if world_size > 1 else []
            assignment = Assignment(**{"rank": rank, "guards": guards, **fields})
            # As it comes over a wire.
            assignment = ASSIGNMENT.read(assignment.model_dump_json().encode())
            thread = threading.Thread(
                target=self._run, args=(epoch, agent, assignment), name=f"agent {agent}"
            )
            epoch.threads.append(thread)
        for thread in epoch.threads:
            thread.start()
        return epoch

    def _sources(self, step: int) -> dict[int, list[str]]:
        sources: dict[int, list[str]] = {}
        for keeper in self.keepers:
            for piece in keeper.held().get(step, ()):
                sources.setdefault(piece, []).append(keeper.address)
        return sources

    def _run(self, epoch: Epoch, agent: int, assignment: Assignment) -> None:
        try:
            epoch.ends[assignment.rank] = run_epoch(
                assignment,
                self.keepers[agent],
                node=NodeConfig(),
                control=epoch.controls[assignment.rank],
                committed=lambda next_step, loss: self.on_step(agent, next_step),
                on_row=self.rows.append,
            )
        except BaseException as error:
            epoch.raised.append(error)
