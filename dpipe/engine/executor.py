"""Runs a rank's program: the one place where a schedule, stages and a transport meet.

    program:   ... 1RECV_F5  1F4  1SEND_F4  1RECV_B2  1B2 ...  1F5  1SEND_F5 ...
    receives   --[1RECV_F5]----------.                       --[1RECV_B5]--.
    compute    ----[1F4]-----[1B2]----`--wait--[1F5]--.  ...                `--wait--[1B5]--
    sends      ----------[1SEND_F4]--------------------`--[1SEND_F5]

A receive is posted where the program says and filed under its action. A compute action asks
`requires()` what it needs and waits for that alone. A send is queued and the host moves on. On a
GPU each row is a stream, which the host only fills (`streams.py`); at STEP it waits until all that
was waited for there has really come.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, assert_never

import torch

from dpipe.data.batch import Batch
from dpipe.dataparallel.single import Single
from dpipe.engine.recorder import Recorder
from dpipe.schedule.action import Action, Op
from dpipe.schedule.links import counterpart, peer
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.text import draw
from dpipe.streams import HOST, Mark, Streams
from dpipe.timeline.span import Lane
from dpipe.transport.base import Transport
from dpipe.wire.codec import Codec
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Pending

Tensors = tuple[torch.Tensor, ...]


class StageLike(Protocol):
    """What the executor asks of a stage: `stage.Stage` and `stage.ReplayStage` are the two."""

    @property
    def held(self) -> int: ...
    def forward(
        self, microbatch: int, inputs: Tensors, targets: torch.Tensor | None = None
    ) -> Tensors: ...
    def backward(self, microbatch: int, grads: Tensors) -> Tensors: ...
    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors: ...
    def backward_weight(self, microbatch: int) -> None: ...
    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors: ...
    def complete(self) -> None: ...
    def clear(self) -> None: ...


class Agreement(Protocol):
    """What the executor asks of `dataparallel.base.DataParallel`."""

    def start(self, stage: int) -> None: ...
    def wait(self) -> None: ...
    def finish(self, stage: int) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What an executor works with. `rank` is the place in the schedule, which the run's rank
    `row[rank]` has.

    `boundaries[s]` is what stage s gives to stage s + 1; `tied[s]` the weight that stage s shares
    with the stage at the other end of the model, `tied_here` both ends of it where both live here.
    """

    rank: int
    stages: Mapping[int, StageLike]
    transport: Transport
    codec: Codec
    boundaries: Sequence[tuple[TensorSpec, ...]]
    data_parallel: Agreement
    recorder: Recorder
    tied: Mapping[int, torch.nn.Parameter] = field(default_factory=dict)
    tied_here: tuple[torch.nn.Parameter, torch.nn.Parameter] | None = None
    row: Sequence[int] = ()  # default: places and ranks are the same
    streams: Streams = HOST

    def global_rank(self, place: int) -> int:
        return self.row[place] if self.row else place


