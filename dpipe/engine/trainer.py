"""The training loop of one rank.

each step                  data -> executor (schedule, stages, links) -> vote -> step -> metrics
every `eval_every` steps   held-out loss, by the same executor on a forward-only schedule; also
                           before the first step and after the last
every `checkpoint_every`   a checkpoint; also when asked to stop, and at the end
"""

import logging
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dpipe.config.run import RunConfig, TrainConfig
from dpipe.coordinator.base import Coordination, relayed_links
from dpipe.coordinator.limits import UPLOADS
from dpipe.data.batch import Batch
from dpipe.data.feed import Feed
from dpipe.dataparallel.base import DataParallel
from dpipe.engine.ballot import SCORES, RankReport
from dpipe.engine.executor import Executor, StepResult
from dpipe.engine.recorder import Recorder
from dpipe.engine.update import Update, Verdict, learning_rate
from dpipe.errors import TransferError
from dpipe.ranks import ParallelRanks
from dpipe.report.processor_time import cpu_now
from dpipe.report.rows import OnRow
from dpipe.report.timers import Timers
from dpipe.report.trace import StepSpans, dump_steps
from dpipe.schedule.action import Action, Op
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.two_versions import closing, opening
from dpipe.stage.base import PipelineStage
from dpipe.store import checkpoint
from dpipe.store.checkpoint_part import PART
from dpipe.store.identity import RunIdentity
from dpipe.store.tensor_shards import as_slices, first_buffers, whole_parameters
from dpipe.streams import HOST, Streams
from dpipe.timeline.span import Lane, Span

LOG = logging.getLogger("dpipe")


@dataclass(frozen=True)
class Job:
    """What one rank trains, and with what."""

    here: ParallelRanks  # this rank among the others
    train: TrainConfig  # steps, batches and the optimizer's settings
    run: RunConfig  # what is written, where, and how often
    context: int  # tokens of a sequence
    configuration: Mapping[str, Any]  # of the run, as it is kept in a checkpoint
    schedule: Schedule  # of a training step, lowered
    eval_schedule: Schedule  # forward only
    stages: Mapping[int, PipelineStage]  # those of this rank, by stage
    executor: Executor  # runs programs over the stages and the links
    recorder: Recorder  # has the spans of what the executor does
    data_parallel: DataParallel  # exchanges gradients with the other replicas
    update: Update  # measures, votes and steps
    feed: Feed  # a step's data
    coordinator: Coordination  # the other ranks, for what is no tensor
    timeout_s: float  # of every wait for the other ranks
    checkpoint_url: str | None  # None where there is nothing to keep (replay)
    wants_stop: Callable[[], bool]  # whether a signal has asked for the end
    identity: RunIdentity  # kept in each checkpoint
    on_row: OnRow | None = None  # rank 0: takes each row of metrics
    streams: Streams = HOST  # of the device
    # MFU of a step of so many seconds; None where it is not known
    utilisation: Callable[[float], float | None] = lambda seconds: None
    saves_when_stopped: bool = True
    # With how many steps done, and the newest verdict, once each step has been taken
    after_step: Callable[[int, Verdict | None], None] = lambda next_step, verdict: None
    # The newest step before which this rank's state is held elsewhere too; None: there is none
    guarded: Callable[[], int | None] = lambda: None


