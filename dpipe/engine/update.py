"""The optimizer step: what all ranks agree on before it, and the step itself.

    VOTE   every rank    ballot: loss, its part of each layer's squared gradient norm, a wish to
                         stop, a report
                            |  gather (one round trip to the coordinator)
           every rank    verdict, the same on all: mean loss, norm over all stages, finite or not,
                         stop or not
    STEP   every stage   by the factor that comes of the verdict

With clipping or fp16 the verdict is waited for before the parameters change. Otherwise nobody
waits: it is read one step later, or as many as a parameter server's staleness allows, and what it
asks for (a stop) happens then on every rank. Who steps, and by what, is the data parallelism's
business (`dataparallel/base.py`).
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from dpipe.config.run import TrainConfig
from dpipe.dataparallel.base import DataParallel, Report
from dpipe.engine.ballot import BALLOT, Ballot, RankReport
from dpipe.engine.best import Best
from dpipe.errors import CheckpointError, NumericError, TransferError
from dpipe.ranks import ParallelRanks
from dpipe.stage.base import PipelineStage
from dpipe.stage.stage import Timed

INITIAL_LOSS_SCALE = 2.0**16  # as in torch.amp.GradScaler
# Steps without an overflow before the scale doubles, as in torch.amp.GradScaler.
GROWTH_INTERVAL = 2000
_MAX_COUNT = 1 << 53  # up to which JSON's numbers are whole everywhere


class Gathering(Protocol):
    """The ballots of all ranks, on their way."""

    def wait(self, timeout_s: float) -> Sequence[bytes]:
        """The ballots, by rank."""


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of a step once their ballots are counted."""

    step: int
    loss: float  # the mean of the replicas'
    norm: float | None  # of the gradient over all stages; None where it is not measured
    stop: bool  # whether a rank wishes to stop
    # The first non-finite gradient (rank, parameter), else the non-finite norm or loss.
    culprit: str | None
    reports: tuple[RankReport, ...] = ()  # by rank: what each said of itself
    bad_replicas: tuple[int, ...] = ()  # whose gradient or loss is not finite
    left_out: tuple[int, ...] = ()  # replicas that loss, norm and step are without


class Decision(NamedTuple):
    """What comes of a vote."""

    factor: float | None  # the gradient is multiplied by it; None skips the step on every rank
    verdict: Verdict | None  # the newest; this step's where ranks wait for it, else an older one's


