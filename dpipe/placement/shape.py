"""All that a plan decides, but for which machine holds which layers."""

from dataclasses import dataclass
from functools import cached_property

from dpipe.schedule.generate import ONE_F_ONE_B, may_split_backward


@dataclass(frozen=True)
class PlanShape:
    stages: int
    replicas: int
    tensor_parallel: int
    num_microbatches: int
    recompute: str
    kind: str  # of data parallelism
    exchange_wire: str  # between replicas
    forward_wires: tuple[str, ...]  # by hop
    backward_wires: tuple[str, ...]
    schedule: str
    in_flight: int | None = None  # of the schedule, where the job states it

    @property
    def num_seats(self) -> int:
        """A seat is where one stage of one replica is held."""
        return self.stages * self.replicas

    @property
    def splits(self) -> bool:
        """Whether the schedule may make input and weight gradients apart."""
        return may_split_backward(self.schedule)

    @cached_property
    def depths(self) -> tuple[int, ...] | None:
        """Micro-batches that the schedule itself has under way, by stage; None: as many as fit."""
        if self.schedule != ONE_F_ONE_B.name:
            return None
        deepest = self.in_flight or self.stages
        return tuple(max(1, deepest - stage) for stage in range(self.stages))
