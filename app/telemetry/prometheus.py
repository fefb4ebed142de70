"""Prometheus metrics of one replica, under common names, at `/metrics`.

Each is one of `definitions.METRICS` or a plain count. `reference` prints the table in this folder's
README from the objects below, so the table matches the exported metrics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from actors.scheduling.request import FinishReason
from actors.transport.messages import IterationRecord
from app.telemetry.causes import Cause
from app.telemetry.engines import EngineMetrics, FrontEngines, occupancy

disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge for each series otherwise
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 40)
_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class QuickHistogram(Collector):
    """A fast histogram for values of every token or iteration, for one thread.

    prometheus_client's own takes a lock and walks its buckets in Python at each observation, which
    is too slow at thousands of tokens per second.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """buckets: ascending upper bounds, each within its bucket; infinity is added."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe_all(self, values: Sequence[float]) -> None:
        """Add these observations."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The metric family, with cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            bound_text = floatToGoString(bound)  # type: ignore[no-untyped-call]
            buckets.append((bound_text, total))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


class Metrics:
    """Every metric of a replica; update methods are called on its event loop."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _TTFT_S
        )
        self.tbt = self._quick_histogram(
            "inter_token_latency_seconds", "Time between tokens of a stream (TBT)", _LATENCY_S
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds",
            "Arrival to last token, of requests answered to their end",
            (*_TTFT_S, 80, 160),
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to the first plan that holds it", _TTFT_S
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First plan to first token", _TTFT_S
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First token to last", (*_TTFT_S, 80, 160)
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt length", _TOKENS)
        self.output_length = self._histogram(
            "request_generation_tokens", "Output length, of requests with a first token", _TOKENS
        )
        self.step_time = self._quick_histogram(
            "iteration_seconds", "Busy time of an iteration, all stages together", _LATENCY_S
        )
        self.step_error = self._quick_histogram(
            "iteration_prediction_error_ratio",
            "Time of the slowest stage over the predicted",
            (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0),
        )
        self.step_tokens = self._quick_histogram(
            "iteration_tokens", "Tokens of an iteration, prefill and decode", _TOKENS
        )
        self.chunk_tokens = self._quick_histogram(
            "prefill_chunk_tokens", "Prefill tokens of an iteration that has any", _TOKENS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens received")
        self.cached_tokens = self._counter(
            "prefix_cache_hit_tokens", "Prompt tokens not recomputed"
        )
        self.generated = self._counter("generation_tokens", "Tokens streamed")
        self._finished: dict[tuple[int, str], Counter] = {}
        self.finished = self._counter(
            "request_success", "Requests answered to their end", "finished_reason"
        )
        self.failed = self._counter(
            "request_failure",
            "Requests refused by admission, failed, or left by their client (disconnect)",
            "status",
            "reason",
        )
        self.gaps_kept = self._counter(
            "tbt_objective_kept", "Gaps within the request's TBT objective, else the deployment's"
        )
        self.gaps_missed = self._counter("tbt_objective_missed", "Gaps above it, by cause", "cause")
        self.goodput_requests = self._counter(
            "goodput_requests", "Completed requests that kept all of their objectives"
        )
        self.goodput_tokens = self._counter("goodput_tokens", "Tokens of those requests")
        self.preemptions = self._counter("num_preemptions", "Requests that lost their KV blocks")
        self.recoveries = self._counter("recoveries", "Pipelines or schedulers rebuilt")
        self.bubble = self._counter(
            "pipeline_bubble_seconds",
            "Time a stage waits for a submitted step while another stage has it",
            "stage",
        )
        self.running = self._gauge("num_requests_running", "Requests holding KV blocks")
        self.waiting = self._gauge("num_requests_waiting", "Requests not yet started")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1")
        self.budget = self._gauge("token_budget", "Most tokens of an iteration")
        self.holds_starts = self._gauge(
            "starts_held_back", "1 while requests wait as one more decode would miss the objective"
        )
        self.tbt_objective = self._gauge(
            "tbt_objective_seconds", "The deployment's TBT objective; 0: none"
        )
        self.engines = EngineMetrics(self._labels, self.registry)
        # A series that first appears with its first count has no increase in Prometheus: shares of
        # the known ones would come out wrong.
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.labeled(self.finished, finished_reason=reason.value)
        for cause in Cause:
            self.labeled(self.gaps_missed, cause=cause.value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"legato_{name}", text, ["model_name"], registry=self.registry, buckets=buckets
        )
        return metric.labels(**self._labels)

    def _quick_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> QuickHistogram:
        return QuickHistogram(f"legato_{name}", text, self._labels, buckets, self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        metric = Counter(f"legato_{name}", text, ["model_name", *labels], registry=self.registry)
        return metric if labels else metric.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(f"legato_{name}", text, ["model_name"], registry=self.registry)
        return metric.labels(**self._labels)

    def count_ended(self, status: int, reason: str) -> None:
        """A request has ended with this HTTP status; reason: as of `RequestOutcome`."""
        counter = self._finished.get((status, reason))
        if counter is None:
            if status == 200 and reason != "disconnect":
                counter = self.labeled(self.finished, finished_reason=reason)
            else:
                counter = self.labeled(self.failed, status=str(status), reason=reason)
            self._finished[status, reason] = counter
        counter.inc()

    def labeled(self, counter: Any, **labels: str) -> Counter:
        return counter.labels(**self._labels, **labels)

    def iterations(self, records: Sequence[IterationRecord], num_blocks: int) -> None:
        """Iteration records, oldest first."""
        timed = [r for r in records if r.stages_s]
        self.step_time.observe_all([sum(end - begin for begin, end in r.stages_s) for r in timed])
        self.step_error.observe_all(
            [
                max(end - begin for begin, end in r.stages_s) / r.predicted_s
                for r in timed
                if r.predicted_s
            ]
        )
        self.step_tokens.observe_all([r.num_decode_tokens + r.num_prefill_tokens for r in records])
        chunks = [r.num_prefill_tokens for r in records]
        self.chunk_tokens.observe_all([num_tokens for num_tokens in chunks if num_tokens])
        if records:
            self._state(records[-1], num_blocks)

    def engines_together(self, engines: FrontEngines, newest: Iterable[IterationRecord]) -> None:
        """Set the gauges of several engines, whose records arrive separately: sums, and the largest
        budget. newest: the last record of each."""
        num_running, num_waiting, kv_share = occupancy(engines.published)
        self.running.set(num_running)
        self.waiting.set(num_waiting)
        self.kv_usage.set(kv_share)
        records = list(newest)
        self.budget.set(max([record.token_budget for record in records], default=0))
        self.holds_starts.set(any(record.holds_starts for record in records))

    def at_rest(self) -> None:
        """No request is here. The last record may not say so: clients also leave while no step
        runs, such as during a rebuild."""
        for gauge in (self.running, self.waiting, self.kv_usage, self.holds_starts):
            gauge.set(0)

    def _state(self, record: IterationRecord, num_blocks: int) -> None:
        self.running.set(record.num_decoding + record.num_prefilling)
        self.waiting.set(record.num_waiting)
        self.budget.set(record.token_budget)
        self.holds_starts.set(record.holds_starts)
        if num_blocks:
            self.kv_usage.set(1.0 - record.num_free_blocks / num_blocks)


class HttpErrors(Collector):
    """Answers with an error, of this process: `counts` by status and code is read with `/metrics`.
    The refusals of an overloaded server are there from the beginning, as 0."""

    _OVERLOAD = (
        (429, "overloaded"),
        (429, "rate_limit_exceeded"),
        (503, "engine_unavailable"),
        (503, "grammar_busy"),
        (503, "overloaded"),
        (503, "template_busy"),
    )

    def __init__(self, counts: Mapping[tuple[int, str], int]) -> None:
        self._counts = counts
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The metric family."""
        text = "Answers over HTTP with an error status, also before a request is counted as such"
        family = CounterMetricFamily("legato_http_errors", text, labels=["status", "code"])
        counts = {**dict.fromkeys(self._OVERLOAD, 0), **self._counts}
        for (status, code), count in counts.items():
            family.add_metric([str(status), code], count)
        yield family


def reference(registry: CollectorRegistry) -> str:
    """Every metric as rows of a Markdown table."""
    rows = []
    for family in registry.collect():
        total = "_total" if family.type == "counter" else ""
        rows.append(f"| `{family.name}{total}` | {family.type} | {family.documentation} |")
    return "\n".join(rows)


class _Together(Collector):
    """Several registries as one: each family once, with all samples."""

    def __init__(self, registries: Sequence[CollectorRegistry], replica: str | None) -> None:
        self._registries = registries
        self._labels = {} if replica is None else {"replica": replica}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                if self._labels:
                    family.samples = [
                        sample._replace(labels={**sample.labels, **self._labels})
                        for sample in family.samples
                    ]
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return families.values()


def render(
    metrics: Sequence[Metrics], *others: CollectorRegistry, replica: str | None = None
) -> bytes:
    """The exposition text of a replica with these models. others: registries of no model. replica:
    the label of every series, for one of several behind an address: each read is of another."""
    registry = CollectorRegistry()
    registries = [*(each.registry for each in metrics), *others]
    registry.register(_Together(registries, replica))
    return generate_latest(registry)
