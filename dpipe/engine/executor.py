"""Runs a rank's program: the one place where a schedule, stages and a transport meet.

    program:   ... 1RECV_F5  1F4  1SEND_F4  1RECV_B2  1B2 ...  1F5  1SEND_F5 ...
    receives   --[1RECV_F5]----------.                       --[1RECV_B5]--.
    compute    ----[1F4]-----[1B2]----`--wait--[1F5]--.  ...                `--wait--[1B5]--
    sends      ----------[1SEND_F4]--------------------`--[1SEND_F5]

A receive is posted where the program says and filed under its action. A compute action asks
`requires()` what it needs and waits for that alone. A send is queued and the host moves on. On a
GPU each row is a stream, which the host only fills (`streams.py`); at the end of the program it
waits until all that was waited for there has really come.

The program is run up to its VOTE. The caller has a `StepResult` then, in which nothing that must
last has changed, and does VOTE and STEP itself (`engine/trainer.py`), or runs the step again.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import assert_never

import torch

from dpipe.data.batch import Batch
from dpipe.dataparallel.base import DataParallel
from dpipe.dataparallel.single import Single
from dpipe.engine.hop_codecs import HopCodecs
from dpipe.engine.recorder import Recorder
from dpipe.passes.slices import slice_of, slice_spec
from dpipe.schedule.action import RECVS, Action, Op
from dpipe.schedule.links import counterpart, peer
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.text import draw
from dpipe.stage.base import ComputingStage, Tensors
from dpipe.streams import HOST, Mark, Streams
from dpipe.timeline.span import Lane, Span
from dpipe.transport.base import Transport
from dpipe.wire.codec import AsIs, Codec
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Pending

Send = Pending[None]
Receive = Pending[torch.Tensor]
_AS_IT_IS = AsIs()


@dataclass(frozen=True)
class Parts:
    """What an executor works with. The schedule's ranks are those of the pipeline: `pp_rank` is
    this one's, and `pp_group[i]` the run's rank of pipeline rank i (default: the same).
    """

    pp_rank: int
    stages: Mapping[int, ComputingStage]  # those of this rank, by stage
    transport: Transport
    codecs: HopCodecs  # what tensors are on the wire between stages
    # [s]: what stage s gives to stage s + 1, of a whole micro-batch
    boundaries: Sequence[tuple[TensorSpec, ...]]
    data_parallel: DataParallel  # exchanges gradients with the other replicas
    recorder: Recorder  # notes when each action begins and ends
    # [s]: the weight that stage s shares with the other end of the model
    tied: Mapping[int, torch.nn.Parameter] = field(default_factory=dict)
    # both ends of it, first and last, where both live here
    tied_here: tuple[torch.nn.Parameter, torch.nn.Parameter] | None = None
    pp_group: Sequence[int] = ()
    streams: Streams = HOST  # of the device: receive, compute, send
    check: Callable[[], None] = lambda: None  # before each action; raises once the run is over

    def global_rank(self, pp_rank: int) -> int:
        return self.pp_group[pp_rank] if self.pp_group else pp_rank


@dataclass(frozen=True)
class StepResult:
    """What one rank has of a step that it has computed, ahead of its VOTE, or of an evaluation."""

    loss: float | None  # the mean over the micro-batches, on the last stage's rank; None elsewhere
    spans: tuple[Span, ...]  # of this step so far, on this process's clock
    sent_bytes: Mapping[int, int]  # queued for each of the run's ranks
    accuracy: float | None = None  # as `loss`, of an evaluation that measures it


class Executor:
    """Interprets one rank's program of any schedule over the same stages and links."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ahead = _Ahead()
        # By schedule: one to train, one to evaluate, and what opens or closes steps that overlap.
        self._routes: deque[tuple[Schedule, _Routes]] = deque(maxlen=4)

    def run(
        self,
        schedule: Schedule,
        batch: Batch,
        next_batch: Batch | None = None,
    ) -> StepResult:
        """Run this rank's program up to VOTE; one without backward evaluates. A program that runs
        ahead computes with the `next_batch` too, and what it has of that goes into the next one.

        Nothing that must last has changed then: after `clear()` the step can be run again, also one
        that raised. All that was sent has left, so that an error of this step shows in this step.
        Raises as `doing` does.
        """
        batches = [batch]
        if next_batch is not None:
            batches.append(next_batch)
        begun = _Ahead()
        # An evaluation leaves a step that has been begun as it is.
        if schedule.trains:
            begun = self._ahead
        run = _Run(self._parts, schedule, self._routes_of(schedule), batches, begun)
        program = schedule.programs[self._parts.pp_rank]
        recorder = self._parts.recorder
        # One `try` around all: a program has dozens of actions, and most only start something.
        try:
            for action in program:
                recorder.action = action
                self._parts.check()
                run.do(action)
        except Exception as error:
            self._blame(error, recorder.action, schedule)
            raise
        run.finish()
        if schedule.trains:
            self._ahead = run.ahead()
        loss, accuracy = run.means()
        spans = self._parts.recorder.take()
        return StepResult(loss, spans, run.sent_bytes, accuracy)

    def _routes_of(self, schedule: Schedule) -> "_Routes":
        for known, routes in self._routes:
            if known is schedule:
                return routes
        routes = _Routes(self._parts, schedule)
        self._routes.append((schedule, routes))
        return routes

    @contextmanager
    def doing(self, action: Action, schedule: Schedule) -> Iterator[None]:
        """What runs inside is done for `action`.

        Raises what it raised, with the grid and the culprit marked as a note; the links are broken
        off before, so that the neighbours get `PeerLost` at once.
        """
        self._parts.recorder.action = action
        try:
            yield
        except Exception as error:
            self._blame(error, action, schedule)
            raise

    def _blame(self, error: Exception, action: Action | None, schedule: Schedule) -> None:
        assert action is not None
        parts = self._parts
        rank = parts.global_rank(parts.pp_rank)
        grid = draw(schedule, action, parts.pp_group)
        error.add_note(f"rank {rank} was at {action}:\n{grid}")
        # Before the error goes up: the neighbours are waiting for this rank's next message.
        parts.transport.fail(error)

    def alone(self) -> "Executor":
        """The same for a rank that agrees on nothing with others: with replicas, or with the other
        end of a link on what it has sent before.
        """
        codecs = self._parts.codecs.without_memory()
        return Executor(replace(self._parts, data_parallel=Single(), codecs=codecs))

    def clear(self) -> None:
        """Forget a step that was aborted: what the stages hold for backward, and the gradients."""
        self._ahead = _Ahead()
        for stage in self._parts.stages.values():
            stage.clear()


