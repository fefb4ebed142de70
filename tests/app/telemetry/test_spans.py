"""One span per request: its times, its numbers, and the caller it belongs to."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from app.api.events import Deliveries, RequestInfo, RequestOutcome
from app.telemetry.live import Telemetry
from app.telemetry.spans import Spans, otlp_exporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = "/v1/chat/completions"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Telemetry:
    return Telemetry("tiny", spans=Spans("tiny", exporter))


def finished(telemetry: Telemetry, exporter: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    telemetry.close()
    return exporter.get_finished_spans()


def test_a_span_tells_a_request(telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    request = RequestInfo("r1", CHAT, "", True, 7, 1)
    tokens = [(100.5, 1, 0, 1), (100.75, 1, 0, 1), (101.0, 2, 0, 1)]
    telemetry.on_request_start(request, 100.0, Deliveries(tokens))
    telemetry.on_finish(request, RequestOutcome(200, "stop", 4, 3, 0.125), 101.0)
    *phases, span = finished(telemetry, exporter)
    assert (span.name, span.kind, span.parent) == ("chat tiny", SpanKind.SERVER, None)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 1_000_000_000
    begin_ns = span.start_time
    times = [(p.name, (p.start_time or 0) - begin_ns, (p.end_time or 0) - begin_ns) for p in phases]
    assert times == [
        ("queue", 0, 125_000_000),
        ("prefill", 125_000_000, 500_000_000),
        ("decode", 500_000_000, 1_000_000_000),
    ]
    assert {p.parent.span_id for p in phases if p.parent} == {span.context.span_id}
    (first,) = span.events
    assert (first.name, first.timestamp - span.start_time) == ("first token", 500_000_000)
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 4,
        "http.route": CHAT,
        "http.response.status_code": 200,
        "legato.request_id": "r1",
        "legato.stream": True,
        "legato.num_continuations": 1,
        "legato.num_cached_tokens": 3,
        "legato.reason": "stop",
        "legato.queued_s": 0.125,
        "legato.ttft_s": 0.5,
        "legato.decode_s": 0.5,
        "legato.max_tbt_s": 0.25,
    }


def test_a_span_is_its_callers_child(telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    headers = (f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", "nonsense", "")
    for traceparent in headers:
        request = RequestInfo("r1", CHAT, "", False, 7, 1, traceparent)
        telemetry.on_request_start(request, 1.0, Deliveries())
        telemetry.on_finish(request, RequestOutcome(500, "server_error", 0, 0), 2.0)
    child, *others = finished(telemetry, exporter)
    assert child.parent is not None
    assert f"{child.context.trace_id:032x}" == TRACE
    assert f"{child.parent.span_id:016x}" == PARENT
    assert child.status.status_code is StatusCode.ERROR
    # The second caller does not sample its trace, so neither does this server.
    assert [span.parent for span in others] == [None, None]


def test_two_requests_of_one_id_are_two(
    telemetry: Telemetry, exporter: InMemorySpanExporter
) -> None:
    requests = [RequestInfo("same", CHAT, "", False, 7, 1) for _ in range(2)]
    for begin_s, request in zip((1.0, 2.0), requests, strict=True):
        telemetry.on_request_start(request, begin_s, Deliveries())
    for request in requests:
        telemetry.on_finish(request, RequestOutcome(200, "stop", 1, 0), 4.0)
    spans = finished(telemetry, exporter)
    assert [(s.end_time or 0) - (s.start_time or 0) for s in spans] == [3 * 10**9, 2 * 10**9]


def test_a_missing_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ImportError, match="opentelemetry-exporter-otlp-proto-http"):
        otlp_exporter("http://127.0.0.1:4318/v1/traces")