class Executor:
    """Interprets one rank's program of any schedule over the same stages and links."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def run(
        self,
        schedule: Schedule,
        batch: Batch,
        on_step: Callable[[int, float | None], None] | None = None,
    ) -> float | None:
        """Run this rank's program once: training where `on_step` is given, evaluation where not.

        `on_step(stage, loss)` is called at each STEP. Until then nothing that must last has
        changed, so that a step which raised before can be run again after `clear()`. Returns the
        step's loss, the mean over its micro-batches added in their order, on the last stage's rank;
        None elsewhere.

        Raises what a stage or the transport raised, with the grid and the culprit marked as a note;
        the links are broken off before, so that the neighbours get `PeerLost` at once.
        """
        run = _Run(self._parts, schedule, batch, on_step)
        for action in schedule.programs[self._parts.rank]:
            try:
                run.do(action)
            except Exception as error:
                rank = self._parts.global_rank(self._parts.rank)
                error.add_note(
                    f"rank {rank} was at {action}:\n{draw(schedule, action, self._parts.row)}"
                )
                self._parts.transport.fail(error)
                raise
        run.finish()
        return run.loss()

    def alone(self) -> "Executor":
        """The same for a rank that agrees on nothing with other replicas."""
        return Executor(replace(self._parts, data_parallel=Single()))

    def clear(self) -> None:
        """Forget a step that was aborted: what the stages stashed and the gradients."""
        for stage in self._parts.stages.values():
            stage.clear()


class _Run:
    """One run of a program: what has been made and not consumed, and what is under way."""

    def __init__(
        self,
        parts: Parts,
        schedule: Schedule,
        batch: Batch,
        on_step: Callable[[int, float | None], None] | None,
    ) -> None:
        self._parts = parts
        self._schedule = schedule
        self._batch = batch
        self._on_step = on_step
        self._made: dict[Action, tuple[Tensors, Mark]] = {}
        self._arriving: dict[Action, list[Pending[torch.Tensor]]] = {}
        self._leaving: list[tuple[Action, Pending[None]]] = []
        self._landing: list[tuple[Action, Pending[torch.Tensor]]] = []
        self._due: deque[tuple[int, list[Pending[None]]]] = (
            deque()
        )  # stages to agree on, once these have left
        self._losses: list[torch.Tensor] = []
        self._loss: float | None = None
        self._tied_added = self._completed = False

    def do(self, action: Action) -> None:
        """Start or do one action of the program."""
        parts = self._parts
        stage = self._parts.stages[action.stage]
        parts.recorder.action = action
        match action.op:
            case Op.F:
                self._forward(action, stage)
            case Op.B:
                self._backward(action, stage.backward)
            case Op.I:
                self._backward(action, stage.backward_input)
            case Op.W:
                assert action.microbatch is not None
                with parts.recorder.span(Lane.COMPUTE, action):
                    stage.backward_weight(action.microbatch)
            case Op.SEND_F | Op.SEND_B:
                (source,) = self._schedule.requires(action)
                self._send(action, *self._made.pop(source), parts.codec.encode)
            case Op.RECV_F | Op.RECV_B:
                self._post(action, [parts.codec.wire_spec(spec) for spec in self._specs(action)])
            case Op.SEND_TIED:
                self._send(action, (_gradient(parts.tied[action.stage]),), parts.streams.mark())
            case Op.RECV_TIED:
                self._post(action, [TensorSpec.of(parts.tied[action.stage])])
            case Op.REDUCE_GRAD:
                stage.complete()
                self._exchange_tied(action)
                self._due.append((action.stage, [pending for _, pending in self._leaving]))
            case Op.STEP:
                self._step(action)
            case _:
                assert_never(action.op)
        self._agree(lambda pending: pending.done())

    def finish(self) -> None:
        """Wait until what was sent has left, so that an error of this step shows in this step."""
        self._settle()
        for action, pending in self._leaving:
            pending.settle()
            self._parts.recorder.moved(Lane.SEND, action, pending.moved)
        held = {index: stage.held for index, stage in self._parts.stages.items() if stage.held}
        assert not held, (
            f"rank {self._parts.rank} ends a step with micro-batches stashed, by stage: {held}"
        )

    def loss(self) -> float | None:
        """Once read it is known: on a GPU the host would wait for all that was queued since, the
        update too.
        """
        if self._loss is None and self._losses:
            values = torch.stack(self._losses).flatten().tolist()  # together, for one wait
            self._loss = sum(values) / len(values)
        return self._loss

    def _forward(self, action: Action, stage: StageLike) -> None:
        m = action.microbatch
        assert m is not None
        first = action.stage == 0
        last = self._schedule.is_last(action.stage)
        inputs = self._batch.inputs[m] if first else self._take(self._schedule.requires(action)[0])
        targets = self._batch.targets[m] if last and self._batch.targets else None
        self._parts.data_parallel.finish(action.stage)
        with self._parts.recorder.span(Lane.COMPUTE, action):
            outputs = (
                stage.forward(m, inputs, targets)
                if self._on_step
                else stage.evaluate(inputs, targets)
            )
        if last:
            self._losses += outputs
        else:
            self._made[action] = outputs, self._parts.streams.mark()

    def _backward(self, action: Action, backward: Callable[[int, Tensors], Tensors]) -> None:
        assert action.microbatch is not None
        grads = (
            ()
            if self._schedule.is_last(action.stage)
            else self._take(self._schedule.requires(action)[1])
        )
        with self._parts.recorder.span(Lane.COMPUTE, action):
            input_grads = backward(action.microbatch, grads)
        if action.stage > 0:
            self._made[action] = input_grads, self._parts.streams.mark()

    def _take(self, source: Action) -> Tensors:
        """What `source` made: here, or on another rank, then as soon as it has arrived."""
        if source in self._made:
            return self._made.pop(source)[0]
        wires = self._wait(source)
        return tuple(
            self._parts.codec.decode(w, spec)
            for w, spec in zip(wires, self._specs(source), strict=True)
        )

    def _wait(self, recv: Action) -> list[torch.Tensor]:
        pending = self._arriving.pop(recv)
        with self._parts.recorder.span(Lane.WAIT, recv):
            tensors = [p.wait() for p in pending]
        for p in pending:
            if p.done():
                self._parts.recorder.moved(Lane.RECV, recv, p.moved)
            else:
                self._landing.append((recv, p))
        return tensors

    def _settle(self) -> None:
        """Make sure that what compute was queued behind has come: on a GPU the host has run ahead
        of it.
        """
        for recv, pending in self._landing:
            pending.settle()
            self._parts.recorder.moved(Lane.RECV, recv, pending.moved)
        self._landing.clear()

    def _specs(self, recv: Action) -> tuple[TensorSpec, ...]:
        """The stage's input for RECV_F; for RECV_B the gradients of its output, one a
        floating-point tensor.
        """
        if recv.op is Op.RECV_F:
            return self._parts.boundaries[recv.stage - 1]
        return tuple(
            spec for spec in self._parts.boundaries[recv.stage] if spec.dtype.is_floating_point
        )

    def _send(
        self,
        action: Action,
        tensors: Tensors,
        made: Mark,
        encode: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """Queue `tensors`, complete at `made`, for the neighbour: encoded beside compute, not in
        its way.
        """
        parts = self._parts
        to = parts.global_rank(peer(self._schedule, action))
        with parts.streams.sending(made, tensors):
            wires = [encode(tensor) for tensor in tensors]
            self._leaving += [
                (action, parts.transport.send(wire, to, str(action))) for wire in wires
            ]
        parts.recorder.sent(to, sum(wire.nbytes for wire in wires))

    def _post(self, action: Action, specs: Sequence[TensorSpec]) -> None:
        tag = str(counterpart(action, self._schedule.num_stages))
        source = self._parts.global_rank(peer(self._schedule, action))
        self._arriving[action] = [self._parts.transport.recv(spec, source, tag) for spec in specs]

    def _exchange_tied(self, action: Action) -> None:
        """Add the gradients that both ends of the model have for the shared weight. Two terms: no
        order to keep.

        The sum is a new tensor, because the transport may still be reading the one that was sent.
        """
        receive = Action(action.stage, Op.RECV_TIED)
        if receive in self._arriving:
            weight = self._parts.tied[action.stage]
            weight.grad = _gradient(weight) + self._wait(receive)[0]
        elif (
            self._parts.tied_here
            and not self._tied_added
            and action.stage in (0, self._schedule.num_stages - 1)
        ):
            first, last = self._parts.tied_here
            first.grad = _gradient(first) + _gradient(last)
            last.grad = first.grad.clone()
            self._tied_added = True

    def _agree(self, may_wait_for: Callable[[Pending[None]], bool]) -> None:
        """Begin exchanges between replicas whose rank has sent what it had for the pipeline's
        neighbours before.

        Those wait for it, whereas the gradients are wanted at the end of the step; the link is
        shared by both.
        """
        while self._due and all(map(may_wait_for, self._due[0][1])):
            stage, before = self._due.popleft()
            for pending in before:
                pending.settle()
            self._parts.data_parallel.start(stage)

    def _step(self, action: Action) -> None:
        assert self._on_step is not None, "a schedule that steps needs on_step"
        reduce = Action(action.stage, Op.REDUCE_GRAD)
        self._complete()
        self._exchange_tied(action)
        self._settle()
        if reduce in self._schedule.index:
            with self._parts.recorder.span(Lane.WAIT, reduce):
                self._agree(lambda pending: True)
                self._parts.data_parallel.wait()
        with self._parts.recorder.span(Lane.UPDATE, action):
            self._on_step(action.stage, self.loss())

    def _complete(self) -> None:
        """Of all stages that have no exchange between replicas to do it: the first STEP measures
        every gradient.
        """
        if not self._completed:
            for index, stage in self._parts.stages.items():
                if Action(index, Op.REDUCE_GRAD) not in self._schedule.index:
                    stage.complete()
            self._completed = True


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    assert weight.grad is not None, "a tied weight has no gradient at the end of the step"
    return weight.grad