@dataclass(frozen=True)
class _Arriving:
    """A tensor on its way here, and how it is decoded."""

    pending: Receive
    codec: Codec
    like: TensorSpec


@dataclass(frozen=True)
class _Ahead:
    """What a program has of the next step, by the actions of that step."""

    # Outputs by the action that made them; each is taken once, so that its memory goes with its
    # use.
    made: dict[Action, tuple[Tensors, Mark]] = field(default_factory=dict)
    arriving: dict[Action, list[_Arriving]] = field(default_factory=dict)
    measured: list[torch.Tensor] = field(default_factory=list)  # [loss], or [loss, accuracy]


class _Routes:
    """What is the same of an action in every step: worked out once."""

    def __init__(self, parts: Parts, schedule: Schedule) -> None:
        self.requires = cache(schedule.requires)
        self.peer = cache(partial(_peer, parts, schedule))
        self.tag = cache(partial(_tag, schedule))
        self.specs = cache(partial(_specs, parts, schedule))


def _peer(parts: Parts, schedule: Schedule, action: Action) -> int:
    """The run's rank at the other end of a message."""
    return parts.global_rank(peer(schedule, action))


def _tag(schedule: Schedule, action: Action) -> str:
    """The name of a message: that of its send, as its own step numbers it, since the two ends may
    be at different steps. Both ends check it, so that a message of another action is found out.
    """
    send = action
    if action.op in RECVS:
        send = counterpart(action, schedule.num_stages)
    own, _ = schedule.in_its_step(send)
    return str(own)


