"""The training loop of one rank.

step:  data -> executor (schedule, stages, links) -> update -> metrics
every `eval_every` steps and at both ends: held-out loss, by the same executor on a forward-only
schedule every `checkpoint_every` steps, when asked to stop, and at the end: a checkpoint
"""

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dpipe.config.run import RunConfig, TrainConfig
from dpipe.data.feed import Feed
from dpipe.dataparallel.base import DataParallel
from dpipe.engine.executor import Executor
from dpipe.engine.recorder import Recorder
from dpipe.engine.update import Update, Verdict, learning_rate
from dpipe.ranks import ParallelRanks
from dpipe.report.metrics import Metrics
from dpipe.report.trace import StepSpans, dump_steps
from dpipe.schedule.action import Action, Op
from dpipe.schedule.schedule import Schedule
from dpipe.stage.replay import ReplayStage
from dpipe.stage.stage import Stage
from dpipe.store import checkpoint
from dpipe.store.tensor_shards import as_slices, first_buffers, whole_parameters
from dpipe.streams import HOST, Streams
from dpipe.timeline.span import Lane
from dpipe.timeline.timers import Timers

LOG = logging.getLogger("dpipe")


class Meeting(Protocol):
    """What the trainer asks of the coordinator's client."""

    @property
    def clock_offset_ns(self) -> int: ...

    def share(self, key: str, value: Any, timeout_s: float) -> list[Any]: ...
    def upload(self, kind: str, payload: bytes) -> None: ...


@dataclass(frozen=True)
class Job:
    """What one rank trains, and with what."""

    here: ParallelRanks
    train: TrainConfig
    run: RunConfig
    context: int
    configuration: Mapping[str, Any]
    schedule: Schedule
    eval_schedule: Schedule
    stages: Mapping[int, Stage | ReplayStage]
    executor: Executor
    recorder: Recorder
    data_parallel: DataParallel
    update: Update
    feed: Feed
    coordinator: Meeting
    timeout_s: float
    checkpoint_url: str | None  # None where there is nothing to keep (replay)
    wants_stop: Callable[[], bool]
    metrics: Metrics | None = None  # rank 0
    streams: Streams = HOST
    utilisation: Callable[[float], float | None] = lambda seconds: (
        None
    )  # MFU of a step of so many seconds


