"""The contract of a kind of data parallelism: it keeps the replicas of a rank's stages equal.

What each kind does when. "mean" is the gradient's mean over replicas, here at the end of `wait`;
|..|^2 is a squared norm, for clipping. "back": `finish` waits for the parameters.

                   start(s)        report                 step(s, factor)                  finish(s)
    single         -               |gradient|^2           step                             -
    all-reduce     average, in     |mean|^2               step all of it                   -
                   the background
    sharded        reduce-scatter  |shard of the mean|^2  step the own shard, then         back
                                                          all-gather
    parameter      push            |mean|^2, from the     commit; pull                     back
    server                         server
    local SGD      -               |gradient|^2 of this   step; every H steps the outer    back
                                   replica                step begins

`report` goes into the vote of all ranks on the step (`engine/update.py`), whose result is the
`factor`. With a step's delay (all-reduce, sharded) the mean is that of the step before, and from
`begin` to `step` the parameters are a step ahead by this replica's own gradient (`ahead.py`);
between steps they are the agreed ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dpipe.wire.transfer import Moved

NamedParameter = tuple[str, torch.nn.Parameter]
Moments = Mapping[str, torch.Tensor]


class Layers(Protocol):
    """What is asked of a stage."""

    def layer_parameters(self) -> Mapping[int, Sequence[NamedParameter]]:
        """Parameters by layer, in order, with names such as `layers.3.qkv.weight`, which hold for
        the whole model.
        """


@dataclass(frozen=True)
class Report:
    """What a rank says of the gradient of its stages."""

    # by layer: this rank's part of the squared norm of the gradient that the step will take,
    # without the loss scale. The parts of all ranks add up (see `DataParallel.independent`)
    squares: Mapping[int, float] = field(default_factory=dict)
    # a parameter whose gradient on this rank is not finite, before any exchange
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
    """Keeps the replicas of this rank's stages equal, and holds their optimizer. Used by one
    thread, but for `fail`.

    One step, on a rank with stages 0 and 1:

        begin()
        ... 1F0 1B0 ...   1REDUCE_GRAD    start(1)           the exchange runs beside what follows
        ... 0F0 0B0 ...   0REDUCE_GRAD    start(0)
                          0AGREE          wait()
                          0VOTE           report()
                          0STEP           step(0, factor)    the factor is what the vote came to
                          1STEP           step(1, factor)
        next 0F0                          finish(0)          before the first use of its parameters
        next 1F0                          finish(1)

    What goes wrong in the background is raised by the next call that waits, and fails the links so
    that nobody else waits in vain. Until `step` nothing that must last has changed.
    """

    @property
    def independent(self) -> bool:
        """Whether each replica steps by a gradient of its own: then the norm is over its own ranks
        alone.
        """

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        """A step begins. The gradients of its stages will be multiplied by `loss_scale`; norms and
        state are without it.
        """

    def start(self, stage: int) -> None:
        """The gradients of `stage` are final (REDUCE_GRAD): begin to exchange them. Never blocks
        for long.
        """

    def wait(self) -> None:
        """Block until `report` can answer; called once all stages have started."""

    def report(self, *, measure: bool) -> Report:
        """For this rank's vote; `squares` only where `measure`."""

    def leave_out(self, replicas: Collection[int]) -> None:
        """Between two reports: exchange this step's gradients again, for the mean without those of
        `replicas`, as `wait` ends with it. All replicas call it, those left out too, which take the
        same step. Of kinds that declare `leaves_out`.
        """
        return

    def step(self, stage: int, factor: float | None) -> bool:
        """Step by the mean gradient times `factor`, or drop it where that is None; whether
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

    def whole_state(self) -> dict[str, torch.Tensor]:
        """What `restore` takes, of a kind that declares `same_state`: this replica needs no other's
        part.
        """
        return self.state()

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
