"""The parameter-server kind, as a worker sees it: its stages' gradients go out, their parameters
come back.

                 start(1)                    start(0)               wait, report          step(1, f)   finish(1)
    eager        push 1 ==> and pull 1 <==   push 0, pull 0         -                     -            parameters
    otherwise    push 1 ==>                  push 0 ==>             norms (replica 0)     pull 1 <==   parameters

Eager, where no verdict has to be waited for (no clipping, no loss scale): a chunk is stepped and
comes back while later ones are still on their way out. What comes back is laid into the parameters
by `finish`, on the caller's thread: until then nothing that must last has changed.
"""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.feedback import Wire, wire
from dpipe.dataparallel.flat import FlatParameters
from dpipe.dataparallel.optimizer import trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.paramserver.client import ServerAccess, StageClient
from dpipe.paramserver.messages import tensor_of
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_state import StepDecision
from dpipe.wire.codec import codec
from dpipe.wire.spec import TensorSpec


def flat_spec(stage: Layers, chunk_bytes: int, uncounted: Collection[str]) -> FlatSpec:
    """The row of a stage, in chunks of about `chunk_bytes` of fp32."""
    specs = tuple(
        ParameterSpec(
            name, layer, parameter.numel(), decays=parameter.ndim >= 2, counts=name not in uncounted
        )
        for layer, named in stage.layer_parameters().items()
        for name, parameter in named
        if parameter.requires_grad
    )
    return FlatSpec(specs, chunk_values=max(1, chunk_bytes // 4))


class _OutgoingGradient:
    """A stage's gradient of one step on its way: as fp32 in `buffer` [N], and each chunk as it went
    on the wire.
    """

    def __init__(
        self,
        stage: int,
        spec: FlatSpec,
        row: FlatParameters,
        wire: Wire,
        buffer: torch.Tensor,
        factor: float,
    ) -> None:
        self._stage = stage
        self._spec = spec
        self._row = row
        self._wire = wire
        self._buffer = buffer
        self._factor = factor
        self._gradients = row.gradients()
        self._encoded: dict[int, torch.Tensor] = {}
        self._locks = [
            threading.Lock() for _ in range(spec.num_chunks)
        ]  # connections encode beside each other
        self.bad: str | None = None  # a parameter whose gradient is not finite

    def encode(self, chunk: int) -> torch.Tensor:
        """Put the chunk together when its turn comes; the same bytes each time, also where an error
        is fed back.

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
        self._row.fill(self._buffer, part, self._gradients, self._factor)
        values = self._buffer[part]
        if not values.sum().isfinite() and not values.isfinite().all():
            self.bad = self._spec.name_at(part.start + int((~values.isfinite()).nonzero()[0]))
        return self._wire.encode(values, (self._stage, chunk))


class _StageWorker:
    """One stage of this worker and its line; one thread, so that its calls come one after the
    other.
    """

    def __init__(
        self, stage: int, layers: Layers, spec: FlatSpec, rule: StepRule, worker: ServerAccess
    ) -> None:
        self.stage = stage
        self.spec = spec
        self.rule = rule
        self.line = StageClient(worker, stage, spec, rule)
        self._row = FlatParameters(trained(layers))
        self._wire = wire(rule.wire)
        self._codec = codec(rule.wire)
        self._thread = ThreadPoolExecutor(1, f"dpipe-parameters-{stage}")
        self._values = torch.empty(spec.length)  # what the server knows this worker to have
        self._buffers: dict[
            int, torch.Tensor
        ] = {}  # of gradients: the server may still need so many steps'
        self._pushed: _OutgoingGradient | None = None
        self._pushing: Future[None] | None = None
        self._pulling: Future[None] | None = None

    def open(self, step: int, num_updates: int, moments: Moments) -> None:
        whole = slice(0, self.spec.length)
        self._row.fill(self._values, whole, self._row.parameters, 1.0)
        self._thread.submit(
            self.line.open, step, num_updates, lambda: self._rows(num_updates, moments)
        ).result()

    def push(self, step: int, loss_scale: float) -> None:
        self._pushing = self._thread.submit(
            self.line.push, step, self._gather(step, loss_scale).encode
        )

    def push_and_pull(self, step: int, verdict: StepDecision, loss_scale: float) -> None:
        self.line.keep(step, self._gather(step, loss_scale).encode)
        self._pulling = self._thread.submit(self.line.pull, step, verdict, self._put, push=True)

    def pull(self, step: int, verdict: StepDecision) -> None:
        self._pulling = self._thread.submit(self.line.pull, step, verdict, self._put)

    def norms(self, step: int) -> dict[int, float]:
        return self._thread.submit(self.line.norms, step).result()

    def pushed(self) -> None:
        """Block until the push under way is done; raises what went wrong with it."""
        if self._pushing is not None:
            self._pushing.result()  # each of its calls has a deadline
            self._pushing = None

    @property
    def bad(self) -> str | None:
        return None if self._pushed is None else self._pushed.bad

    def finish(self) -> None:
        """Lay what was pulled into the parameters; raises what went wrong with it."""
        if self._pulling is not None:
            self._pulling.result()
            self._pulling = None
            self._lay_out()

    def fetch(self, step: int) -> dict[str, torch.Tensor]:
        """All that the server has before `step`; this worker takes the parameters over."""
        rows = self._thread.submit(self.line.fetch, step).result()
        self._values.copy_(rows["held"] if self.rule.lossy_parameters else rows["values"])
        self._lay_out()
        return rows

    def kept(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a checkpoint holds besides the parameters."""
        named = {"exp_avg": rows["exp_avg"], "exp_avg_sq": rows["exp_avg_sq"]}
        if self.rule.lossy_parameters:
            named["master"] = rows["values"]
        views = ((name, index, key) for key in named for index, name in enumerate(self._row.names))
        return {f"{name}.{key}": self._row.view(named[key], index) for name, index, key in views}

    def leave(self) -> None:
        self.finish()
        self._thread.submit(self.line.leave).result()

    def close(self) -> None:
        self.line.close()
        self._thread.shutdown(cancel_futures=True)

    def _gather(self, step: int, loss_scale: float) -> _OutgoingGradient:
        buffer = self._buffers.setdefault(
            step % (self.rule.staleness + 1), torch.empty(self.spec.length)
        )
        self._pushed = _OutgoingGradient(
            self.stage, self.spec, self._row, self._wire, buffer, 1.0 / loss_scale
        )
        return self._pushed

    def _put(self, chunk: int, whole: bool, body: memoryview) -> None:
        """Take a chunk that came back: its values, or what is to be added to the ones that are
        here.
        """
        here = self._values[self.spec.chunk(chunk)]
        like = TensorSpec.of(here)
        what = f"chunk {chunk} of the parameters"
        if whole:
            here.copy_(tensor_of(body, like, what))
        else:
            here += self._codec.decode(tensor_of(body, self._codec.wire_spec(like), what), like)

    def _rows(self, num_updates: int, moments: Moments) -> dict[str, torch.Tensor]:
        """What the server begins with: these parameters, and the moments of a checkpoint where
        there is one.
        """
        names = self._row.names

        def joined(key: str) -> torch.Tensor:
            row = torch.zeros(self.spec.length)
            if num_updates:
                self._row.fill(
                    row,
                    slice(0, self.spec.length),
                    [moments[f"{name}.{key}"] for name in names],
                    1.0,
                )
            return row

        rows = {
            "values": self._values,
            "exp_avg": joined("exp_avg"),
            "exp_avg_sq": joined("exp_avg_sq"),
        }
        if self.rule.lossy_parameters:
            rows["held"] = self._values
            if num_updates and all(f"{name}.master" in moments for name in names):
                rows["values"] = joined("master")
        return rows

    def _lay_out(self) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self._row.parameters):
                parameter.copy_(self._row.view(self._values, index))


class ParameterServerWorker(DataParallel):
    """`rule` and `worker` hold for all stages of this rank but for the server's address, which
    `workers` may vary.

    `eager` where no verdict is waited for: every step is taken as it is. Replica 0 speaks for all:
    they have the same.
    """

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers],
        rule: StepRule,
        workers: Mapping[int, ServerAccess],
        *,
        eager: bool,
        chunk_bytes: int,
        uncounted: Collection[str] = (),
    ) -> None:
        self._columns = {
            index: _StageWorker(
                index, stage, flat_spec(stage, chunk_bytes, uncounted), rule, workers[index]
            )
            for index, stage in stages.items()
        }
        self._eager = eager
        self._stale = rule.staleness > 0
        self._speaks = all(worker.replica == 0 for worker in workers.values())
        self._step = -1
        self._rate = 0.0
        self._loss_scale = 1.0
        self._num_updates = 0
        self._moments: Moments = {}
        self._opened = False

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._step = step
        self._rate = learning_rate
        self._loss_scale = loss_scale
        if not self._opened:
            for column in self._columns.values():
                column.open(step, self._num_updates, self._moments)
            self._opened = True
            self._moments = {}

    def start(self, stage: int) -> None:
        if self._eager:
            self._columns[stage].push_and_pull(
                self._step, StepDecision(self._rate, 1.0), self._loss_scale
            )
        else:
            self._columns[stage].push(self._step, self._loss_scale)

    def wait(self) -> None:
        for column in self._columns.values():
            column.pushed()

    def report(self, *, measure: bool) -> Report:
        self.wait()
        squares: dict[int, float] = {}
        for column in self._columns.values() if measure and self._speaks else ():
            squares |= column.norms(self._step)
        return Report(
            squares, next((column.bad for column in self._columns.values() if column.bad), None)
        )

    def step(self, stage: int, factor: float | None) -> bool:
        if self._eager:
            assert factor == 1.0, (
                f"a step that went out before its verdict cannot be multiplied by {factor}"
            )
        else:
            self._columns[stage].pull(self._step, StepDecision(self._rate, factor))
        return factor is not None

    def finish(self, stage: int) -> None:
        self._columns[stage].finish()

    def traffic(self) -> list[Traffic]:
        lines = [column.line.traffic for column in self._columns.values()]
        return [line.popleft() for line in lines for _ in range(len(line))]

    def state(self) -> dict[str, torch.Tensor]:
        """Replica 0 fetches it from the server; a worker that may be behind takes over the
        parameters it has there.
        """
        kept: dict[str, torch.Tensor] = {}
        for column in self._columns.values() if self._speaks or self._stale else ():
            column.finish()
            rows = column.fetch(self._step + 1)
            kept |= column.kept(rows) if self._speaks else {}
        return kept

    def restore(self, num_updates: int, moments: Moments) -> None:
        """For the server, which replica 0 tells when the first step begins."""
        self._num_updates = num_updates
        self._moments = moments if self._speaks else {}

    @property
    def optimizer_bytes(self) -> int:
        """The server has it."""
        return 0

    def leave(self) -> None:
        """After the last step: the server need not wait for this worker any more."""
        for column in self._columns.values() if self._opened else ():
            column.leave()

    def fail(self, error: Exception) -> None:
        """The run is over: whoever waits for the server raises `error`."""
        for column in self._columns.values():
            column.line.fail(error)

    def close(self) -> None:
        for column in self._columns.values():
            column.close()


def build(setup: ReplicaSetup, workers: Mapping[int, ServerAccess]) -> DataParallel:
    """`workers` are by stage. A server also steps what is replayed: it knows of no difference."""
    rule = StepRule(
        tuple(setup.ranks),
        setup.adam.weight_decay,
        setup.adam.betas,
        setup.options.wire,
        setup.options.staleness,
    )
    return ParameterServerWorker(
        setup.stages,
        rule,
        workers,
        eager=not setup.waits_for_verdict,
        chunk_bytes=setup.message_bytes,
        uncounted=setup.uncounted,
    )
