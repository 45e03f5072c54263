"""The parameter server's copy of one stage (Li et al. 2014): fp32 parameters, AdamW's moments, and
the step under way.

    add()      pieces of the gradient come in and are summed chunk by chunk
    decide()   the workers' verdict: what the gradient is multiplied by, or that the step is skipped
    give()     a chunk whose mean is final and whose verdict is known is stepped, beside the old one, and goes out
    commit()   all chunks have been stepped: the new ones take the place of the old ones, at once or not at all

              step 7 under way                         committed: step 8
    now   [ old | old | old | old ]     swap           [ new | new | new | new ]
    next  [ new | new |     |     ]    ------>         (what comes next)

A worker that dies in between has changed nothing: `now` is what it was after the last commit.

With staleness the workers may push several steps before the slowest has pushed the first; each
still steps by the mean of all replicas. Until then a worker gets what the steps under way would
make of `now` by the gradients that are in, its own among them (read-my-writes, Ho et al. 2013):
what it learns next is then not learnt at an old place (`ahead.py`).

Pure: no thread, no clock, no wire. Whoever uses it from several threads holds a lock.
"""

from collections import deque
from dataclasses import dataclass

import torch

from dpipe.dataparallel.optimizer import adamw_step
from dpipe.errors import NumericError, TransferError
from dpipe.paramserver.gradient_sum import GradientSum
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.wire.codec import codec
from dpipe.wire.spec import TensorSpec


@dataclass(frozen=True)
class StepDecision:
    """What the workers agreed on: the step's learning rate, and the gradient's factor; None skips
    the step.
    """

    learning_rate: float
    factor: float | None


@dataclass
class StageTensors:
    """A row's numbers, fp32 [N] each. `held` is what the workers have, where a lossy wire makes
    that another row.
    """

    values: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    held: torch.Tensor | None = None

    def rows(self) -> dict[str, torch.Tensor]:
        rows = {
            "values": self.values,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "held": self.held,
        }
        return {name: row for name, row in rows.items() if row is not None}

    @classmethod
    def zeros(cls, length: int, *, lossy: bool) -> "StageTensors":
        held = torch.zeros(length) if lossy else None
        return cls(torch.zeros(length), torch.zeros(length), torch.zeros(length), held)

    def of(self, part: slice) -> "StageTensors":
        """Elements `part`, in the same memory."""
        return StageTensors(*(row[part] for row in self.rows().values()))

    def copy(self, part: slice, source: "StageTensors") -> None:
        for name, row in self.rows().items():
            row[part] = source.rows()[name][part]


@dataclass(frozen=True)
class OutgoingChunk:
    """A chunk on its way to the workers: its values, or what is to be added to the ones they
    have.
    """

    whole: bool
    wire: torch.Tensor


