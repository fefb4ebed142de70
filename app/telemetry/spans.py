"""OpenTelemetry: a span per request, a child of the caller's span if it sent a `traceparent`.

It has three consecutive children: queue, prefill, decode. Spans are made after the request ends,
from recorded times, so tracing adds no work to a running request. The exporter has its own thread.
"""

from __future__ import annotations

import time
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.api.events import RequestInfo, RequestOutcome

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}


class Spans:
    """Makes spans and passes them to an exporter. model: the served model's name."""

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        self._model = model
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "legato"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("legato")
        self._callers = TraceContextTextMapPropagator()

    def record(
        self,
        request: RequestInfo,
        outcome: RequestOutcome,
        *,
        start_s: float,
        first_s: float | None,
        end_s: float,
        max_tbt_s: float,
    ) -> None:
        """A finished request. Times are on the event loop's clock, and end_s is now."""
        now_ns = time.time_ns()

        def wall_ns(at_s: float) -> int:
            return now_ns - round((end_s - at_s) * 1e9)

        operation = _OPERATIONS.get(request.endpoint, "text_completion")
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.num_completion_tokens,
            "http.route": request.endpoint,
            "http.response.status_code": outcome.status,
            "legato.request_id": request.request_id,
            "legato.stream": request.stream,
            "legato.num_continuations": request.num_continuations,
            "legato.num_cached_tokens": outcome.num_cached_tokens,
            "legato.reason": outcome.reason,
        }
        phases: list[tuple[str, float, float]] = []
        if first_s is not None:
            planned_s = min(start_s + outcome.queued_s, first_s)
            phases = [
                ("queue", start_s, planned_s),
                ("prefill", planned_s, first_s),
                ("decode", first_s, end_s),
            ]
            attributes["legato.queued_s"] = planned_s - start_s
            attributes["legato.ttft_s"] = first_s - start_s
            attributes["legato.decode_s"] = end_s - first_s
            attributes["legato.max_tbt_s"] = max_tbt_s
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            self._callers.extract({"traceparent": request.traceparent}),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=wall_ns(start_s),
        )
        if first_s is not None:
            span.add_event("first token", timestamp=wall_ns(first_s))
        for name, from_s, to_s in phases:
            child = self._tracer.start_span(
                name, set_span_in_context(span), start_time=wall_ns(from_s)
            )
            child.end(wall_ns(to_s))
        if outcome.status >= 500:
            span.set_status(Status(StatusCode.ERROR, outcome.reason))
        span.end(wall_ns(end_s))

    def close(self) -> None:
        """Export pending spans, and end the exporter's thread."""
        self._provider.shutdown()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """An exporter to a collector by OTLP over HTTP. Raises ImportError naming a missing package."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ImportError(
            "telemetry.spans_to: needs the package opentelemetry-exporter-otlp-proto-http"
        ) from error
    return OTLPSpanExporter(endpoint=endpoint)
