"""Exchanges of gradients under way beside the compute: one thread, one stage after the other.

    start(1) --> [ exchange of stage 1 ][ exchange of stage 0 ]            in the order of start(), on every replica
    start(0) -----------'                                     `--> wait() report() step()

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

Ready = Callable[[slice], None]
Exchange = Callable[[torch.Tensor, int, Ready], list[Traffic]]
Gradients = Sequence[torch.Tensor | None]

_DELAYED = "delayed_grad"


@dataclass
class PendingGradient:
    """The exchange of one stage's gradient: `row` [N] is agreed once `landed` is done."""

    row: torch.Tensor
    landed: Future[None]
    bad: str | None = None  # a parameter whose gradient was not finite here


class BackgroundExchange:
    """`rows` says by stage what is exchanged. `fail` is called with what went wrong, from the
    thread.
    """

    def __init__(
        self,
        rows: Mapping[int, FlatParameters],
        fail: Callable[[Exception], None],
        *,
        lag: int,
        name: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self._rows = rows
        self._fail = fail
        self.lag = lag
        self._device = device
        self._thread = ThreadPoolExecutor(1, name)
        self._flying: dict[int, deque[PendingGradient]] = {stage: deque() for stage in rows}
        self._spare: dict[int, list[torch.Tensor]] = {stage: [] for stage in rows}
        self._traffic: deque[Traffic] = deque()

    def begin(
        self, stage: int, loss_scale: float, exchange: Exchange, gradients: Gradients | None = None
    ) -> None:
        """Exchange `gradients`, or those of `stage` as they are now, without their loss scale;
        returns at once.
        """
        row = self.borrow(stage)
        flight = PendingGradient(row, Future())
        gradients = self._rows[stage].gradients() if gradients is None else gradients
        ready = self._filling(stage, flight, gradients, 1.0 / loss_scale)
        flight.landed = self.submit(lambda: exchange(row, stage, ready))
        self._flying[stage].append(flight)

    def borrow(self, stage: int) -> torch.Tensor:
        """Memory for a row of `stage`."""
        return self._spare[stage].pop() if self._spare[stage] else self._new_row(stage)

    def give_back(self, stage: int, row: torch.Tensor) -> None:
        self._spare[stage].append(row)

    def submit(self, exchange: Callable[[], list[Traffic]]) -> Future[None]:
        """Run something else behind what is under way."""
        return self._thread.submit(self._run, exchange)

    def due(self, stage: int) -> PendingGradient | None:
        """The flight that this step uses, landed; None in the first steps, as many as the lag.

        Raises what went wrong with it. It has no deadline of its own: each message that it waits
        for has one.
        """
        flying = self._flying[stage]
        if len(flying) <= self.lag:
            return None
        flying[0].landed.result()
        return flying[0]

    def take(self, stage: int) -> PendingGradient | None:
        """As `due`, and done with: the row may be used until the next `begin`."""
        flight = self.due(stage)
        if flight is not None:
            self.give_back(stage, self._flying[stage].popleft().row)
        return flight

    def bad(self) -> str | None:
        """A parameter whose gradient was not finite here, in what this step uses."""
        found = (flight.bad for flight in map(self.due, self._rows) if flight is not None)
        return next((name for name in found if name is not None), None)

    def traffic(self) -> list[Traffic]:
        return [self._traffic.popleft() for _ in range(len(self._traffic))]

    def delayed(self, stage: int) -> Sequence[PendingGradient]:
        """What the next steps will use, landed."""
        for flight in self._flying[stage]:
            flight.landed.result()
        return self._flying[stage]

    def delayed_state(self, stage: int, piece: slice, *, whole: bool) -> dict[str, torch.Tensor]:
        """`piece` of the agreed gradients that no step has used yet, for a checkpoint."""
        row = self._rows[stage]
        return {
            f"{row.names[s.index]}.{_DELAYED}{'' if whole else f'[{s.start}:{s.stop}]'}": flight.row[
                s.here
            ]
            for flight in self.delayed(stage)
            for s in row.spans(piece)
        }

    def restore(self, moments: Moments) -> None:
        """Take up the gradients of a checkpoint that no step has used yet, where there are any."""
        for stage, row in self._rows.items():
            if all(f"{name}.{_DELAYED}" in moments for name in row.names):
                flight = PendingGradient(self._new_row(stage), Future())
                row.fill(
                    flight.row,
                    slice(0, row.length),
                    [moments[f"{name}.{_DELAYED}"] for name in row.names],
                    1.0,
                )
                flight.landed.set_result(None)
                self._flying[stage].append(flight)

    def close(self) -> None:
        self._thread.shutdown()  # the other replicas wait for what has begun

    def _new_row(self, stage: int) -> torch.Tensor:
        return torch.empty(self._rows[stage].length, device=self._device)

    def _filling(
        self, stage: int, flight: PendingGradient, gradients: Gradients, factor: float
    ) -> Ready:
        """Copies a piece of the gradients into the row when its turn comes, and sees whether it is
        finite.
        """
        row = self._rows[stage]

        def ready(piece: slice) -> None:
            row.fill(flight.row, piece, gradients, factor)
            if not flight.row[piece].sum().isfinite():
                spans = (s for s in row.spans(piece) if not flight.row[s.here].isfinite().all())
                flight.bad = flight.bad or next((row.names[s.index] for s in spans), None)

        return ready

    def _run(self, exchange: Callable[[], list[Traffic]]) -> None:
        try:
            self._traffic.extend(exchange())
        except Exception as error:
            self._fail(error)
            raise
