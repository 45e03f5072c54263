"""The parameter server's copy of one stage (Li et al. 2014): fp32 parameters, AdamW's moments, and
the step in progress.

    add()      chunks of the gradient come in and are averaged, each by itself
    decide()   the workers' decision: the factor of the gradient, or that the step is skipped
    give()     a chunk whose mean is final and decided is stepped, beside the old one, and goes out
    commit()   all chunks have been stepped: the new ones replace the old ones, all or none

              step 7 in progress                       committed: step 8
    now   [ old | old | old | old ]     swap           [ new | new | new | new ]
    next  [ new | new |     |     ]    ------>         (what comes next)

A worker that dies in between has changed nothing: `now` is what it was after the last commit.

With staleness the workers may push several steps before the slowest has pushed the first; each step
still takes the mean of all replicas. Until then a worker gets what the steps in progress would make
of `now` by the gradients that are in, its own among them (read-my-writes, Ho et al. 2013): it then
computes its next gradient near where that will be applied (`dataparallel/ahead.py`).

Pure: no thread, no clock, no I/O. Whoever uses it from several threads holds a lock.
"""

from collections import deque
from dataclasses import dataclass

import torch

from dpipe.errors import NumericError, TransferError
from dpipe.optimizers.adamw import adamw_step
from dpipe.paramserver.gradient_sum import GradientSum
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.wire.codec import codec
from dpipe.wire.spec import TensorSpec


@dataclass(frozen=True)
class StepDecision:
    """The learning rate and the gradient's factor, as all workers agree; None skips the step."""

    learning_rate: float
    factor: float | None


@dataclass
class StageTensors:
    """A stage's vectors, fp32 [N] each."""

    values: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    # the parameters as the workers have them, where a lossy wire makes that another vector
    held: torch.Tensor | None = None

    def by_name(self) -> dict[str, torch.Tensor]:
        vectors = {
            "values": self.values,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }
        if self.held is not None:
            vectors["held"] = self.held
        return vectors

    @classmethod
    def zeros(cls, length: int, *, lossy: bool) -> "StageTensors":
        tensors = cls(
            torch.zeros(length),
            torch.zeros(length),
            torch.zeros(length),
        )
        if lossy:
            tensors.held = torch.zeros(length)
        return tensors

    def of(self, part: slice) -> "StageTensors":
        """Elements `part`, in the same memory."""
        vectors = self.by_name().values()
        return StageTensors(*(vector[part] for vector in vectors))

    def copy(self, part: slice, source: "StageTensors") -> None:
        """Set elements `part` to those of `source`."""
        sources = source.by_name()
        for name, vector in self.by_name().items():
            vector[part] = sources[name][part]

    @property
    def on_workers(self) -> torch.Tensor:
        """The parameters as the workers have them."""
        return self.values if self.held is None else self.held


@dataclass(frozen=True)
class OutgoingChunk:
    """A chunk on its way to the workers: its values if `whole`, else what they add to theirs."""

    whole: bool
    wire: torch.Tensor