def learning_rate(train: TrainConfig, step: int) -> float:
    """Linear warm-up to `learning_rate`, then decay to `min_learning_rate` at the last step."""
    rising_steps = train.rising_steps
    if step < rising_steps:
        return train.learning_rate * (step + 1) / rising_steps
    decaying_steps = max(1, train.steps - rising_steps)
    done = (step - rising_steps) / decaying_steps
    match train.decay:
        case "none":
            share = 1.0
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * done))
    span = train.learning_rate - train.min_learning_rate
    return train.min_learning_rate + span * share


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018); 1 where the precision needs none."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.value = INITIAL_LOSS_SCALE if dynamic else 1.0
        self.good_steps = 0

    def learn(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            # Below 1 it would make gradients smaller than they are, which is what underflows.
            self.value = max(1.0, self.value / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value *= 2
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        return {"loss_scale": self.value if self.dynamic else None, "good_steps": self.good_steps}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """A run of another precision may have had no scale, or one that this run does not need."""
        scale = numbers.get("loss_scale")
        if not self.dynamic or scale is None:
            return
        if not (type(scale) is float and 0 < scale < math.inf):
            raise CheckpointError(f"the checkpoint's loss_scale is {scale!a:.60}, not a number > 0")
        self.value = scale
        self.good_steps = _count_in(numbers, "good_steps")


class Update:
    """The optimizer steps of one rank, in step with all other ranks: `begin`, `measure`, `vote`,
    and `step` of each stage.

    `gather(key, payload)` exchanges bytes with every rank. A verdict that no step waits for is read
    `lag` steps later, so that no rank is held back by one that is that far behind. With `rejects`
    a verdict that names some replicas, not all, is followed by an exchange and a vote without them.
    `timed(name)` is around each part of a step (`report/timers.py`).
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        train: TrainConfig,
        data_parallel: DataParallel,
        *,
        gather: Callable[[str, bytes], Gathering],
        timeout_s: float,
        here: ParallelRanks = ParallelRanks(),  # noqa: B008 - frozen
        lag: int = 1,
        rejects: bool = False,
        timed: Timed = nullcontext,
    ) -> None:
        self._rejects = rejects
        self._stages = stages
        self._train = train
        self._data_parallel = data_parallel
        self._gather = gather
        self._timeout_s = timeout_s
        self._here = here
        self._waits = train.waits_for_verdict
        self._lag = 0 if self._waits else lag
        self._timed = timed
        self._pending: deque[tuple[int, Gathering]] = deque()
        self.loss_scale = LossScale(train.precision == "fp16")
        self.num_updates = 0
        self.best = Best(train.patience)

    def begin(self, step: int) -> None:
        rate = learning_rate(self._train, step)
        self._data_parallel.begin(step, rate, self.loss_scale.value)

    def measure(self) -> Report:
        """This rank's gradient, for its ballot."""
        with self._timed("optimizer-unscale-and-check-inf"):
            return self._data_parallel.report(measure=self._waits)

    def vote(
        self,
        step: int,
        loss: float | None,
        gradient: Report,
        *,
        stop: bool = False,
        report: Mapping[str, Any] | None = None,
    ) -> Decision:
        """Cast this rank's ballot; `stop` is its wish to end the run, `report` what it says of
        itself. Waits for the verdict where the update needs it.

        Raises `NumericError` where a verdict that has come names something that is not finite, and
        no loss scale can be lowered for it.
        """
        norms = {str(layer): square for layer, square in gradient.squares.items()}
        ballot = {
            # The ranks of a tensor-parallel group all have it, and it must count once.
            "loss": loss if self._here.tp_rank == 0 else None,
            "norms": norms,
            "bad": gradient.bad,
            "stop": stop,
            "report": report or {},
        }
        with self._timed("optimizer-clip-main-grad"):
            self._cast(step, f"step/{step}", ballot)
            verdict = None
            if len(self._pending) > self._lag:
                verdict = self._collect()
        if verdict is not None and self._may_leave_out(verdict):
            verdict = self._vote_again(verdict, ballot)
        if verdict is not None:
            self._refuse(verdict)
        if self._waits and verdict is not None:
            return Decision(self._factor(verdict), verdict)
        return Decision(1.0, verdict)

    def _cast(self, step: int, key: str, ballot: Mapping[str, Any]) -> None:
        self._pending.append((step, self._gather(key, json.dumps(ballot).encode())))

    def _may_leave_out(self, verdict: Verdict) -> bool:
        return self._rejects and 0 < len(verdict.bad_replicas) < self._here.dp_size

    def _vote_again(self, verdict: Verdict, ballot: Mapping[str, Any]) -> Verdict:
        """On the mean without the bad replicas. All ranks have read one verdict, and all come
        here.
        """
        step = verdict.step
        self._data_parallel.leave_out(verdict.bad_replicas)
        # Of the mean of the rest: by the norm with the others in it nobody could clip.
        gradient = self.measure()
        norms = {str(layer): square for layer, square in gradient.squares.items()}
        with self._timed("optimizer-clip-main-grad"):
            again = {**ballot, "norms": norms, "bad": gradient.bad}
            self._cast(step, f"step/{step}/again", again)
            return self._collect(left_out=verdict.bad_replicas)

    def step(self, stage: int, factor: float | None) -> bool:
        """Take the optimizer's step of one stage; whether its parameters change."""
        with self._timed("optimizer-inner-step"):
            changed = self._data_parallel.step(stage, factor)
        self._stages[stage].zero_grad()
        return changed

    def drain(self) -> list[Verdict]:
        """Between steps: wait for the verdicts that nobody has waited for yet."""
        verdicts = [self._collect() for _ in range(len(self._pending))]
        for verdict in verdicts:
            self._refuse(verdict)
        return verdicts

    def state(self, *, alone: bool = False) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """For a checkpoint: plain numbers, and this rank's part of the optimizer's state by
        layer-global name; `alone`: all that one replica needs (`DataParallel.whole_state`).

        Parameters are final when it returns.
        """
        for stage in self._stages:
            self._data_parallel.finish(stage)
        numbers: dict[str, Any] = {"num_updates": self.num_updates}
        numbers |= self.loss_scale.state()
        numbers |= self.best.state()
        replicas = self._data_parallel
        return numbers, replicas.whole_state() if alone else replicas.state()

    def restore(self, numbers: Mapping[str, Any], moments: Mapping[str, torch.Tensor]) -> None:
        self.num_updates = _count_in(numbers, "num_updates")
        self.loss_scale.restore(numbers)
        self.best.restore(numbers)
        self._data_parallel.restore(self.num_updates, moments)

    def _factor(self, verdict: Verdict) -> float | None:
        """Clip; an overflow skips the step on every rank."""
        overflow = verdict.culprit is not None
        self.loss_scale.learn(overflow)
        if overflow:
            return None
        if self._train.clip_norm == 0 or verdict.norm is None:
            return 1.0
        # As torch.nn.utils.clip_grad_norm_ has it, 1e-6 and all.
        return min(1.0, self._train.clip_norm / (verdict.norm + 1e-6))

    def _collect(self, left_out: tuple[int, ...] = ()) -> Verdict:
        """The oldest verdict that is out."""
        step, gathering = self._pending.popleft()
        payloads = gathering.wait(self._timeout_s)
        what = f"its ballot of step {step}"
        ballots = []
        for rank, payload in enumerate(payloads):
            ballots.append(BALLOT.parse(payload, what, rank))
        independent = self._data_parallel.independent
        return count(step, ballots, self._here, independent=independent, left_out=left_out)

    def _refuse(self, verdict: Verdict) -> None:
        """Raises `NumericError` for a culprit that no lower loss scale helps against."""
        if verdict.culprit is not None and not self.loss_scale.dynamic:
            raise NumericError(
                f"step {verdict.step}: {verdict.culprit} is not finite; lower "
                "train.learning_rate, clip with train.clip_norm, or resume from the last checkpoint"
            )


def _count_in(numbers: Mapping[str, Any], key: str) -> int:
    """Raises `CheckpointError` if the state of a checkpoint has no count there."""
    value = numbers.get(key)
    # `type`, not isinstance: True is an int too.
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise CheckpointError(f"the checkpoint's {key} is {value!a:.60}, not a count")
    return value


def count(
    step: int,
    ballots: Sequence[Ballot],
    here: ParallelRanks = ParallelRanks(),  # noqa: B008 - frozen
    *,
    independent: bool = False,
    left_out: tuple[int, ...] = (),
) -> Verdict:
    """The verdict of a step's ballots, by rank, about the mean without the replicas `left_out`.

    Norms are added in layer order, so that no cut changes a bit, and within a layer in the order of
    ranks. The norm is over all ranks, or, where replicas are `independent`, over the ranks of this
    one. The loss is the replicas' mean. Raises `TransferError` where not one rank of each replica
    reports a loss.
    """
    reporting = [rank for rank, ballot in enumerate(ballots) if ballot.loss is not None]
    if len(reporting) != here.dp_size:
        raise TransferError(
            f"step {step}: {len(reporting)} ranks report a loss (by rank: {reporting}), where one "
            f"of each of {here.dp_size} replicas does"
        )
    replica_of = [here.replica_of(rank) for rank in range(len(ballots))]
    losses = [
        ballot.loss
        for replica, ballot in zip(replica_of, ballots, strict=True)
        if ballot.loss is not None and replica not in left_out
    ]
    loss = sum(losses) / len(losses)
    bad = {replica_of[rank] for rank, ballot in enumerate(ballots) if not _is_well(ballot)}
    own = ballots
    if independent:
        own = [ballots[rank] for rank in here.replica_ranks]
    squares = _squares_by_layer(own)
    norm = None
    if squares:
        norm = math.sqrt(sum(squares[layer] for layer in sorted(squares)))
    return Verdict(
        step=step,
        loss=loss,
        norm=norm,
        stop=any(ballot.stop for ballot in ballots),
        culprit=_culprit(ballots, loss),
        reports=tuple(ballot.report for ballot in ballots),
        bad_replicas=tuple(sorted(bad)),
        left_out=left_out,
    )


def _is_well(ballot: Ballot) -> bool:
    return ballot.bad is None and math.isfinite(ballot.loss or 0.0)


def _squares_by_layer(ballots: Iterable[Ballot]) -> dict[int, float]:
    squares: dict[int, float] = {}
    for ballot in ballots:
        for layer, value in ballot.norms.items():
            squares[layer] = squares.get(layer, 0.0) + value
    return squares


def _culprit(ballots: Sequence[Ballot], loss: float) -> str | None:
    """What is not finite: a rank's own gradient, else an average that overflowed, else the loss."""
    for rank, ballot in enumerate(ballots):
        if ballot.bad is not None:
            return f"the gradient of {ballot.bad} on rank {rank}"
    squares = _squares_by_layer(ballots)
    for layer in sorted(squares):
        if not math.isfinite(squares[layer]):
            return f"the gradient of layer {layer}"
    return None if math.isfinite(loss) else "the loss"
