"""The parameter-server kind, as a worker sees it: its stages' gradients go out, their parameters
come back.

                start(1)                 start(0)         report              step(1, f)   finish(1)
    eager       push 1 ==>, pull 1 <==   push 0, pull 0   -                   -            copy
    otherwise   push 1 ==>               push 0 ==>       norms (replica 0)   pull 1 <==   copy

Eager, where every step is taken as it is (no clipping, no loss scale): a chunk is stepped and comes
back while later ones are still on their way out. `finish` copies what came back into the
parameters, on the caller's thread: until then nothing that must last has changed.
"""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.flat import FlatParameters
from dpipe.dataparallel.optimizer import trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.errors import RunAborted
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_state import StepDecision
from dpipe.paramworker.client import ServerAccess, StageClient
from dpipe.wire.codec import codec
from dpipe.wire.feedback import Wire, wire
from dpipe.wire.message import tensor_of
from dpipe.wire.spec import TensorSpec


def build(setup: ReplicaSetup, accesses: Mapping[int, ServerAccess]) -> DataParallel:
    """`accesses` are by stage. A server also steps what is replayed: it knows of no difference."""
    rule = StepRule(
        tuple(setup.ranks),
        setup.settings.weight_decay,
        setup.settings.betas,
        setup.options.wire,
        setup.options.staleness,
    )
    return ParameterServerWorker(
        setup.stages,
        rule,
        accesses,
        eager=not setup.waits_for_verdict,
        chunk_bytes=setup.message_bytes,
        uncounted=setup.uncounted,
    )


