"""A parameter server by itself, which outlives epochs: killed, started again with what it had or
without, moved to another address.
"""

from typing import TYPE_CHECKING

from dpipe.paramserver.stage_server import Session, session_of

if TYPE_CHECKING:
    from simulated.cluster import SimulatedCluster

_AGAIN_S = 0.5


class SimulatedServer:
    def __init__(self, cluster: "SimulatedCluster") -> None:
        self.address = 0
        self.is_up = True
        self.told: dict[int, int] = {}  # by epoch, the address that its ranks call
        self.num_moves = 0
        self._cluster = cluster
        self._session: Session | None = None  # whose state it has

    def is_reached(self, epoch: int) -> bool:
        return self.is_up and self.told[epoch] == self.address

    def open(self, epoch: int) -> bool:
        """A rank brings what the epoch begins with; whether it is taken."""
        session = Session(session_of("run", epoch), 0)
        if self._session is not None and session.is_behind(self._session):
            return False
        self._session = session
        return True

    def has(self, epoch: int) -> bool:
        """Whether it has the state of that epoch."""
        return self._session == Session(session_of("run", epoch), 0)

    def kill(self) -> None:
        self.is_up = False
        self._cluster.note("the parameter server is killed")

    def start(self, *, has_folder: bool) -> None:
        """At the same address."""
        self._cluster.note(f"the parameter server starts, {has_folder=}")
        self.is_up = True
        if not has_folder:
            self._session = None

    def move(self) -> None:
        """A new one elsewhere, which says so to the coordinator until that has heard it."""
        self.num_moves += 1
        self.address = self.num_moves
        self.start(has_folder=False)
        self._announce(self.address)

    def _announce(self, address: int) -> None:
        head = self._cluster.head
        if address != self.address:
            return
        if head is None or not head.is_alive:
            self._cluster.clock.after(_AGAIN_S, self._announce, address)
        else:
            head.move_server(address)
