"""What the builder of a kind is given: one rank's stages, its place among the replicas, and what
the configuration says.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dpipe.dataparallel.base import Layers
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.torch_group import TorchGroup
from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.wire.feedback import wire
from dpipe.wire.transfer import Links


class Options(Protocol):
    """The keys of `[data_parallel]` that builders read."""

    @property
    def wire(self) -> str: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def group(self) -> str: ...
    @property
    def delay(self) -> bool: ...
    @property
    def reject(self) -> str | None: ...
    @property
    def staleness(self) -> int: ...
    @property
    def known_inner_steps(self) -> int: ...
    @property
    def outer_learning_rate(self) -> float: ...
    @property
    def outer_momentum(self) -> float: ...
    @property
    def fragments(self) -> int: ...
    @property
    def overlap(self) -> bool: ...


@dataclass(frozen=True)
class ReplicaSetup:
    """`open_torch_group` makes the group of `group = "torch"`; all replicas call it, or none."""

    stages: Mapping[int, Layers]  # of this rank
    settings: OptimizerSettings  # of the optimizer
    learns: bool  # false where stages are replayed: bytes move, and no rank steps
    options: Options
    replica: int  # this rank's index in `ranks`
    ranks: Sequence[int]  # those that hold the same stages, one of each replica
    links: Links
    open_torch_group: Callable[[], TorchGroup]
    # whether clipping or a loss scale decides on each step's gradient before it is used
    waits_for_verdict: bool
    message_bytes: int  # the size of a message to a server
    # parameters that another rank counts in the norm of the gradient
    uncounted: Collection[str] = ()
    tied: Collection[str] = ()  # copies of a shared weight
    # where replicas are cut differently, `stages` are segments, each with ranks of its own
    ranks_by_stage: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def optimizer(self) -> OptimizerSettings | None:
        """What this rank steps by, if it does."""
        return self.settings if self.learns else None

    def exchange(self, wire_name: str) -> DirectExchange:
        """A new exchange among the replicas, whose wire owes nothing yet."""
        return DirectExchange(
            self.links,
            self.replica,
            self.ranks,
            wire(wire_name),
            part_bytes=self.options.chunk_bytes,
            by_stage=self.ranks_by_stage,
        )