def _specs(parts: Parts, schedule: Schedule, recv: Action) -> tuple[TensorSpec, ...]:
    """What arrives, decoded: the stage's input for RECV_F, and for RECV_B the gradients of its
    output, one a floating-point tensor.
    """
    if recv.op is Op.RECV_F:
        specs = parts.boundaries[recv.stage - 1]
    else:
        outputs = parts.boundaries[recv.stage]
        specs = tuple(spec for spec in outputs if spec.dtype.is_floating_point)
    if schedule.num_slices == 1:
        return specs
    return tuple(slice_spec(spec, schedule.num_slices) for spec in specs)


class _Run:
    """One run of a program: outputs that nobody has taken yet, and messages under way."""

    def __init__(
        self,
        parts: Parts,
        schedule: Schedule,
        routes: _Routes,
        batches: Sequence[Batch],
        begun: _Ahead,
    ) -> None:
        self.sent_bytes: Counter[int] = Counter()
        self._parts = parts
        self._schedule = schedule
        self._routes = routes
        self._batches = batches  # of this step and, where the program runs ahead, of the next
        self._codecs = parts.codecs
        if not schedule.trains:
            self._codecs = parts.codecs.for_evaluation()
        self._made = begun.made
        self._arriving = begun.arriving
        # Kept until the end of the program: a `Pending` holds the buffers that are being sent.
        self._leaving: list[tuple[Action, Send]] = []
        # On a GPU the host runs ahead of what compute waits for.
        self._landing: list[tuple[Action, Receive]] = []
        # Stages whose replicas may exchange gradients once these messages have left.
        self._due: deque[tuple[int, list[Send]]] = deque()
        # By step, this one and the next, then by micro-batch.
        self._measured: tuple[list[torch.Tensor], ...] = (begun.measured, [])

    def do(self, action: Action) -> None:
        """Start or do one action of the program."""
        stage = self._parts.stages[action.stage]
        match action.op:
            case Op.F:
                self._forward(action, stage)
            case Op.B:
                self._backward(action, stage.backward)
            case Op.I:
                self._backward(action, stage.backward_input)
            case Op.W:
                self._backward_weight(action, stage)
            case Op.SEND_F | Op.SEND_B:
                self._send_made(action)
            case Op.SEND_TIED:
                self._send_tied(action)
            case Op.RECV_F | Op.RECV_B | Op.RECV_TIED:
                self._post(action)
            case Op.COMPLETE:
                stage.complete()
                self._add_tied(action.stage)
            case Op.REDUCE_GRAD:
                before = [pending for _, pending in self._leaving]
                self._due.append((action.stage, before))
            case Op.AGREE:
                self._agree(action)
            case Op.VOTE | Op.STEP:
                pass  # the caller does them: they change what lasts
            case _:
                assert_never(action.op)
        if self._due:
            self._start_exchanges(lambda pending: pending.done())

    def finish(self) -> None:
        """Wait until all messages have come and left."""
        self._settle()
        for action, pending in self._leaving:
            pending.settle()
            self._parts.recorder.moved(Lane.SEND, action, pending.moved)
        stages = self._parts.stages
        held = {index: stage.held for index, stage in stages.items()}
        rank = self._parts.pp_rank
        assert not any(held.values()), f"rank {rank} still holds micro-batches, by stage: {held}"

    def means(self) -> tuple[float | None, float | None]:
        """Loss and accuracy over the micro-batches; None for what was not measured here."""
        measured = self._measured[0]
        if not measured:
            return None, None
        # Together: on a GPU the host waits once.
        columns: list[list[float]] = torch.stack(measured, dim=1).tolist()
        means: list[float | None] = [sum(column) / len(column) for column in columns]
        loss, accuracy = [*means, None][:2]
        return loss, accuracy

    def ahead(self) -> _Ahead:
        """What is left is of the next step."""
        ahead = _Ahead()
        in_its_step = self._schedule.in_its_step
        for action, made in self._made.items():
            own, _ = in_its_step(action)
            ahead.made[own] = made
        for action, arriving in self._arriving.items():
            own, _ = in_its_step(action)
            ahead.arriving[own] = arriving
        ahead.measured.extend(self._measured[1])
        return ahead

    def _forward(self, action: Action, stage: ComputingStage) -> None:
        m = action.microbatch
        assert m is not None
        last = self._schedule.is_last(action.stage)
        own, ahead = self._schedule.in_its_step(action)
        assert own.microbatch is not None
        batch = self._batches[ahead]
        if action.stage == 0:
            inputs = self._inputs(batch, own.microbatch)
        else:
            source = self._routes.requires(action)[0]
            inputs = self._take(source)
        targets = None
        if last and batch.targets:
            targets = self._targets(batch, own.microbatch)
        # Forward is the first to read the parameters, which may still be on their way.
        self._parts.data_parallel.finish(action.stage)
        with self._parts.recorder.span(Lane.COMPUTE, action):
            if self._schedule.trains:
                outputs = stage.forward(m, inputs, targets)
            else:
                outputs = stage.evaluate(inputs, targets)
        if last:
            self._measured[ahead].append(torch.stack(outputs))
        else:
            self._made[action] = outputs, self._parts.streams.mark()

    def _inputs(self, batch: Batch, piece: int) -> Tensors:
        """Of the model's first layer."""
        num_slices = self._schedule.num_slices
        microbatch = piece // num_slices
        whole = batch.inputs[microbatch]
        return tuple(self._slice(tensor, piece) for tensor in whole)

    def _targets(self, batch: Batch, piece: int) -> torch.Tensor:
        # The loss of a slice is of the words behind its own tokens.
        num_slices = self._schedule.num_slices
        microbatch = piece // num_slices
        whole = batch.targets[microbatch]
        return self._slice(whole, piece)

    def _slice(self, tensor: torch.Tensor, piece: int) -> torch.Tensor:
        """What belongs to `piece` of a micro-batch's tensor: all, where sequences are not cut."""
        num_slices = self._schedule.num_slices
        if num_slices == 1:
            return tensor
        number = piece % num_slices
        return slice_of(tensor, number, num_slices)

    def _backward(
        self,
        action: Action,
        backward: Callable[[int, Tensors], Tensors],
    ) -> None:
        assert action.microbatch is not None
        grads: Tensors = ()
        # The first need is this stage's own forward, and none of the slice behind is taken.
        if self._schedule.takes_gradient(action.stage):
            needs = self._routes.requires(action)
            grads = self._take(needs[1])
        with self._parts.recorder.span(Lane.COMPUTE, action):
            input_grads = backward(action.microbatch, grads)
        if self._schedule.passes_back(action.stage):
            self._made[action] = input_grads, self._parts.streams.mark()

    def _backward_weight(self, action: Action, stage: ComputingStage) -> None:
        assert action.microbatch is not None
        with self._parts.recorder.span(Lane.COMPUTE, action):
            stage.backward_weight(action.microbatch)

    def _take(self, source: Action) -> Tensors:
        """What `source` made: here, or on another rank, then as soon as it has arrived."""
        if source in self._made:
            return self._made.pop(source)[0]
        return tuple(self._wait(source))

    def _codec(self, action: Action, position: int) -> Codec:
        """Of a tensor that crosses a hop; asked for once, as it is sent or its receive is
        posted.
        """
        samples: Sequence[int] = ()
        by_microbatch = self._batches[0].samples
        if by_microbatch:
            assert action.microbatch is not None
            samples = by_microbatch[action.microbatch]
        return self._codecs.of(action, position, samples)

    def _wait(self, recv: Action) -> list[torch.Tensor]:
        """Wait as the transport waits, the host until it is here or the compute stream alone, and
        decode it.
        """
        arriving = self._arriving.pop(recv)
        with self._parts.recorder.span(Lane.WAIT, recv):
            wires = [each.pending.wait() for each in arriving]
        tensors = []
        for wire, each in zip(wires, arriving, strict=True):
            pending = each.pending
            if pending.done():
                self._parts.recorder.moved(Lane.RECV, recv, pending.moved)
            else:
                # Its times, and whether it failed, are known only when the device gets there.
                self._landing.append((recv, pending))
            tensors.append(each.codec.decode(wire, each.like))
        return tensors

    def _settle(self) -> None:
        """Block the host until what compute was queued behind has come."""
        for recv, pending in self._landing:
            pending.settle()
            self._parts.recorder.moved(Lane.RECV, recv, pending.moved)
        self._landing.clear()

    def _send_made(self, action: Action) -> None:
        (source,) = self._routes.requires(action)
        tensors, made = self._made.pop(source)
        # Encoded beside compute, not in its way.
        with self._parts.streams.sending(made, tensors):
            wires = []
            for position, tensor in enumerate(tensors):
                codec = self._codec(action, position)
                wires.append(codec.encode(tensor))
            for wire in wires:
                self._send(action, wire)

    def _send_tied(self, action: Action) -> None:
        # As it is, not encoded: both ends must end up with one sum, to the last bit.
        gradient = _gradient(self._parts.tied[action.stage])
        streams = self._parts.streams
        with streams.sending(streams.mark(), (gradient,)):
            self._send(action, gradient)

    def _send(self, action: Action, wire: torch.Tensor) -> None:
        to = self._routes.peer(action)
        pending = self._parts.transport.send(wire, to, self._routes.tag(action))
        self._leaving.append((action, pending))
        self.sent_bytes[to] += wire.nbytes

    def _post(self, action: Action) -> None:
        """Post the receives of `action`; they match the sends by the send's name."""
        expected: list[tuple[Codec, TensorSpec]] = []
        if action.op is Op.RECV_TIED:
            expected.append((_AS_IT_IS, TensorSpec.of(self._parts.tied[action.stage])))
        else:
            for position, spec in enumerate(self._routes.specs(action)):
                expected.append((self._codec(action, position), spec))
        source = self._routes.peer(action)
        tag = self._routes.tag(action)
        arriving = []
        for codec, like in expected:
            pending = self._parts.transport.recv(codec.wire_spec(like), source, tag)
            arriving.append(_Arriving(pending, codec, like))
        self._arriving[action] = arriving

    def _add_tied(self, stage: int) -> None:
        """Add the gradients that both ends of the model have for the shared weight. Two terms: no
        order to keep. Where both ends live here, the last stage is the later one to be complete.

        The sum is a new tensor, because the transport may still be reading the one that was sent.
        """
        receive = Action(stage, Op.RECV_TIED)
        if receive in self._arriving:
            weight = self._parts.tied[stage]
            [received] = self._wait(receive)
            weight.grad = _gradient(weight) + received
        elif self._parts.tied_here and self._schedule.is_last(stage):
            first, last = self._parts.tied_here
            first.grad = _gradient(first) + _gradient(last)
            last.grad = first.grad.clone()

    def _agree(self, action: Action) -> None:
        # Ahead of the span, which is of waiting for replicas alone.
        self._settle()
        with self._parts.recorder.span(Lane.WAIT, action):
            self._start_exchanges(lambda pending: True)
            self._parts.data_parallel.wait()

    def _start_exchanges(self, may_wait_for: Callable[[Send], bool]) -> None:
        """Let the replicas of a stage begin their exchange once what this rank sent before has
        left.

        Both share the rank's bandwidth. The neighbours in the pipeline wait for their messages,
        whereas the gradients are needed only at the end of the step.
        """
        # In order: what must leave before a later one includes all of an earlier one's.
        while self._due:
            stage, before = self._due[0]
            if not all(map(may_wait_for, before)):
                return
            self._due.popleft()
            for pending in before:
                pending.settle()
            self._parts.data_parallel.start(stage)


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    assert weight.grad is not None, "a tied weight has no gradient at the end of the step"
    return weight.grad
