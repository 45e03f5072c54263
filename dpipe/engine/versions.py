"""A stage whose weights have two versions, so that a step may begin before the one ahead of it has
ended (PipeDream-2BW, Narayanan et al. 2021).

    step t      computes with the weights W(t - 1), which the step before left to it
    STEP t      W(t + 1) = W(t) - what the optimizer makes of the gradient of step t

    version 0   [W(0): step 0        ] COMPLETE 0, STEP 0 [W(1): step 2        ] ...
    version 1           [W(0): step 1               ] COMPLETE 1, STEP 1 [W(2): step 3 ] ...

Steps take turns with two copies of the layers. Optimizer, replicas and checkpoint see one set of
parameters, those of the newest version: COMPLETE lays them onto the copy that has just become free,
and hands over its gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from dpipe.schedule.schedule import Schedule
from dpipe.stage.base import PipelineStage, Tensors

_NEWEST = 1  # of the two, before the first step


def in_versions(make: Callable[[], PipelineStage], schedule: Schedule) -> PipelineStage:
    """The stage that `make` makes, in as many versions as `schedule` has of the weights."""
    stage = make()
    if schedule.num_versions == 1:
        return stage
    # Not a copy of the first: a layer may hold what cannot be copied.
    other = make()
    versions = (stage, other)
    return TwoVersions(versions, schedule.num_pieces)


class TwoVersions:
    """Looks like a `Stage`. `versions` are two of the same layers and values; micro-batches from
    `num_pieces` on are those of the next step.
    """

    split = None

    def __init__(self, versions: tuple[PipelineStage, PipelineStage], num_pieces: int) -> None:
        self._versions = versions
        self._num_pieces = num_pieces
        self._newest = _NEWEST
        self._first_step: int | None = None
        self._step = 0
        self._begun: set[int] = set()  # steps, of those that are now under way
        # What the optimizer steps: objects that stay, whose memory is that of the newest version.
        self._parameters: dict[int, list[tuple[str, nn.Parameter]]] = {}
        newest = versions[_NEWEST]
        for layer, named in newest.layer_parameters().items():
            self._parameters[layer] = []
            for name, working in named:
                learns = working.requires_grad
                parameter = nn.Parameter(working.data, requires_grad=learns)
                self._parameters[layer].append((name, parameter))

    def begin_step(self, step: int, loss_scale: float = 1.0) -> None:
        if self._first_step is None:
            self._first_step = step
        self._step = step
        for later in (step, step + 1):
            # Once: some of `step` may be done already.
            if later not in self._begun:
                self._version_of(later).begin_step(later, loss_scale)
        self._begun = {step, step + 1}

    def forward(
        self, microbatch: int, inputs: Tensors, targets: torch.Tensor | None = None
    ) -> Tensors:
        version = self._version_at(microbatch)
        number = self._number(microbatch)
        return version.forward(number, inputs, targets)

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        version = self._version_at(microbatch)
        number = self._number(microbatch)
        return version.backward(number, grads)

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        version = self._version_at(microbatch)
        number = self._number(microbatch)
        return version.backward_input(number, grads)

    def backward_weight(self, microbatch: int) -> None:
        version = self._version_at(microbatch)
        number = self._number(microbatch)
        version.backward_weight(number)

    @torch.no_grad()
    def complete(self) -> None:
        """No graph refers to this step's version any more: it becomes the newest."""
        version = self._version_of(self._step)
        version.complete()
        parameters = self.parameters()
        pairs = zip(parameters, version.parameters(), strict=True)
        for parameter, working in pairs:
            values = working.data
            values.copy_(parameter.data)
            parameter.data = values
            parameter.grad = working.grad
            working.grad = None
        self._newest = self._versions.index(version)

    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors:
        return self._versions[self._newest].evaluate(inputs, targets)

    @property
    def held(self) -> int:
        """Of the step that ends; what is held of the next one is not in the way of its end."""
        return self._version_of(self._step).held

    def clear(self) -> None:
        for version in self._versions:
            version.clear()
        self.zero_grad()

    def layer_parameters(self) -> Mapping[int, Sequence[tuple[str, nn.Parameter]]]:
        return self._parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for named in self._parameters.values():
            yield from named

    def parameters(self) -> Sequence[nn.Parameter]:
        parameters = []
        for _, parameter in self.named_parameters():
            parameters.append(parameter)
        return parameters

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The other version, which the next step computes with: a run that is resumed needs it."""
        other = self._versions[1 - self._newest]
        for name, working in other.named_parameters():
            yield f"{name}.before", working.data

    def buffers(self) -> Sequence[torch.Tensor]:
        buffers: list[torch.Tensor] = []
        for version in self._versions:
            buffers += version.buffers()
        return buffers

    def zero_grad(self) -> None:
        # The newest version has new values: one in half precision rounds them again before use.
        self._versions[self._newest].zero_grad()
        for parameter in self.parameters():
            parameter.grad = None

    def _version_at(self, microbatch: int) -> PipelineStage:
        """That a micro-batch computes with."""
        ahead = microbatch // self._num_pieces
        return self._version_of(self._step + ahead)

    def _number(self, microbatch: int) -> int:
        """Of a micro-batch in its own step."""
        return microbatch % self._num_pieces

    def _version_of(self, step: int) -> PipelineStage:
        # They take turns. The step before the first has left the newest one.
        first = self._first_step
        if first is None:
            first = step
        turn = step - first + _NEWEST
        return self._versions[turn % 2]
