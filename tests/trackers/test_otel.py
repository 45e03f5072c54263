"""Spans of steps, as an exporter of OpenTelemetry gets them."""

from collections.abc import Callable
from typing import Any

import pytest

from dpipe.config.load import Config

pytest.importorskip("opentelemetry.sdk", reason="needs pip install dpipe[otel]")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)

from dpipe.schedule.action import parse_action
from dpipe.timeline.span import Lane, Span
from dpipe.trackers.otel import OtelTracker
from dpipe.trackers.tracker import TracedStep


def test_row_is_a_span_as_long_as_its_step() -> None:
    memory = InMemorySpanExporter()
    OtelTracker(memory, "job").log(4, {"step_s": 0.5, "loss": 2.0})
    (span,) = memory.get_finished_spans()
    assert span.name == "dpipe.step"
    assert dict(span.attributes) == {"step": 4, "step_s": 0.5, "loss": 2.0}
    assert span.end_time - span.start_time == 500_000_000
    assert span.resource.attributes["dpipe.run"] == "job"


def test_actions_are_children_of_their_traced_step() -> None:
    memory = InMemorySpanExporter()
    sent = Span(0, Lane.SEND, parse_action("0SEND_F1"), 20.0, 50.0, num_bytes=64)
    computed = Span(0, Lane.COMPUTE, parse_action("0F1"), 10.0, 20.0)
    OtelTracker(memory, "job").trace([TracedStep(7, [computed, sent]), TracedStep(8, [])])
    *children, parent = memory.get_finished_spans()
    assert (parent.name, dict(parent.attributes)) == ("dpipe.traced_step", {"step": 7})
    assert (parent.start_time, parent.end_time) == (10_000, 50_000)
    assert {child.parent.span_id for child in children} == {parent.context.span_id}
    assert [child.name for child in children] == ["0F1", "0SEND_F1"]
    assert dict(children[1].attributes) == {"rank": 0, "lane": "send", "bytes": 64}


def test_collector_that_is_away_is_an_error_of_this_row_alone() -> None:
    class Away(InMemorySpanExporter):
        is_away = True

        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.FAILURE if self.is_away else super().export(spans)

    exporter = Away()
    tracker = OtelTracker(exporter, "job")
    with pytest.raises(ConnectionError, match="the collector takes no spans"):
        tracker.log(0, {})
    exporter.is_away = False
    tracker.log(1, {})
    assert [span.attributes["step"] for span in exporter.get_finished_spans()] == [1]


def test_run_exports_a_span_a_step_and_the_actions_of_all_ranks(
    tiny: Callable[..., Config],
    losses: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kept(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            exported.extend(spans)
            return SpanExportResult.SUCCESS

    exported: list[ReadableSpan] = []
    monkeypatch.setattr("dpipe.trackers.otel.OTLPSpanExporter", Kept)
    measured = losses(tiny(run__trackers=("otel",), pipeline__stages=2, run__trace_steps=1))
    rows = [span for span in exported if span.name == "dpipe.step" and "loss" in span.attributes]
    assert [span.attributes["loss"] for span in rows] == pytest.approx(measured)
    (traced,) = [span for span in exported if span.name == "dpipe.traced_step"]
    assert traced.attributes["step"] == 2
    actions = [span for span in exported if span.parent is not None]
    assert {span.attributes["rank"] for span in actions} == {0, 1}
    assert {"compute", "send"} <= {span.attributes["lane"] for span in actions}
    # On the clock of the rows: the traced step is within the run.
    assert abs(traced.end_time - rows[-1].end_time) < 60e9
