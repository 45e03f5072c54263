"""OpenTelemetry, with the extra `otel`: by OTLP to a collector, where OTEL_EXPORTER_OTLP_ENDPOINT
says, by default http://localhost:4318.

    dpipe.step            a row, as it is written: its numbers are attributes
    dpipe.traced_step     one of the last run.trace_steps, when the run has ended
      F3, SEND_F3, B3     an action of a rank, on its lane
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import set_span_in_context

from dpipe.timeline.span import Span
from dpipe.trackers.tracker import TracedStep, TrackedRun

_MOST_AT_ONCE = 512  # spans in a request


class OtelTracker:
    """Spans for `exporter`, which is given them on the caller's thread.

    Raises `ConnectionError` where it does not take them; those are lost.
    """

    def __init__(self, exporter: SpanExporter, name: str) -> None:
        self._exporter = exporter
        self._ended = _Ended()
        resource = Resource.create({"service.name": "dpipe", "dpipe.run": name})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("dpipe")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        end_ns = time.time_ns()
        start_ns = end_ns - round(values.get("step_s", 0.0) * 1e9)
        span = self._tracer.start_span("dpipe.step", start_time=start_ns)
        span.set_attributes({"step": step, **values})
        span.end(end_ns)
        self._export()

    def trace(self, steps: Sequence[TracedStep]) -> None:
        for each in steps:
            self._trace_step(each)
        self._export()

    def close(self) -> None:
        self._exporter.shutdown()

    def _trace_step(self, traced: TracedStep) -> None:
        if not traced.spans:
            return
        start_us = min(span.start_us for span in traced.spans)
        end_us = max(span.end_us for span in traced.spans)
        parent = self._tracer.start_span("dpipe.traced_step", start_time=_ns(start_us))
        parent.set_attribute("step", traced.step)
        context = set_span_in_context(parent)
        for span in traced.spans:
            child = self._tracer.start_span(
                str(span.action),
                context=context,
                start_time=_ns(span.start_us),
                attributes=_attributes(span),
            )
            child.end(_ns(span.end_us))
        parent.end(_ns(end_us))

    def _export(self) -> None:
        spans = self._ended.take()
        for start in range(0, len(spans), _MOST_AT_ONCE):
            result = self._exporter.export(spans[start : start + _MOST_AT_ONCE])
            if result is not SpanExportResult.SUCCESS:
                raise ConnectionError("the collector takes no spans; is it running?")


class _Ended(SpanProcessor):
    """Holds spans until they are taken. The SDK's own queue would say nothing of what is lost."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans = self._spans
        self._spans = []
        return spans


def _ns(us: float) -> int:
    return round(us * 1e3)


def _attributes(span: Span) -> dict[str, Any]:
    found = {
        "rank": span.rank,
        "lane": str(span.lane),
        "bytes": span.num_bytes,
    }
    return found if span.peer is None else {**found, "peer": str(span.peer)}


def build(run: TrackedRun) -> OtelTracker:
    # An error a row in the log; `Background` warns once.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    return OtelTracker(OTLPSpanExporter(), run.folder.resolve().name)