class StageState:
    """See above. `step` is the one that comes next: all before it are committed."""

    def __init__(
        self, row: FlatSpec, rule: StepRule, state: StageTensors, *, step: int, num_updates: int
    ) -> None:
        self.row = row
        self.rule = rule
        self.now = state
        self.step = step
        self.num_updates = num_updates
        self._next = StageTensors.zeros(row.length, lossy=rule.lossy_parameters)
        self._codec = codec(rule.wire)
        self._ledgers: dict[int, GradientSum] = {}
        self._spare: deque[torch.Tensor] = deque()
        self._verdicts: dict[int, StepDecision] = {}
        self._decided: dict[
            int, set[int]
        ] = {}  # by step: the replicas that have brought the verdict
        self._not_finite: dict[tuple[int, int], str] = {}  # by step and chunk: who pushed it
        self._stepped: dict[int, torch.Tensor] = {}  # chunks of the step under way, as they go out
        self._left: dict[
            int, torch.Tensor
        ] = {}  # chunks of the last committed step, as they went out

    def add(self, step: int, replica: int, chunk: int, values: torch.Tensor) -> None:
        """Take a replica's piece of the gradient. What is of a committed step, or in already,
        changes nothing.

        Raises `TransferError` for a step that cannot be under way, or a piece that does not fit the
        row.
        """
        self._check_step(step, f"replica {replica}'s gradient of")
        if step < self.step:
            return
        part = self.row.chunk(chunk)
        self._ledger(step).add(replica, chunk, part, values)
        if not values.sum().isfinite() and not values.isfinite().all():
            name = self.row.name_at(part.start + int((~values.isfinite()).nonzero()[0]))
            self._not_finite.setdefault(
                (step, chunk), f"the gradient of {name} on rank {self.rule.ranks[replica]}"
            )

    def is_final(self, step: int) -> bool:
        """Whether the mean of the whole gradient of `step` is there."""
        return step < self.step or self._ledger(step).final

    def missing(self) -> list[int]:
        """The ranks that have not pushed all of the step under way, or else those that have not
        brought a verdict.
        """
        late = self._ledger(self.step).missing()
        late = late or sorted(
            set(range(self.rule.num_replicas)) - self._decided.get(self.step, set())
        )
        return [self.rule.ranks[replica] for replica in late]

    def norms(self, step: int) -> dict[int, float]:
        """The squared norm of the mean gradient of each layer; of a whole parameter at a time, so
        that no cut shows.
        """
        if step != self.step or not self.is_final(step):
            raise TransferError(
                f"the norms of step {step} were asked for where step {self.step} is under way"
            )
        average = self._ledger(step).average
        squares = dict[int, float]()
        for start, parameter in zip(self.row.starts, self.row.parameters, strict=True):
            values = average[start : start + parameter.num_values]
            square = (
                float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
                if parameter.counts
                else 0.0
            )
            squares[parameter.layer] = squares.get(parameter.layer, 0.0) + square
        return squares

    def decide(self, step: int, replica: int, verdict: StepDecision) -> None:
        """Take the verdict as a worker brings it: all have the same. Raises `TransferError` where
        one differs.
        """
        self._check_step(step, f"replica {replica}'s verdict on")
        if step < self.step:
            return
        known = self._verdicts.setdefault(step, verdict)
        if known != verdict:
            raise TransferError(
                f"replica {replica} decided step {step} as {verdict}, the others as {known}"
            )
        self._decided.setdefault(step, set()).add(replica)

    def give(self, step: int, replica: int, chunk: int) -> OutgoingChunk | None:
        """The chunk after `step`, as it goes to a worker; None where something is still missing for
        it.

        With staleness it may be of any later step, or go ahead of one that is as much earlier as
        the bound allows. Raises `NumericError` where the mean is not finite, naming a rank that
        pushed such a gradient.
        """
        self._check_step(step, "a call for the parameters after")
        part = self.row.chunk(chunk)
        if self.step > step:
            if self.step == step + 1 and chunk in self._left:
                return OutgoingChunk(False, self._left[chunk])
            return OutgoingChunk(True, self._held(self.now)[part].clone())
        if self.rule.staleness:
            may_go = self.step + self.rule.staleness > step and self._ledger(step).has(
                replica, chunk
            )
            return OutgoingChunk(True, self._ahead(step, chunk)) if may_go else None
        if not self._can_step(step, chunk):
            return None
        if chunk not in self._stepped:
            self._stepped[chunk] = self._step_chunk(step, chunk)
        whole = not self.rule.lossy_parameters
        return OutgoingChunk(whole, self._stepped[chunk])

    def step_rest(self, step: int) -> None:
        """Step what can be of `step` and nobody has asked for: its chunks reached the workers
        before a restart.
        """
        if step == self.step and not self.rule.staleness:
            for chunk in range(self.row.num_chunks):
                if chunk not in self._stepped and self._can_step(step, chunk):
                    self._stepped[chunk] = self._step_chunk(step, chunk)

    @property
    def complete(self) -> bool:
        """Whether `commit` may come: every replica wants it, and every chunk has been stepped."""
        if len(self._decided.get(self.step, ())) < self.rule.num_replicas:
            return False
        if self._verdicts[self.step].factor is None:
            return True
        return (
            self._ledger(self.step).final
            if self.rule.staleness
            else len(self._stepped) == self.row.num_chunks
        )

    def due(self) -> tuple[StepDecision, torch.Tensor]:
        """The verdict and the mean gradient [N] of the step that `complete` speaks of: what a
        journal writes down.

        Raises `NumericError` as `give` does.
        """
        for chunk in range(
            self.row.num_chunks if self._verdicts[self.step].factor is not None else 0
        ):
            self._check_finite(self.step, chunk)
        return self._verdicts[self.step], self._ledger(self.step).average

    def commit(self) -> None:
        """End the step under way. With staleness it is stepped here, for nobody has asked for its
        chunks before.
        """
        verdict = self._verdicts[self.step]
        if verdict.factor is not None:
            for chunk in range(self.row.num_chunks):
                if chunk not in self._stepped:
                    self._stepped[chunk] = self._step_chunk(self.step, chunk)
            self.now, self._next = self._next, self.now
            self.num_updates += 1
        self._left = self._stepped if self.rule.lossy_parameters else {}
        self._stepped = {}
        self._forget(self.step)
        self.step += 1

    def replay(self, verdict: StepDecision, average: torch.Tensor) -> None:
        """Take a step again from what a journal wrote down: the same bits."""
        if verdict.factor is not None:
            self._ledger(self.step).settle(average)
        self._verdicts[self.step] = verdict
        self.commit()

    def _check_step(self, step: int, what: str) -> None:
        """A worker is at the step under way, or takes what the last one left; with staleness,
        within its bound.
        """
        ahead = self.rule.staleness
        if not self.step - 1 - ahead <= step <= self.step + ahead:
            bound = f" and data_parallel.staleness is {ahead}" if ahead else ""
            raise TransferError(
                f"{what} step {step} came where step {self.step} is under way{bound}"
            )

    def _check_finite(self, step: int, chunk: int) -> None:
        if (step, chunk) in self._not_finite:
            raise NumericError(f"step {step}: {self._not_finite[step, chunk]} is not finite")

    def _ledger(self, step: int) -> GradientSum:
        if step not in self._ledgers:
            average = self._spare.popleft() if self._spare else torch.zeros(self.row.length)
            self._ledgers[step] = GradientSum(self.rule.num_replicas, self.row.num_chunks, average)
        return self._ledgers[step]

    def _forget(self, step: int) -> None:
        if step in self._ledgers:
            self._spare.append(self._ledgers.pop(step).average)
        self._verdicts.pop(step, None)
        self._decided.pop(step, None)
        self._not_finite = {key: who for key, who in self._not_finite.items() if key[0] > step}

    def _can_step(self, step: int, chunk: int) -> bool:
        verdict = self._verdicts.get(step)
        return (
            verdict is not None
            and verdict.factor is not None
            and self._ledger(step).is_final(chunk)
        )

    def _step_chunk(self, step: int, chunk: int) -> torch.Tensor:
        """Make the chunk's next values and moments; returns what goes out of it."""
        verdict = self._verdicts[step]
        part = self.row.chunk(chunk)
        assert verdict.factor is not None
        self._check_finite(step, chunk)
        self._next.copy(part, self.now)
        gradient = self._ledger(step).average[part] * verdict.factor
        self._adamw(self._next.of(part), part, gradient, verdict.learning_rate, self.num_updates)
        if not self.rule.lossy_parameters:
            return self._next.values[part]
        held = self._held(self._next)[part]
        wire = self._codec.encode(self._next.values[part] - held)
        held += self._codec.decode(wire, TensorSpec.of(held))
        return wire

    def _ahead(self, step: int, chunk: int) -> torch.Tensor:
        """The chunk after `step` by what is in of the steps under way. All of them are a worker's
        that asks for it.
        """
        part = self.row.chunk(chunk)
        ahead = StageTensors(*(row.clone() for row in self.now.of(part).rows().values()))
        for later in range(self.step, step + 1):
            self._check_finite(later, chunk)
            gradient = self._ledger(later).so_far(chunk, part)
            rate = self._verdicts[later].learning_rate
            self._adamw(ahead, part, gradient, rate, self.num_updates + later - self.step)
        return ahead.values

    def _adamw(
        self,
        state: StageTensors,
        part: slice,
        gradient: torch.Tensor,
        learning_rate: float,
        num_updates: int,
    ) -> None:
        """Step elements `part` of the row, which `state` and `gradient` hold."""
        for elements, decay in self._decays(part):
            here = slice(elements.start - part.start, elements.stop - part.start)
            values = state.values[here]
            avg = state.exp_avg[here]
            avg_sq = state.exp_avg_sq[here]
            adamw_step(
                values,
                gradient[here],
                avg,
                avg_sq,
                num_updates,
                self.rule.betas,
                learning_rate,
                decay,
            )

    def _decays(self, part: slice) -> list[tuple[slice, float]]:
        """Neighbours in the row that decay alike, together."""
        runs: list[tuple[slice, float]] = []
        for index, elements in self.row.pieces(part):
            decay = self.rule.weight_decay if self.row.parameters[index].decays else 0.0
            if runs and runs[-1][1] == decay:
                runs[-1] = slice(runs[-1][0].start, elements.stop), decay
            else:
                runs.append((elements, decay))
        return runs

    def _held(self, state: StageTensors) -> torch.Tensor:
        return state.values if state.held is None else state.held
