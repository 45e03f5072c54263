"""The part of its trace that a rank uploads."""

from types import SimpleNamespace
from typing import Any

import pytest

from dpipe.coordinator.alone import Alone
from dpipe.coordinator.limits import UPLOADS
from dpipe.engine.trainer import Trainer
from dpipe.ranks import ParallelRanks
from dpipe.report.trace import StepSpans, dump_steps, load_steps
from dpipe.schedule.action import Action, Op
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule


@pytest.mark.parametrize(("fitting", "kept"), [(4, [0, 1, 2, 3]), (3, [2, 3]), (1, [3])])
def test_trace_that_is_too_large_keeps_the_last_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fitting: int, kept: list[int]
) -> None:
    """Instead of failing a run that has succeeded."""
    steps = [StepSpans(step, ()) for step in range(4)]
    monkeypatch.setitem(UPLOADS, "trace", len(dump_steps(steps[:fitting])))
    taken: list[bytes] = []
    coordinator = Alone(on_upload=lambda rank, kind, payload: taken.append(payload))
    schedule = lower(Schedule(1, (0,), ((Action(0, Op.F, 0), Action(0, Op.B, 0)),)))
    job: Any = SimpleNamespace(
        run=SimpleNamespace(trace_steps=4),
        coordinator=coordinator,
        schedule=schedule,
        here=ParallelRanks(),
    )
    trainer = Trainer(job)
    trainer._traces.extend((step, 0.0) for step in steps)
    trainer._upload_traces()
    assert [step.step for step in load_steps(taken[0], 0)] == kept
    assert ("the trace has the last" in caplog.text) == (len(kept) < 4)