def flat_spec(stage: Layers, chunk_bytes: int, uncounted: Collection[str]) -> FlatSpec:
    """The layout of a stage's trained parameters, in chunks of about `chunk_bytes` of fp32."""
    specs = []
    for layer, named in stage.layer_parameters().items():
        for name, parameter in named:
            if parameter.requires_grad:
                decays = parameter.ndim >= 2
                counts = name not in uncounted
                specs.append(ParameterSpec(name, layer, parameter.numel(), decays, counts))
    return FlatSpec(tuple(specs), chunk_values=max(1, chunk_bytes // 4))


class _OutgoingGradient:
    """A stage's gradient of one step on its way: in fp32, and each chunk as it went on the wire."""

    def __init__(
        self,
        stage: int,
        spec: FlatSpec,
        flat: FlatParameters,
        wire: Wire,
        buffer: torch.Tensor,
        factor: float,
    ) -> None:
        """The gradients are multiplied by `factor` into `buffer` [N]."""
        self.bad: str | None = None  # a parameter whose gradient is not finite
        self._stage = stage
        self._spec = spec
        self._flat = flat
        self._wire = wire
        self._buffer = buffer
        self._factor = factor
        self._gradients = flat.gradients()
        # by chunk; connections encode beside each other
        self._encoded: dict[int, torch.Tensor] = {}
        self._locks = [threading.Lock() for _ in range(spec.num_chunks)]

    def encode(self, chunk: int) -> torch.Tensor:
        """The chunk as it goes on the wire; the same bytes each time, as error feedback demands.

        gRPC's thread of a push that broke may still be at it when the next push asks for the same
        chunk.
        """
        with self._locks[chunk]:
            if chunk not in self._encoded:
                self._encoded[chunk] = self._encode(chunk)
        if len(self._encoded) == self._spec.num_chunks:
            self._gradients = []
        return self._encoded[chunk]

    def _encode(self, chunk: int) -> torch.Tensor:
        part = self._spec.chunk(chunk)
        self._flat.fill(self._buffer, part, self._gradients, self._factor)
        values = self._buffer[part]
        # The sum is the cheaper test; as finite values can overflow it, it does not decide.
        if not values.sum().isfinite() and not values.isfinite().all():
            first = int((~values.isfinite()).nonzero()[0])
            self.bad = self._spec.name_at(part.start + first)
        return self._wire.encode(values, (self._stage, chunk))


class _StageWorker:
    """One stage of this worker and its client. One thread makes the calls, one after the other."""

    def __init__(
        self,
        stage: int,
        layers: Layers,
        spec: FlatSpec,
        rule: StepRule,
        access: ServerAccess,
    ) -> None:
        self.stage = stage
        self.spec = spec
        self.rule = rule
        self.client = StageClient(access, stage, spec, rule)
        self._flat = FlatParameters(trained(layers))
        self._wire = wire(rule.wire)
        self._codec = codec(rule.wire)
        self._thread = ThreadPoolExecutor(1, f"dpipe-parameters-{stage}")
        # the parameters as the server knows this worker to have them
        self._values = torch.empty(spec.length)
        # of gradients, by step modulo staleness + 1: the server may still need so many steps'
        self._buffers: dict[int, torch.Tensor] = {}
        self._outgoing: _OutgoingGradient | None = None
        self._pushing: Future[None] | None = None
        self._pulling: Future[None] | None = None

    def open(self, step: int, num_updates: int, moments: Moments) -> None:
        whole = slice(0, self.spec.length)
        self._flat.fill(self._values, whole, self._flat.parameters, 1.0)
        vectors = partial(self._vectors, num_updates, moments)
        self._thread.submit(self.client.open, step, num_updates, vectors).result()

    def push(self, step: int, loss_scale: float) -> None:
        outgoing = self._take_gradient(step, loss_scale)
        self._pushing = self._thread.submit(self.client.push, step, outgoing.encode)

    def push_and_pull(self, step: int, decision: StepDecision, loss_scale: float) -> None:
        outgoing = self._take_gradient(step, loss_scale)
        self.client.keep(step, outgoing.encode)
        pull = partial(self.client.pull, step, decision, self._put, push=True)
        self._pulling = self._thread.submit(pull)

    def pull(self, step: int, decision: StepDecision) -> None:
        self._pulling = self._thread.submit(self.client.pull, step, decision, self._put)

    def norms(self, step: int) -> dict[int, float]:
        return self._thread.submit(self.client.norms, step).result()

    def wait_pushed(self) -> None:
        """Block until the push in progress is done; raises what went wrong with it."""
        if self._pushing is not None:
            # Each of its calls has a deadline.
            self._pushing.result()
            self._pushing = None

    @property
    def bad(self) -> str | None:
        """A parameter whose gradient, as it was pushed, is not finite."""
        return None if self._outgoing is None else self._outgoing.bad

    def finish(self) -> None:
        """Copy what was pulled into the parameters; raises what went wrong with it."""
        if self._pulling is not None:
            self._pulling.result()
            self._pulling = None  # once: every forward pass of the step calls this
            self._set_parameters()

    def fetch(self, step: int) -> dict[str, torch.Tensor]:
        """All that the server has before `step`; this worker takes the parameters over."""
        vectors = self._thread.submit(self.client.fetch, step).result()
        held = "held" if self.rule.lossy_parameters else "values"
        self._values.copy_(vectors[held])
        self._set_parameters()
        return vectors

    def checkpointed(self, vectors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of `vectors` besides the parameters."""
        kept = {"exp_avg": vectors["exp_avg"], "exp_avg_sq": vectors["exp_avg_sq"]}
        if self.rule.lossy_parameters:
            kept["master"] = vectors["values"]
        # By the names that AdamW's own state has: any other kind can go on from it.
        state = {}
        for key, vector in kept.items():
            for index, name in enumerate(self._flat.names):
                state[f"{name}.{key}"] = self._flat.view(vector, index)
        return state

    def leave(self) -> None:
        self.finish()
        self._thread.submit(self.client.leave).result()

    def close(self) -> None:
        self.client.close()
        self._thread.shutdown(cancel_futures=True)

    def _take_gradient(self, step: int, loss_scale: float) -> _OutgoingGradient:
        index = step % (self.rule.staleness + 1)
        if index not in self._buffers:
            self._buffers[index] = torch.empty(self.spec.length)
        self._outgoing = _OutgoingGradient(
            self.stage,
            self.spec,
            self._flat,
            self._wire,
            self._buffers[index],
            1.0 / loss_scale,
        )
        return self._outgoing

    def _put(self, chunk: int, whole: bool, body: memoryview) -> None:
        """Take a chunk that came back: its values if `whole`, else what is added to those here."""
        here = self._values[self.spec.chunk(chunk)]
        like = TensorSpec.of(here)
        what = f"chunk {chunk} of the parameters"
        if whole:
            here.copy_(tensor_of(body, like, what))
        else:
            wire = tensor_of(body, self._codec.wire_spec(like), what)
            here += self._codec.decode(wire, like)

    def _vectors(self, num_updates: int, moments: Moments) -> dict[str, torch.Tensor]:
        """What the server begins with: these parameters, and the moments of a checkpoint if any."""
        vectors = {
            "values": self._values,
            "exp_avg": torch.zeros(self.spec.length),
            "exp_avg_sq": torch.zeros(self.spec.length),
        }
        if num_updates:
            vectors["exp_avg"] = self._joined(moments, "exp_avg")
            vectors["exp_avg_sq"] = self._joined(moments, "exp_avg_sq")
        if self.rule.lossy_parameters:
            vectors["held"] = self._values
            # A run of another kind has kept no masters: they begin as the workers' values.
            has_masters = all(f"{name}.master" in moments for name in self._flat.names)
            if num_updates and has_masters:
                vectors["values"] = self._joined(moments, "master")
        return vectors

    def _joined(self, moments: Moments, key: str) -> torch.Tensor:
        """A vector [N] of what a checkpoint holds of each parameter under `key`."""
        parts = [moments[f"{name}.{key}"] for name in self._flat.names]
        vector = torch.zeros(self.spec.length)
        self._flat.fill(vector, slice(0, self.spec.length), parts, 1.0)
        return vector

    def _set_parameters(self) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self._flat.parameters):
                parameter.copy_(self._flat.view(self._values, index))


class ParameterServerWorker(DataParallel):
    """`rule` holds for all stages of this rank; `accesses` are by stage, for each may be on a
    server of its own.

    `eager` where every step is taken as it is. Replica 0 reports and saves for all: they have the
    same.
    """

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers],
        rule: StepRule,
        accesses: Mapping[int, ServerAccess],
        *,
        eager: bool,
        chunk_bytes: int,
        uncounted: Collection[str] = (),
    ) -> None:
        self._workers: dict[int, _StageWorker] = {}
        for index, stage in stages.items():
            spec = flat_spec(stage, chunk_bytes, uncounted)
            self._workers[index] = _StageWorker(index, stage, spec, rule, accesses[index])
        self._eager = eager
        self._stale = rule.staleness > 0
        self._is_first = all(access.replica == 0 for access in accesses.values())
        (self._num_steps,) = {access.num_steps for access in accesses.values()}
        self._step = -1
        self._rate = 0.0
        self._loss_scale = 1.0
        self._opened = False
        self._is_closed = False
        self._num_updates = 0  # of a checkpoint, until the first step begins
        self._moments: Moments = {}

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._step = step
        self._rate = learning_rate
        self._loss_scale = loss_scale
        # Not in the constructor: what a checkpoint holds is known only after `restore`.
        if not self._opened:
            for worker in self._workers.values():
                worker.open(step, self._num_updates, self._moments)
            self._opened = True
            self._moments = {}

    def start(self, stage: int) -> None:
        worker = self._workers[stage]
        if self._eager:
            decision = StepDecision(self._rate, 1.0)
            worker.push_and_pull(self._step, decision, self._loss_scale)
        else:
            worker.push(self._step, self._loss_scale)

    def wait(self) -> None:
        for worker in self._workers.values():
            worker.wait_pushed()

    def report(self, *, measure: bool) -> Report:
        self.wait()
        squares: dict[int, float] = {}
        bad = None
        for worker in self._workers.values():
            if measure and self._is_first:
                squares |= worker.norms(self._step)
            bad = bad or worker.bad
        return Report(squares, bad)

    def step(self, stage: int, factor: float | None) -> bool:
        if self._eager:
            assert factor == 1.0, (
                f"a step that went out before its verdict cannot be multiplied by {factor}"
            )
        else:
            decision = StepDecision(self._rate, factor)
            self._workers[stage].pull(self._step, decision)
        return factor is not None

    def finish(self, stage: int) -> None:
        if self._is_closed:
            raise RunAborted("the parameter server is asked no more: its run has ended")
        self._workers[stage].finish()

    def traffic(self) -> list[Traffic]:
        messages = []
        for worker in self._workers.values():
            traffic = worker.client.traffic
            # gRPC's threads may add to it meanwhile.
            messages += [traffic.popleft() for _ in range(len(traffic))]
        return messages

    def state(self) -> dict[str, torch.Tensor]:
        """Replica 0 fetches it from the server; a worker that may be behind takes over the
        parameters it has there.
        """
        state: dict[str, torch.Tensor] = {}
        if not (self._is_first or self._stale):
            return state
        for worker in self._workers.values():
            # First: the step that is fetched may still be on its way here.
            worker.finish()
            vectors = worker.fetch(self._step + 1)
            if self._is_first:
                state |= worker.checkpointed(vectors)
        return state

    def restore(self, num_updates: int, moments: Moments) -> None:
        """Kept until the first step begins: then replica 0 loads it onto the server."""
        self._num_updates = num_updates
        self._moments = moments if self._is_first else {}

    @property
    def optimizer_bytes(self) -> int:
        """The server has it."""
        return 0

    def leave(self) -> None:
        # A server by itself would end with an epoch, and the next one would not find it.
        is_over = self._num_steps in (None, self._step + 1)
        if self._opened and is_over:
            for worker in self._workers.values():
                worker.leave()

    def fail(self, error: Exception) -> None:
        for worker in self._workers.values():
            worker.client.fail(error)

    def close(self) -> None:
        self._is_closed = True
        for worker in self._workers.values():
            worker.close()
