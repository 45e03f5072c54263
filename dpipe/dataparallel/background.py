"""Exchanges beside the compute: one thread, one stage after the other.

    start(1) --> [ exchange of stage 1 ][ exchange of stage 0 ]
    start(0) -----------'                                     `--> wait() report() step()

The order is that of `start`, the same on every replica.

With `lag` 1 a step uses the exchange that began one step earlier, which has had that long to come
(one-step delay):

    gradients of step   t - 1        t          t + 1
    exchanged           [---------][---------][---------]
    used at the end of         t      t + 1      t + 2
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dpipe.dataparallel.base import Moments, Traffic
from dpipe.dataparallel.flat import FlatParameters
from dpipe.errors import RunAborted

Ready = Callable[[slice], None]  # told of each piece of the vector shortly before it is needed
# (vector [N], stage, ready) -> what was sent
RunExchange = Callable[[torch.Tensor, int, Ready], list[Traffic]]
Gradients = Sequence[torch.Tensor | None]

_DELAYED = "delayed_grad"  # in a checkpoint


@dataclass
class PendingGradient:
    """A stage's gradient on its way: `vector` [N] is the mean once `exchanged` is done."""

    vector: torch.Tensor
    exchanged: Future[None]
    bad: str | None = None  # a parameter whose gradient was not finite here


class BackgroundExchange:
    """`flat` is by stage. `fail` is called from the thread, with what went wrong."""

    def __init__(
        self,
        flat: Mapping[int, FlatParameters],
        fail: Callable[[Exception], None],
        *,
        lag: int,
        name: str,
        device: torch.device | str = "cpu",
    ) -> None:
        """Vectors are on `device`; the thread is called `name`."""
        self.lag = lag
        self._flat = flat
        self._fail = fail
        self._device = device
        # One: the replicas' exchanges pair up by their order alone.
        self._thread = ThreadPoolExecutor(1, name)
        self._is_closed = False
        # by stage, oldest first
        self._pending: dict[int, deque[PendingGradient]] = {stage: deque() for stage in flat}
        # by stage: vectors that nobody uses
        self._spare: dict[int, list[torch.Tensor]] = {stage: [] for stage in flat}
        # The thread adds at one end, `traffic` takes at the other.
        self._traffic: deque[Traffic] = deque()

    def begin(
        self,
        stage: int,
        loss_scale: float,
        exchange: RunExchange,
        gradients: Gradients | None = None,
    ) -> None:
        """Exchange `gradients`, or those of `stage` as they are now, without their loss scale;
        returns at once.
        """
        if gradients is None:
            gradients = self._flat[stage].gradients()
        vector = self.borrow(stage)
        pending = PendingGradient(vector, Future())
        # Filled in by the thread, piece by piece: the first message does not wait for the last
        # copy.
        ready = self._filling(stage, pending, gradients, 1.0 / loss_scale)
        pending.exchanged = self.submit(lambda: exchange(vector, stage, ready))
        self._pending[stage].append(pending)

    def borrow(self, stage: int) -> torch.Tensor:
        """Memory for a vector of `stage`."""
        if self._spare[stage]:
            return self._spare[stage].pop()
        return self._new_vector(stage)

    def give_back(self, stage: int, vector: torch.Tensor) -> None:
        self._spare[stage].append(vector)

    def submit(self, exchange: Callable[[], list[Traffic]]) -> Future[None]:
        """Run something else behind what is in progress. Raises `RunAborted` after `close`."""
        if self._is_closed:
            raise RunAborted("replicas exchange nothing any more: their run has ended")
        return self._thread.submit(self._run, exchange)

    def due(self, stage: int) -> PendingGradient | None:
        """The gradient that this step uses, exchanged; None in the first steps, as many as the lag.

        Raises what went wrong with it. It has no deadline of its own: each message that it waits
        for has one.
        """
        pending = self._pending[stage]
        if len(pending) <= self.lag:
            return None
        pending[0].exchanged.result()
        return pending[0]

    def take(self, stage: int) -> PendingGradient | None:
        """As `due`, and done with: its vector may be used until the next `begin`."""
        gradient = self.due(stage)
        if gradient is not None:
            self._pending[stage].popleft()
            self.give_back(stage, gradient.vector)
        return gradient

    def bad(self) -> str | None:
        """A parameter whose gradient was not finite here, in what this step uses."""
        for stage in self._flat:
            gradient = self.due(stage)
            if gradient is not None and gradient.bad is not None:
                return gradient.bad
        return None

    def traffic(self) -> list[Traffic]:
        # Popped one by one: the thread may be adding to it.
        return [self._traffic.popleft() for _ in range(len(self._traffic))]

    def delayed(self, stage: int) -> Sequence[PendingGradient]:
        """What the next steps will use, exchanged."""
        for gradient in self._pending[stage]:
            gradient.exchanged.result()
        return self._pending[stage]

    def delayed_state(self, stage: int, piece: slice, *, whole: bool) -> dict[str, torch.Tensor]:
        """`piece` of the mean gradients that no step has used yet, for a checkpoint.

        Names end in the range of the parameter's elements, unless they are `whole`.
        """
        flat = self._flat[stage]
        state = {}
        for gradient in self.delayed(stage):
            for segment in flat.segments(piece):
                elements = "" if whole else f"[{segment.start}:{segment.stop}]"
                name = f"{flat.names[segment.index]}.{_DELAYED}{elements}"
                state[name] = gradient.vector[segment.here]
        return state

    def restore(self, moments: Moments) -> None:
        """Take up the gradients of a checkpoint that no step has used yet, where there are any."""
        for stage, flat in self._flat.items():
            names = [f"{name}.{_DELAYED}" for name in flat.names]
            if not all(name in moments for name in names):
                continue
            vector = self._new_vector(stage)
            parts = [moments[name] for name in names]
            flat.fill(vector, slice(0, flat.length), parts, 1.0)
            exchanged: Future[None] = Future()
            exchanged.set_result(None)
            self._pending[stage].append(PendingGradient(vector, exchanged))

    def close(self) -> None:
        self._is_closed = True
        # The other replicas wait for what has begun.
        self._thread.shutdown()

    def _new_vector(self, stage: int) -> torch.Tensor:
        return torch.empty(self._flat[stage].length, device=self._device)

    def _filling(
        self, stage: int, pending: PendingGradient, gradients: Gradients, factor: float
    ) -> Ready:
        """Copies a piece of the gradients into the vector when its turn comes, and notes whether
        it is finite.
        """
        flat = self._flat[stage]
        vector = pending.vector

        def ready(piece: slice) -> None:
            flat.fill(vector, piece, gradients, factor)
            if vector[piece].sum().isfinite():
                return
            # Finite values can overflow a sum: look at each parameter.
            for segment in flat.segments(piece):
                if pending.bad is not None:
                    break
                finite = vector[segment.here].isfinite()
                if not finite.all():
                    pending.bad = flat.names[segment.index]

        return ready

    def _run(self, exchange: Callable[[], list[Traffic]]) -> None:
        try:
            self._traffic.extend(exchange())
        except Exception as error:
            # At once: this rank looks at its future only at the end of the step, and its peers
            # would wait for it until they time out.
            self._fail(error)
            raise
