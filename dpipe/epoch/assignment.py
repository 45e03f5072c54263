"""What a process is told for one epoch of a run."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from dpipe.wire.schema import Count, Schema, Sha256, Shape, Text

Address = Annotated[str, Field(max_length=300, pattern=r"^[^\s]+:[0-9]{1,5}$")]
LayerCosts = Annotated[str, Field(max_length=1 << 20)]  # probe/launcher_costs.py
Hex = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class AssignedRun(Shape):
    """`store.identity.RunIdentity` of the run's folder, which the coordinator has."""

    id: Hex
    folder: Text
    host: Text


class Assignment(Shape):
    """One rank of one epoch. "Before step n" means that n steps are done, as in checkpoints."""

    epoch: Count
    rank: Count
    world_size: Annotated[int, Field(ge=1, le=1 << 16)]
    config: dict[str, dict[str, Any]]  # the job as this epoch runs it, without [node]
    layer_costs: LayerCosts = ""  # of it, as the coordinator has counted them
    coordinator: Address  # of this epoch
    token: Annotated[str, Field(min_length=1, max_length=1000)]  # of its links
    run: AssignedRun
    start: Hex  # new each epoch: who writes checkpoints with an earlier one is refused
    resume_step: Count | None = None  # before which the keepers hold every piece
    checkpoint: bool = False  # with resume_step None: from the newest checkpoint
    sources: dict[int, list[Address]] = Field(default_factory=dict)  # by piece, who holds it
    # By piece, what whoever trained it says that its copy is; one of none is believed
    digests: dict[int, list[Sha256]] = Field(default_factory=dict)
    guards: list[Address] = Field(default_factory=list)  # where this rank sends its copies
    saves_when_stopped: bool = False  # where all reach the checkpoints

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if self.checkpoint and self.resume_step is not None:
            raise ValueError("an epoch goes on from copies or from a checkpoint, not from both")
        return self


ASSIGNMENT = Schema[Assignment](Assignment)
