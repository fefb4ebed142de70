"""What a replica observes of itself: API events and iteration records in, metrics and logs out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.transport.messages import IterationRecord
from app.api.events import ApiEvents, Deliveries, RequestInfo, RequestOutcome
from app.telemetry.prometheus import Metrics
from app.telemetry.records import RecordLog
from app.telemetry.spans import Spans


@dataclass(slots=True)
class _OpenRequest:
    start_s: float
    deliveries: Deliveries  # not counted yet
    single: bool  # one continuation: the time between deliveries is a TBT
    first_s: float | None = None
    last_s: float = 0.0
    max_tbt_s: float = 0.0


class Telemetry(ApiEvents):
    """tbt_s: the deployment's objective, for counting violations. log: Parquet, or None.
    spans: OpenTelemetry, or None.

    Tokens are counted when the scheduler sends records of some iterations: code that runs once in
    a while finds cold caches, and doing so for each token was the dearest part of its way here.
    """

    def __init__(
        self,
        model: str,
        tbt_s: float | None,
        log: RecordLog | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.metrics = Metrics(model)
        self.num_blocks = 0
        self.tbt_s = tbt_s
        self._log = log
        self._spans = spans
        self._open: dict[int, _OpenRequest] = {}  # by the RequestInfo's identity
        self._counted = {
            "num_preemptions": self.metrics.preemptions,
            "num_recoveries": self.metrics.recoveries,
        }
        self._seen = dict.fromkeys(self._counted, 0)
        self._stage_end_s: list[float] = []

    # ---- API events ----------------------------------------------------------------------------

    def on_request_start(self, request: RequestInfo, now_s: float, deliveries: Deliveries) -> None:
        single = request.num_continuations == 1
        self._open[id(request)] = _OpenRequest(now_s, deliveries, single)
        self.metrics.prompt_tokens.inc(request.num_prompt_tokens)
        self.metrics.prompt_length.observe(request.num_prompt_tokens)

    def on_finish(self, request: RequestInfo, outcome: RequestOutcome, now_s: float) -> None:
        entry = self._open.pop(id(request), None)
        self.metrics.count_finished(outcome.reason)
        self.metrics.cached_tokens.inc(outcome.num_cached_tokens)
        self.metrics.output_length.observe(outcome.num_completion_tokens)
        if entry is None:
            return
        self._count((entry,))
        self.metrics.e2e.observe(now_s - entry.start_s)
        if entry.first_s is not None:
            planned_s = min(entry.start_s + outcome.queued_s, entry.first_s)
            self.metrics.queue_time.observe(planned_s - entry.start_s)
            self.metrics.prefill_time.observe(entry.first_s - planned_s)
            self.metrics.decode_time.observe(now_s - entry.first_s)
        if self._spans is not None:
            self._spans.record(
                request,
                outcome,
                start_s=entry.start_s,
                first_s=entry.first_s,
                end_s=now_s,
                max_tbt_s=entry.max_tbt_s,
            )
        if self._log is not None:
            self._log.request(
                {
                    "request_id": request.request_id,
                    "endpoint": request.endpoint,
                    "tenant": request.tenant,
                    "start_s": entry.start_s,
                    "queued_s": outcome.queued_s,
                    "ttft_s": None if entry.first_s is None else entry.first_s - entry.start_s,
                    "max_tbt_s": entry.max_tbt_s,
                    "e2e_s": now_s - entry.start_s,
                    "num_prompt_tokens": request.num_prompt_tokens,
                    "num_output_tokens": outcome.num_completion_tokens,
                    "num_cached_tokens": outcome.num_cached_tokens,
                    "status": outcome.status,
                    "reason": outcome.reason,
                }
            )

    # ---- the engine ------------------------------------------------------------------------------

    def on_iterations(self, records: Sequence[IterationRecord]) -> None:
        self.catch_up()
        self.metrics.iterations(records, self.num_blocks)
        for record in records:
            self._count_iteration(record)

    def catch_up(self) -> None:
        """Count the tokens delivered since the last time."""
        self._count(self._open.values())

    def _count(self, entries: Iterable[_OpenRequest]) -> None:
        num_generated, gaps_s = 0, list[float]()
        for entry in entries:
            if not entry.deliveries:
                continue
            if entry.first_s is None:
                entry.first_s = entry.deliveries[0][0]
                self.metrics.ttft.observe(entry.first_s - entry.start_s)
            last_s = entry.last_s
            for now_s, num_tokens in entry.deliveries:
                num_generated += num_tokens
                if last_s and entry.single:
                    gaps_s.append(now_s - last_s)
                    entry.max_tbt_s = max(entry.max_tbt_s, now_s - last_s)
                last_s = now_s
            entry.last_s = last_s
            entry.deliveries.clear()
        self.metrics.generated.inc(num_generated)
        self.metrics.tbt.observe_all(gaps_s)
        if self.tbt_s is not None:
            self.metrics.violations.inc(sum(gap_s > self.tbt_s for gap_s in gaps_s))

    def render(self) -> bytes:
        """The metrics as they are now, in Prometheus' text format."""
        self.catch_up()
        return self.metrics.render()

    def _count_iteration(self, record: IterationRecord) -> None:
        for name, counter in self._counted.items():
            count = getattr(record, name)
            if count != self._seen[name]:
                # Counts start at 0 again with a rebuilt scheduler.
                counter.inc(max(0, count - self._seen[name]))
                self._seen[name] = count
        if len(record.stages_s) > 1:
            self._bubbles(record)
        if self._log is not None:
            self._log.iteration(record._asdict())

    def _bubbles(self, record: IterationRecord) -> None:
        """A stage's bubble: it ended its last step before this one had been submitted no later
        than that, and waited for another stage until this one began."""
        stages = record.stages_s
        if len(self._stage_end_s) == len(stages):
            for number, (begin_s, _) in enumerate(stages):
                free_s = max(self._stage_end_s[number], record.submitted_s)
                if number and begin_s > free_s:
                    counter = self.metrics.labelled(self.metrics.bubble, stage=str(number))
                    counter.inc(begin_s - free_s)
        self._stage_end_s = [end_s for _, end_s in stages]

    def close(self) -> None:
        """Write what is buffered."""
        self.catch_up()
        if self._log is not None:
            self._log.close()
        if self._spans is not None:
            self._spans.close()