class Trainer:
    """Trains from `first_step` (0, or where a checkpoint left off) to `train.steps`, or until a
    rank asks to stop.
    """

    def __init__(self, job: Job, first_step: int = 0) -> None:
        self.job = job
        self.next_step = first_step
        self._traces: deque[StepSpans] = deque(maxlen=job.run.trace_steps)
        self._timers = Timers()
        self._step_s: dict[int, float] = {}  # of steps whose verdict is still out

    def run(self) -> bool:
        """Train; returns whether it stopped before the end. Every rank returns after the same
        step.
        """
        job = self.job
        stopped = False
        self._evaluate()
        while self.next_step < job.train.steps and not stopped:
            stopped = self._one_step(self.next_step)
            self.next_step += 1
            ended = self.next_step == job.train.steps
            # Whoever stops a run may not wait for long, and the run that goes on evaluates first.
            if ended or (self._is_due(job.train.eval_every) and not stopped):
                self._evaluate()
            if ended or stopped or self._is_due(job.run.checkpoint_every):
                stopped = (
                    self._catch_up() or stopped
                )  # first: a step that was not finite is not to be saved
                self._save()
        if self._traces:
            job.coordinator.upload("trace", dump_steps(self._traces))
        return self.next_step < job.train.steps

    def _one_step(self, step: int) -> bool:
        """One step; returns whether the ranks have agreed to stop."""
        job = self.job
        began = time.perf_counter()
        for stage in job.stages.values():
            stage.begin_step(step, job.update.loss_scale.value)
        job.update.begin(step, job.wants_stop, lambda: self._report(step, began))
        with job.recorder.part("batch-generator"):
            batch = job.feed.training(step)
        job.executor.run(job.schedule, batch, job.update)
        self._record_exchange()
        spans = job.recorder.take(job.coordinator.clock_offset_ns)
        self._traces.append(StepSpans(step, spans))
        self._timers.add(spans, job.recorder.take_parts())
        self._step_s[step] = time.perf_counter() - began
        verdict = job.update.end()
        self._tell(verdict)
        return verdict is not None and verdict.stop

    def _catch_up(self) -> bool:
        """Hear the verdicts that nobody has waited for yet; returns whether the ranks have agreed
        to stop.
        """
        verdicts = self.job.update.drain()
        for verdict in verdicts:
            self._tell(verdict)
        return any(verdict.stop for verdict in verdicts)

    def _record_exchange(self) -> None:
        """What the replicas of each stage sent each other; with a delay, for the gradients of the
        step before.
        """
        for message in self.job.data_parallel.traffic():
            action = Action(message.stage, Op.REDUCE_GRAD)
            peer = None if message.received else message.peer
            self.job.recorder.moved(Lane.REDUCE, action, message.moved, peer)
            if not message.received:
                self.job.recorder.sent(message.peer, message.moved.num_bytes)

    def _report(self, step: int, began: float) -> dict[str, Any]:
        """What this rank says of its step when it casts its ballot: all its compute is done by
        then.
        """
        self._record_exchange()
        seconds = time.perf_counter() - began
        recorder = self.job.recorder
        streams = self.job.streams
        told = step % self.job.run.log_every == 0
        return {
            "bubble": 1 - recorder.busy_s / seconds,
            "mb_per_s": {
                f"{self.job.here.rank}->{peer}": n / 1e6 / seconds
                for peer, n in recorder.sent_bytes.items()
            },
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            / 1e3,  # peak; Linux counts in KiB
            "optimizer_mb": self.job.data_parallel.optimizer_bytes / 1e6,
            "gpu_memory_mb": None if (peak := streams.peak_bytes()) is None else peak / 1e6,
            "gpu_use_percent": streams.use_percent() if told else None,
        }

    def _tell(self, verdict: Verdict | None) -> None:
        """Log every `log_every`-th step, and the last, on every rank; on rank 0 write its row."""
        if verdict is None:
            return
        seconds = self._step_s.pop(verdict.step)
        if verdict.culprit is not None:
            LOG.warning(
                "step %d skipped: %s overflowed; loss scale halved", verdict.step, verdict.culprit
            )
        if verdict.step % self.job.run.log_every and verdict.step + 1 < self.job.train.steps:
            return
        ms_per_sample = seconds / self.job.train.batch_size * 1e3
        LOG.info("step %d loss %.4f, %.2f ms a sample", verdict.step, verdict.loss, ms_per_sample)
        LOG.info("%s", self._timers.line())
        if self.job.metrics is not None:
            self.job.metrics.write(self._row(verdict, seconds))

    def _row(self, verdict: Verdict, seconds: float) -> dict[str, Any]:
        train = self.job.train
        reports = verdict.reports
        return {
            "step": verdict.step,
            "loss": verdict.loss,
            "learning_rate": learning_rate(train, verdict.step),
            "grad_norm": verdict.norm,
            "loss_scale": self.job.update.loss_scale.value,
            "step_s": seconds,
            "ms_per_sample": seconds / train.batch_size * 1e3,
            "tokens_per_s": train.batch_size * self.job.context / seconds,
            "bubble": sum(report["bubble"] for report in reports) / len(reports),
            "mb_per_s": {
                link: rate for report in reports for link, rate in report["mb_per_s"].items()
            },
            "memory_mb": {str(rank): report["memory_mb"] for rank, report in enumerate(reports)},
            "optimizer_mb": {
                str(rank): report["optimizer_mb"] for rank, report in enumerate(reports)
            },
            **self._of_gpus(verdict, seconds),
        }

    def _of_gpus(self, verdict: Verdict, seconds: float) -> dict[str, Any]:
        """Peak memory and use by rank, and the share of the GPUs' arithmetic that was used; nothing
        on CPUs.
        """
        by_rank = {
            name: {
                str(r): report[name]
                for r, report in enumerate(verdict.reports)
                if report[name] is not None
            }
            for name in ("gpu_memory_mb", "gpu_use_percent")
        }
        used = self.job.utilisation(seconds)
        return {name: told for name, told in by_rank.items() if told} | (
            {} if used is None else {"mfu": used}
        )

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.next_step % every == 0

    def _evaluate(self) -> None:
        """The held-out loss before `next_step`, on every rank; nothing where `eval_every` is not
        set.
        """
        job = self.job
        step = self.next_step
        if job.train.eval_every is None:
            return
        batches = range(job.train.eval_batches)
        losses = [
            job.executor.run(job.eval_schedule, job.feed.held_out(index)) for index in batches
        ]
        job.recorder.take()
        losses = losses if job.here.tp_rank == 0 else [None]
        by_rank = job.coordinator.share(f"held-out/{step}", losses, job.timeout_s)
        loss = _mean([_mean(known) for known in by_rank if None not in known])
        LOG.info("step %d held-out loss %.4f", step, loss)
        if job.metrics is not None:
            job.metrics.write({"step": step, "held_out_loss": loss})

    def _save(self) -> None:
        """Write a checkpoint of the state before `next_step`; every rank does at the same step."""
        job = self.job
        step = self.next_step
        if job.checkpoint_url is None:
            return
        numbers, moments = job.update.state()
        parameters = whole_parameters(job.stages, job.here) if job.here.dp_rank == 0 else {}
        moments, layouts = as_slices(job.stages, moments, job.here)
        checkpoint.save(
            job.checkpoint_url,
            step,
            job.here.rank,
            parameters,
            moments,
            {**numbers, "configuration": job.configuration},
            lambda part: job.coordinator.share(f"checkpoint/{step}", part, job.timeout_s),
            job.run.keep,
            layouts,
            first_buffers(job.stages, job.here),
        )
        LOG.info("checkpoint before step %d in %s", step, job.checkpoint_url)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