class StageState:
    """See above. `step` is the one that comes next: all before it are committed."""

    def __init__(
        self,
        spec: FlatSpec,
        rule: StepRule,
        tensors: StageTensors,
        *,
        step: int,
        num_updates: int,
    ) -> None:
        self.spec = spec
        self.rule = rule
        self.now = tensors
        self.step = step
        self.num_updates = num_updates
        self._next = StageTensors.zeros(spec.length, lossy=rule.lossy_parameters)
        self._codec = codec(rule.wire)
        self._gradients: dict[int, GradientSum] = {}  # by step
        self._decisions: dict[int, StepDecision] = {}
        self._decided: dict[int, set[int]] = {}  # the replicas that have brought the decision
        # by step and chunk: who pushed a value that is not finite
        self._not_finite: dict[tuple[int, int], str] = {}
        # chunks of the step in progress, as they go out
        self._stepped: dict[int, torch.Tensor] = {}
        # chunks of the last committed step, as they went out
        self._last_sent: dict[int, torch.Tensor] = {}
        self._spare: deque[torch.Tensor] = deque()  # memory of gradients that are done with

    def add(
        self,
        step: int,
        replica: int,
        chunk: int,
        values: torch.Tensor,
    ) -> None:
        """Take a replica's chunk of the gradient. One of a committed step, or one that is in
        already, changes nothing.

        Raises `TransferError` for a step that cannot be in progress, or a chunk that does not fit.
        """
        self._check_step(step, f"replica {replica}'s gradient of")
        if step < self.step:
            return
        part = self.spec.chunk(chunk)
        self._gradient(step).add(replica, chunk, part, values)
        # The sum is the cheaper test; as finite values can overflow it, it does not decide.
        if not values.sum().isfinite() and not values.isfinite().all():
            first = int((~values.isfinite()).nonzero()[0])
            name = self.spec.name_at(part.start + first)
            who = f"the gradient of {name} on rank {self.rule.ranks[replica]}"
            self._not_finite.setdefault((step, chunk), who)

    def is_final(self, step: int) -> bool:
        """Whether the mean of the whole gradient of `step` is there."""
        return step < self.step or self._gradient(step).final

    def missing(self) -> list[int]:
        """The ranks whose chunks are missing in this step; if none, those whose decision is."""
        late = self._gradient(self.step).missing()
        if not late:
            decided = self._decided.get(self.step, set())
            late = sorted(set(range(self.rule.num_replicas)) - decided)
        return [self.rule.ranks[replica] for replica in late]

    def norms(self, step: int) -> dict[int, float]:
        """By layer, the squared norm of the mean gradient, whatever the chunk size."""
        if step != self.step or not self.is_final(step):
            raise TransferError(
                f"the norms of step {step} were asked for where step {self.step} is in progress"
            )
        average = self._gradient(step).average
        squares: dict[int, float] = {}
        for start, parameter in zip(self.spec.starts, self.spec.parameters, strict=True):
            square = 0.0
            if parameter.counts:
                values = average[start : start + parameter.num_values]
                square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            squares[parameter.layer] = squares.get(parameter.layer, 0.0) + square
        return squares

    def decide(self, step: int, replica: int, decision: StepDecision) -> None:
        """Take a worker's decision. Raises `TransferError` where it differs from the others'."""
        self._check_step(step, f"replica {replica}'s decision on")
        if step < self.step:
            return
        # Every worker brings the same one, so that no particular one has to be there.
        known = self._decisions.setdefault(step, decision)
        if known != decision:
            raise TransferError(
                f"replica {replica} decided step {step} as {decision}, the others as {known}"
            )
        self._decided.setdefault(step, set()).add(replica)

    def give(self, step: int, replica: int, chunk: int) -> OutgoingChunk | None:
        """The chunk after `step`, as it goes to a worker; None where something is still missing
        for it.

        With staleness it may be of any later step, or lead by as many steps as the bound allows.
        Raises `NumericError` where the mean is not finite, naming a rank that pushed such a
        gradient.
        """
        self._check_step(step, "a call for the parameters after")
        if self.step > step:
            return self._committed_chunk(step, chunk)
        if self.rule.staleness:
            may_lead = self.step + self.rule.staleness > step
            if not may_lead or not self._gradient(step).has(replica, chunk):
                return None
            return OutgoingChunk(True, self._look_ahead(step, chunk))
        if not self._can_step(step, chunk):
            return None
        if chunk not in self._stepped:
            self._stepped[chunk] = self._step_chunk(step, chunk)
        return OutgoingChunk(not self.rule.lossy_parameters, self._stepped[chunk])

    def step_rest(self, step: int) -> None:
        """Step the chunks that nobody asks for: they reached the workers before a restart."""
        if step != self.step or self.rule.staleness:
            return
        for chunk in range(self.spec.num_chunks):
            if chunk not in self._stepped and self._can_step(step, chunk):
                self._stepped[chunk] = self._step_chunk(step, chunk)

    @property
    def complete(self) -> bool:
        """Whether `commit` may come: every replica wants it, and every chunk can be replaced."""
        if len(self._decided.get(self.step, ())) < self.rule.num_replicas:
            return False
        if self._decisions[self.step].factor is None:
            return True
        if self.rule.staleness:
            return self._gradient(self.step).final
        return len(self._stepped) == self.spec.num_chunks

    def completed_step(self) -> tuple[StepDecision, torch.Tensor]:
        """The decision and the mean gradient [N] of the step that is `complete`: what a journal
        writes down.

        Raises `NumericError` as `give` does.
        """
        decision = self._decisions[self.step]
        if decision.factor is not None:
            for chunk in range(self.spec.num_chunks):
                self._check_finite(self.step, chunk)
        return decision, self._gradient(self.step).average

    def commit(self) -> None:
        """End the step. With staleness it is taken here: nobody has asked for its chunks."""
        decision = self._decisions[self.step]
        if decision.factor is not None:
            for chunk in range(self.spec.num_chunks):
                if chunk not in self._stepped:
                    self._stepped[chunk] = self._step_chunk(self.step, chunk)
            # The old tensors become the memory of the next step.
            stepped = self._next
            self._next = self.now
            self.now = stepped
            self.num_updates += 1
        # Rounded differences cannot be made again from what is committed: kept for a repetition.
        self._last_sent = self._stepped if self.rule.lossy_parameters else {}
        self._stepped = {}
        self._forget(self.step)
        self.step += 1

    def replay(self, decision: StepDecision, average: torch.Tensor) -> None:
        """Take a step again from what a journal wrote down: the same bits."""
        if decision.factor is not None:
            self._gradient(self.step).set_average(average)
        self._decisions[self.step] = decision
        self.commit()

    def _check_step(self, step: int, what: str) -> None:
        """Raises `TransferError` for a step that is neither the last, nor within the bound."""
        bound = self.rule.staleness
        # The last steps too: a worker repeats its call until it has heard of the commit.
        if self.step - 1 - bound <= step <= self.step + bound:
            return
        note = f" and data_parallel.staleness is {bound}" if bound else ""
        raise TransferError(f"{what} step {step} came where step {self.step} is in progress{note}")

    def _check_finite(self, step: int, chunk: int) -> None:
        if (step, chunk) in self._not_finite:
            raise NumericError(f"step {step}: {self._not_finite[step, chunk]} is not finite")

    def _gradient(self, step: int) -> GradientSum:
        if step not in self._gradients:
            average = self._spare.popleft() if self._spare else torch.zeros(self.spec.length)
            self._gradients[step] = GradientSum(
                self.rule.num_replicas,
                self.spec.num_chunks,
                average,
            )
        return self._gradients[step]

    def _forget(self, step: int) -> None:
        if step in self._gradients:
            self._spare.append(self._gradients.pop(step).average)
        self._decisions.pop(step, None)
        self._decided.pop(step, None)
        for other, chunk in list(self._not_finite):
            if other <= step:
                del self._not_finite[other, chunk]

    def _committed_chunk(self, step: int, chunk: int) -> OutgoingChunk:
        """As it went out to the others, if `step` was the last; else as it is now."""
        if self.step == step + 1 and chunk in self._last_sent:
            return OutgoingChunk(False, self._last_sent[chunk])
        part = self.spec.chunk(chunk)
        # Copied: it is sent after the lock is given back.
        return OutgoingChunk(True, self.now.on_workers[part].clone())

    def _can_step(self, step: int, chunk: int) -> bool:
        decision = self._decisions.get(step)
        if decision is None or decision.factor is None:
            return False
        return self._gradient(step).is_final(chunk)

    def _step_chunk(self, step: int, chunk: int) -> torch.Tensor:
        """Make the chunk's next values and moments; returns what goes out of it."""
        decision = self._decisions[step]
        part = self.spec.chunk(chunk)
        assert decision.factor is not None, "a skipped step changes no chunk"
        self._check_finite(step, chunk)
        # AdamW steps in place, and `now` is not to change before the commit.
        self._next.copy(part, self.now)
        gradient = self._gradient(step).average[part] * decision.factor
        self._adamw(
            self._next.of(part),
            part,
            gradient,
            decision.learning_rate,
            self.num_updates,
        )
        if not self.rule.lossy_parameters:
            return self._next.values[part]
        # What rounding takes from this difference stays between `held` and `values`, and is in the
        # next one.
        held = self._next.on_workers[part]
        wire = self._codec.encode(self._next.values[part] - held)
        held += self._codec.decode(wire, TensorSpec.of(held))
        return wire

    def _look_ahead(self, step: int, chunk: int) -> torch.Tensor:
        """The chunk after `step`, by the gradients that are in; the caller's own are all in."""
        part = self.spec.chunk(chunk)
        vectors = self.now.of(part).by_name().values()
        ahead = StageTensors(*(vector.clone() for vector in vectors))  # never committed
        for later in range(self.step, step + 1):
            self._check_finite(later, chunk)
            gradient = self._gradient(later).so_far(chunk, part)
            rate = self._decisions[later].learning_rate
            num_updates = self.num_updates + later - self.step
            self._adamw(ahead, part, gradient, rate, num_updates)
        return ahead.values

    def _adamw(
        self,
        tensors: StageTensors,
        part: slice,
        gradient: torch.Tensor,
        learning_rate: float,
        num_updates: int,
    ) -> None:
        """Step elements `part` of the stage, which `tensors` and `gradient` hold."""
        for elements, weight_decay in self._decays(part):
            here = slice(elements.start - part.start, elements.stop - part.start)
            adamw_step(
                tensors.values[here],
                gradient[here],
                tensors.exp_avg[here],
                tensors.exp_avg_sq[here],
                num_updates,
                self.rule.betas,
                learning_rate,
                weight_decay,
            )

    def _decays(self, part: slice) -> list[tuple[slice, float]]:
        """Runs of `part` that have one weight decay: elements and decay."""
        # Put together, so that AdamW gets few long pieces and not one for each parameter.
        runs: list[tuple[slice, float]] = []
        for index, elements in self.spec.pieces(part):
            decays = self.spec.parameters[index].decays
            weight_decay = self.rule.weight_decay if decays else 0.0
            if runs and runs[-1][1] == weight_decay:
                first, _ = runs.pop()
                elements = slice(first.start, elements.stop)
            runs.append((elements, weight_decay))
        return runs