class Trainer:
    """Trains from `first_step` (0, or where a checkpoint left off) to `train.steps`, or until a
    rank asks to stop.
    """

    def __init__(self, job: Job, first_step: int = 0, *, evaluates_first: bool = True) -> None:
        self.job = job
        self.next_step = first_step
        self.updating = False  # whether some of the state is before `next_step`, and some after it
        self._evaluates_first = evaluates_first
        self._ahead = False  # whether some of `next_step` has been done by the program before
        self._ends = False  # whether the run stops after the step that is under way
        self._batches: dict[int, Batch] = {}
        # With each step what rank 0's clock was ahead by.
        self._traces: deque[tuple[StepSpans, float]] = deque(maxlen=job.run.trace_steps)
        self._vote, *self._steps = job.schedule.vote_and_steps(job.here.pp_rank)
        self._timers = Timers()
        # How long each step took whose verdict is not known yet.
        self._step_s: dict[int, float] = {}
        # When the step began by what it is timed from: where the one before was timed, so that the
        # log of that one is in it.
        self._began = time.perf_counter()

    def run(self) -> bool:
        """Train. Returns whether it stopped before the end; every rank stops after the same
        step.
        """
        job = self.job
        stopped = False
        if self._evaluates_first:
            self._evaluate()
        self._began = time.perf_counter()
        while self.next_step < job.train.steps and not stopped:
            verdict = self._one_step(self.next_step)
            self._ends |= verdict is not None and verdict.stop
            # A step that has been begun is ended first.
            stopped = self._ends and not self._ahead
            job.after_step(self.next_step, verdict)
            ended = self.next_step == job.train.steps
            saves = ended or self._is_due(job.run.checkpoint_every)
            # A run that is stopped has little time; the one that continues it evaluates first.
            evaluates = self._is_due(job.train.eval_every) and not stopped
            if ended or evaluates:
                saves |= self._is_best(self._evaluate())
                stopped = self._gives_up(ended=ended)
                self._began = time.perf_counter()
            if stopped or saves:
                # Verdicts first: a step that was not finite must not be saved.
                stopped |= self._hear_verdicts()
                if saves or job.saves_when_stopped:
                    self._save()
                self._began = time.perf_counter()
        if self._traces:
            self._upload_traces()
        return self.next_step < job.train.steps

    def _is_best(self, loss: float | None) -> bool:
        """Whether a checkpoint is to be kept for its held-out loss."""
        if loss is None:
            return False
        best = self.job.update.best
        return best.hear(self.next_step, loss) and self.job.run.keep_best

    def _gives_up(self, *, ended: bool) -> bool:
        """Whether the held-out loss has not fallen for too long. All ranks have heard the same."""
        best = self.job.update.best
        if ended or not best.gives_up:
            return False
        LOG.info(
            "the held-out loss has not fallen below %.4f for %d evaluations (train.patience): the "
            "run ends before step %d",
            best.loss,
            best.waited,
            self.next_step,
        )
        return True

    def _upload_traces(self) -> None:
        """Give rank 0 the spans of the last steps, as many as an upload takes."""
        steps = []
        for step, clock_us in self._traces:
            # Onto rank 0's clock, so that the spans of all ranks make one timeline.
            spans = tuple(span.later(clock_us) for span in step.spans)
            steps.append(replace(step, spans=spans))
        content = dump_steps(steps)
        while len(content) > UPLOADS["trace"] and len(steps) > 1:
            # Halved: how large a step is when written is known only once it is.
            steps = steps[-(len(steps) // 2) :]
            content = dump_steps(steps)
        if len(steps) < len(self._traces):
            LOG.warning(
                "the trace has the last %d of run.trace_steps %d: an upload takes at most %d bytes",
                len(steps),
                self.job.run.trace_steps,
                UPLOADS["trace"],
            )
        self.job.coordinator.upload("trace", content)

    def _one_step(self, step: int) -> Verdict | None:
        """One step; returns the newest verdict that is known."""
        job = self.job
        cpu_began = cpu_now()
        result = self._compute(step)
        verdict = self._vote_and_step(step, result)
        # Again: the optimizer step may have exchanged parameters since the vote's report.
        self._record_exchange()
        spans = (*result.spans, *job.recorder.take())
        self._timers.add(spans, job.recorder.take_parts())
        now = time.perf_counter()
        self._step_s[step] = now - self._began
        self._began = now
        if verdict is not None:
            # Its span is among those of the next step, which begins this much later.
            with job.recorder.span(Lane.BETWEEN, self._vote):
                self._log(verdict)
        cpu = cpu_now().since(cpu_began)
        clock_us = job.coordinator.clock_offset_ns / 1e3
        self._traces.append((StepSpans(step, spans, cpu), clock_us))
        return verdict

    def _compute(self, step: int) -> StepResult:
        """All of `step` up to its vote. Where steps overlap, also some of the next one, unless the
        pipeline has to be empty behind this one.
        """
        job = self.job
        schedule = job.schedule
        overlaps = schedule.runs_ahead
        opened: tuple[Span, ...] = ()
        batch = self._batch(step)
        if overlaps and not self._ahead:
            # In the place of the step before, which did nothing of this one.
            self._begin_step(step - 1)
            begun = job.executor.run(opening(schedule), batch, batch)
            opened = begun.spans
        self._begin_step(step)
        job.update.begin(step)
        self._ahead = overlaps and not self._pauses_after(step)
        next_batch = None
        if self._ahead:
            next_batch = self._batch(step + 1)
        else:
            # Nothing of a next step: all that is under way belongs to this one.
            schedule = closing(schedule)
        result = job.executor.run(schedule, batch, next_batch)
        spans = opened + result.spans
        return replace(result, spans=spans)

    def _begin_step(self, step: int) -> None:
        scale = self.job.update.loss_scale.value
        for stage in self.job.stages.values():
            stage.begin_step(step, scale)

    def _batch(self, step: int) -> Batch:
        job = self.job
        if step not in self._batches:
            between = job.recorder.span(Lane.BETWEEN, self._vote)
            with job.recorder.part("batch-generator"), between:
                self._batches[step] = job.feed.training(step)
        # Of the step before nobody asks again.
        self._batches.pop(step - 1, None)
        return self._batches[step]

    def _pauses_after(self, step: int) -> bool:
        """Whether something happens behind `step` for which the pipeline has to be empty."""
        job = self.job
        following = step + 1
        if self._ends or following == job.train.steps:
            return True
        saves = _is_multiple(following, job.run.checkpoint_every)
        evaluates = _is_multiple(following, job.train.eval_every)
        return saves or evaluates

    def _vote_and_step(self, step: int, result: StepResult) -> Verdict | None:
        """The end of the program; returns the newest verdict that is known."""
        job = self.job
        vote = self._vote
        with job.executor.doing(vote, job.schedule):
            with job.recorder.span(Lane.UPDATE, vote):
                gradient = job.update.measure()
            seconds = time.perf_counter() - self._began
            report = self._report(step, seconds, result)
            stop = job.wants_stop()
            with job.recorder.span(Lane.WAIT, vote):
                decision = job.update.vote(
                    step,
                    result.loss,
                    gradient,
                    stop=stop,
                    report=report,
                )
        self.updating = True
        changed = False
        for action in self._steps:
            doing = job.executor.doing(action, job.schedule)
            with doing, job.recorder.span(Lane.UPDATE, action):
                changed |= job.update.step(action.stage, decision.factor)
        # Once a step, however many stages live here: it counts the optimizer's steps.
        job.update.num_updates += changed
        self.next_step += 1
        self.updating = False
        return decision.verdict

    def _hear_verdicts(self) -> bool:
        """Wait for the verdicts that are still to come; returns whether the ranks have agreed to
        stop.
        """
        verdicts = self.job.update.drain()
        for verdict in verdicts:
            self._log(verdict)
        return any(verdict.stop for verdict in verdicts)

    def _record_exchange(self) -> Counter[int | str]:
        """What the replicas of each stage have exchanged since the last call; with a delay, for the
        gradients of the step before. Returns the bytes sent to each peer.
        """
        sent_bytes: Counter[int | str] = Counter()
        for message in self.job.data_parallel.traffic():
            action = Action(message.stage, Op.REDUCE_GRAD)
            peer = None
            if not message.received:
                peer = message.peer
                sent_bytes[peer] += message.moved.num_bytes
            self.job.recorder.moved(Lane.REDUCE, action, message.moved, peer)
        return sent_bytes

    def _report(self, step: int, seconds: float, result: StepResult) -> dict[str, Any]:
        """What this rank says of its step when it casts its ballot: all its compute is done by
        then.
        """
        streams = self.job.streams
        sent_bytes = self._record_exchange()
        sent_bytes.update(result.sent_bytes)
        computing = [span.duration_us for span in result.spans if span.lane is Lane.COMPUTE]
        mb_per_s: dict[str, float] = {}
        for peer, num_bytes in sent_bytes.items():
            mb_per_s[f"{self.job.here.rank}->{peer}"] = num_bytes / 1e6 / seconds
        peak_bytes = streams.peak_bytes()
        shown = step % self.job.run.log_every == 0
        return {
            "step_s": seconds,
            "bubble": 1 - sum(computing) / 1e6 / seconds,
            "mb_per_s": mb_per_s,
            # The peak; Linux counts in KiB.
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            "optimizer_mb": self.job.data_parallel.optimizer_bytes / 1e6,
            "gpu_memory_mb": None if peak_bytes is None else peak_bytes / 1e6,
            # Only where a row will show it: the driver is asked for it.
            "gpu_use_percent": streams.use_percent() if shown else None,
            "guarded": self.job.guarded(),
        }

    def _log(self, verdict: Verdict) -> None:
        """Log every `log_every`-th step, the last, and each that left replicas out, on every rank;
        on rank 0 write its row.
        """
        seconds = self._step_s.pop(verdict.step)
        if verdict.culprit is not None:
            LOG.warning(
                "step %d skipped: %s overflowed; loss scale halved", verdict.step, verdict.culprit
            )
        if verdict.left_out:
            LOG.warning(
                "step %d left out %s, whose gradient or loss was not finite; the mean is that of "
                "the other %d",
                verdict.step,
                ", ".join(f"replica {replica}" for replica in verdict.left_out),
                self.job.here.dp_size - len(verdict.left_out),
            )
        last = verdict.step + 1 >= self.job.train.steps
        if verdict.step % self.job.run.log_every and not (last or verdict.left_out):
            return
        ms_per_sample = seconds / self.job.train.batch_size * 1e3
        LOG.info("step %d loss %.4f, %.2f ms a sample", verdict.step, verdict.loss, ms_per_sample)
        LOG.info("%s", self._timers.line())
        if self.job.on_row is not None:
            self.job.on_row(self._row(verdict, seconds))

    def _row(self, verdict: Verdict, seconds: float) -> dict[str, Any]:
        """A row of metrics; what differs between ranks is by rank, or by link."""
        train = self.job.train
        reports = verdict.reports
        rates: dict[str, float] = {}
        for report in reports:
            rates |= report.mb_per_s
        row: dict[str, Any] = {
            "step": verdict.step,
            "loss": verdict.loss,
            "learning_rate": learning_rate(train, verdict.step),
            "grad_norm": verdict.norm,
            "loss_scale": self.job.update.loss_scale.value,
            "step_s": seconds,
            "ms_per_sample": seconds / train.batch_size * 1e3,
            "tokens_per_s": train.batch_size * self.job.context / seconds,
            "bubble": _mean([report.bubble for report in reports]),
            "compute_ms": {
                str(rank): (1 - report.bubble) * seconds * 1e3
                for rank, report in enumerate(reports)
            },
            "mb_per_s": rates,
            "memory_mb": _by_rank(reports, "memory_mb"),
            "optimizer_mb": _by_rank(reports, "optimizer_mb"),
        }
        # On CPUs there is nothing of what follows.
        for name in ("gpu_memory_mb", "gpu_use_percent"):
            by_rank = _by_rank(reports, name)
            if by_rank:
                row[name] = by_rank
        relayed = relayed_links(rates, self.job.coordinator.relayed)
        if relayed:
            row["relayed"] = relayed
        if verdict.left_out:
            row["left_out"] = list(verdict.left_out)
        utilisation = self.job.utilisation(seconds)
        if utilisation is not None:
            row["mfu"] = utilisation
        return row

    def _is_due(self, every: int | None) -> bool:
        return _is_multiple(self.next_step, every)

    def _evaluate(self) -> float | None:
        """Log the held-out loss before `next_step` on every rank, and return it; None without
        `eval_every`.
        """
        job = self.job
        step = self.next_step
        if job.train.eval_every is None:
            return None
        scores: dict[str, list[float]] = {"losses": [], "accuracies": []}
        for index in range(job.train.eval_batches):
            batch = job.feed.held_out(index)
            result = job.executor.run(job.eval_schedule, batch)
            _note(result, scores)
        if job.here.tp_rank > 0:
            scores = {"losses": [], "accuracies": []}  # the first rank of the group reports them
        by_rank = job.coordinator.share(f"held-out/{step}", scores, job.timeout_s, SCORES)
        losses = [_mean(each.losses) for each in by_rank if each.losses]
        accuracies = [_mean(each.accuracies) for each in by_rank if each.accuracies]
        if not losses:
            raise TransferError(f"step {step}: no rank sent a held-out loss")
        loss = _mean(losses)
        LOG.info("step %d held-out loss %.4f", step, loss)
        row = {"step": step, "held_out_loss": loss}
        if accuracies:
            row["held_out_accuracy"] = _mean(accuracies)
        if job.on_row is not None:
            job.on_row(row)
        return loss

    def _share_part(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank has written of the checkpoint."""
        job = self.job
        key = f"checkpoint/{self.next_step}"
        parts = job.coordinator.share(key, part, job.timeout_s, PART)
        return [written.model_dump() for written in parts]

    def _save(self) -> None:
        """Write a checkpoint of the state before `next_step`; every rank does at the same step."""
        job = self.job
        step = self.next_step
        if job.checkpoint_url is None:
            return
        # First: it waits until the parameters that are written next are final.
        numbers, moments = job.update.state()
        parameters: dict[str, torch.Tensor] = {}
        if job.here.dp_rank == 0:  # the replicas have the same ones
            parameters = whole_parameters(job.stages, job.here)
        moments, layouts = as_slices(job.stages, moments, job.here)
        checkpoint.save(
            job.checkpoint_url,
            step,
            job.here.rank,
            parameters,
            moments,
            {**numbers, "configuration": job.configuration},
            self._share_part,
            job.run.keep,
            layouts,
            first_buffers(job.stages, job.here),
            run=job.identity,
            best=job.update.best.step if job.run.keep_best else None,
        )
        LOG.info("checkpoint before step %d in %s", step, job.checkpoint_url)


def _is_multiple(step: int, every: int | None) -> bool:
    if every is None:
        return False
    return step % every == 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _note(result: StepResult, scores: dict[str, list[float]]) -> None:
    """Add what this rank has measured of one batch."""
    if result.loss is not None:
        scores["losses"].append(result.loss)
    if result.accuracy is not None:
        scores["accuracies"].append(result.accuracy)


def _by_rank(reports: Sequence[RankReport], name: str) -> dict[str, Any]:
    """What the ranks report under `name`, without those that do not know it."""
    by_rank = {}
    for rank, report in enumerate(reports):
        value = getattr(report, name)
        if value is not None:
            by_rank[str(rank)] = value
    return by_rank
