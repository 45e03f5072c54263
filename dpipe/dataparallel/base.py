"""The contract of keeping the replicas of a rank's stages in agreement, and what it asks of the
rooms beside it.

What each kind does when. "average" is the gradient's mean over replicas; |..|^2 its squared norm, for clipping.

                    begin    start(s)           wait      report        step(s, factor)           finish(s)
    single          -        -                  -         |gradient|^2  AdamW                     -
    all-reduce      -        average, in        average   |average|^2   AdamW on all of it        -
                             the background     is here
    sharded         -        reduce-scatter     shard     |shard|^2     AdamW on the own shard,   parameters
                                                is here                 then all-gather           are here
    parameter       step,    push               norms     |average|^2   commit; pull              parameters
    server          rate                        are here  by server                               are here
    local SGD       -        -                  -         |gradient|^2  AdamW; each H steps the   parameters
                                                of this   of replica    outer step begins         are here
                                                replica

`report` goes into the ballot that all ranks cast (`engine/update.py`); the verdict on it is the
`factor`. With a step's delay (all-reduce, sharded) the gradient that has come is that of the step
before, and from `begin` to `step` parameters are where this replica's own gradient leads
(`ahead.py`); between steps they are what all agree on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dpipe.wire.transfer import Moved

NamedParameter = tuple[str, torch.nn.Parameter]
Moments = Mapping[str, torch.Tensor]


class Layers(Protocol):
    """What is asked of a stage."""

    def layer_parameters(self) -> Mapping[int, Sequence[NamedParameter]]:
        """Parameters by layer, in order, by names that hold for the whole model."""


@dataclass(frozen=True)
class Report:
    """What a rank says of the gradient of its stages.

    `squares[layer]` is its part of the squared norm of the gradient that the step will take, loss
    scale taken out: the parts of all ranks add up (see `DataParallel.independent`). `bad` names a
    parameter whose gradient is not finite on this rank alone, before any exchange; None where all
    are.
    """

    squares: Mapping[int, float] = field(default_factory=dict)
    bad: str | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """One message of an exchange for `stage`, to `peer` or `received` from it: a rank, or the
    parameter server.
    """

    stage: int
    peer: int | str
    moved: Moved
    received: bool = False


class DataParallel(Protocol):
    """Keeps the replicas of this rank's stages in agreement, and holds their optimizer. Used by one
    thread.

    One step, on a rank with stages 0 and 1:

        begin
        ... 1F0 1B0 ...  1REDUCE_GRAD    start(1)            the exchange runs beside what follows
        ... 0F0 0B0 ...  0REDUCE_GRAD    start(0)
                         0AGREE          wait()
                         0VOTE           report() ... verdict
                         0STEP           step(0, factor)
                         1STEP           step(1, factor)
        next 0F0                         finish(0)           before the first use of its parameters
        next 1F0                         finish(1)

    What goes wrong in the background is raised by the next call that waits, and fails the links so
    that nobody else waits in vain. Until `step` nothing that must last has changed.
    """

    @property
    def independent(self) -> bool:
        """Whether each replica steps by a gradient of its own: then the norm is over its own ranks
        alone.
        """

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        """A step begins. Gradients will be multiplied by `loss_scale`; what this object gives on is
        without it.
        """

    def start(self, stage: int) -> None:
        """The gradients of `stage` are final (REDUCE_GRAD): begin to exchange them. Never blocks
        for long.
        """

    def wait(self) -> None:
        """Block until `report` can answer; called once all stages have started."""

    def report(self, *, measure: bool) -> Report:
        """For this rank's ballot; `squares` only where `measure`."""

    def step(self, stage: int, factor: float | None) -> bool:
        """Step by the agreed gradient times `factor`, or forget it where that is None; whether
        parameters change.
        """

    def finish(self, stage: int) -> None:
        """Block until the parameters of `stage` are those after the last step."""

    def traffic(self) -> list[Traffic]:
        """The messages that were sent since the last call."""

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank keeps in a checkpoint, by layer-global names such as
        `layers.3.qkv.weight.exp_avg`.

        A part of a parameter is named with its range in the flattened whole, `....exp_avg[0:512]`;
        the checkpoint puts parts together, so that any number of replicas and any cut can go on
        from it.
        """

    def restore(self, num_updates: int, moments: Moments) -> None:
        """Go on after `num_updates` updates; `moments` holds whole tensors, of any shape with the
        right size.
        """

    @property
    def optimizer_bytes(self) -> int:
        """Memory that the optimizer's state takes on this rank."""

    def leave(self) -> None:
        """After the last step, where the run ended well: nobody need wait for this rank."""
        return

    def fail(self, error: Exception) -> None:
        """The run is over elsewhere: who waits here raises `error`. Called from another thread.

        Links among the replicas are failed by whoever opened them.
        """
        return

    def close(self) -> None:
        """End threads. The links are closed by whoever opened them, before."""
