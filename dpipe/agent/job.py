"""`ElasticJob`: what the server asks of the job that it finds machines for."""

from typing import Any, Protocol

from dpipe.agent.rows import RunRows
from dpipe.epoch.assignment import AssignedRun


class ElasticJob(Protocol):
    """The job that is trained, as far as the server asks."""

    run: AssignedRun
    num_pieces: int
    group_size: int  # ranks that must be on one machine
    world_size: int
    num_steps: int
    rows: RunRows
    servers: tuple[str, ...]  # that are processes by themselves

    def move_servers(self, addresses: tuple[str, ...]) -> None:
        """They are there now; the configuration of later epochs says so."""

    def config(self, ranks: int) -> dict[str, dict[str, Any]]:
        """As an epoch of so many ranks runs it."""

    def layer_costs(self, ranks: int) -> str:
        """Of that configuration, as `plan.launcher_costs` writes them."""

    def pieces(self, ranks: int) -> list[list[int]]:
        """By rank, those of the state that it trains (`keeper.pieces`)."""

    def memory_bytes(self, ranks: int) -> int:
        """What a rank holds at most."""

    def fewer(self, num_agents: int) -> int | None:
        """See `Agents.fewer`."""

    def pays(self, ranks: int, more: int, steps_left: int) -> bool:
        """See `Agents.pays`."""

    def checkpoint(self) -> int | None:
        """See `Agents.checkpoint`."""

    def take_upload(self, rank: int, kind: str, payload: bytes) -> None:
        """Keep what a rank uploads."""
