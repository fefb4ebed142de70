"""A replica's telemetry: API events and iteration records in, metrics and logs out."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.scheduling.request import Objective
from actors.transport.messages import IterationRecord
from app.api.events import ApiEvents, Deliveries, RequestInfo, RequestOutcome, RequestTiming
from app.telemetry.causes import Cause, Explanation, Gap
from app.telemetry.definitions import kept_objectives
from app.telemetry.engines import FrontEngines
from app.telemetry.iterations import EngineIterations
from app.telemetry.prometheus import Metrics
from app.telemetry.records import RecordLog
from app.telemetry.spans import Spans

_FORGOTTEN_AFTER_S = 600.0  # silence after which an engine is taken to have ended
_GIVEN_UP_AFTER_S = 10.0  # longest wait for the records that explain a gap
_WATCHED_GAPS = 4096  # gaps buffered for a slow console


class Observed(Protocol):
    """An engine, as telemetry sees it. objective: the deployment's current one."""

    @property
    def objective(self) -> Objective: ...
    @property
    def num_blocks(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """A fixed objective and number of blocks in place of an engine's."""

    objective: Objective = field(default_factory=Objective)
    num_blocks: int = 0


@dataclass(slots=True)
class _OpenRequest:
    request: RequestInfo
    start_s: float
    deliveries: Deliveries  # not counted yet
    objective: Objective  # its own, else the deployment's as it arrived
    tbt_s: float  # of the objective, infinite without one
    last_s: list[float]  # of each continuation, 0 before its first token
    first_s: float | None = None
    max_tbt_s: float = 0.0

    def engine_during(self, gap: Gap, index: int) -> tuple[str, bool]:
        """The engine of a continuation at the end of a gap ("": the only engine), and whether the
        continuation moved there within the gap."""
        engine_id, since_s, is_first = "", 0.0, True
        for at_s, which, there in self.deliveries.places:
            if which == index and at_s <= gap.to_s:
                is_first = not engine_id
                engine_id, since_s = there, at_s
        return engine_id, not is_first and since_s > gap.from_s


_NONE = EngineIterations()  # for an engine without records


class Telemetry(ApiEvents):
    """engine: the observed engine; None: unknown. log: Parquet, or None. spans: OpenTelemetry, or
    None.

    Tokens are counted in batches, when the scheduler sends iteration records, because counting each
    token on cold caches is expensive. A missed gap is explained once its steps' records are here.
    """

    def __init__(
        self,
        model: str,
        engine: Observed | None = None,
        log: RecordLog | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.metrics = Metrics(model)
        self._engine = engine or KnownEngine()
        self._log = log
        self._spans = spans
        self._open: dict[int, _OpenRequest] = {}  # by the RequestInfo's identity
        self._counted = {
            "num_preemptions": self.metrics.preemptions,
            "num_recoveries": self.metrics.recoveries,
        }
        self._iterations: dict[str, EngineIterations] = {}  # by engine
        self._last_s = 0.0  # end of the newest step of any engine
        self._unexplained: list[tuple[_OpenRequest, int, Gap]] = []  # with their continuation
        self._num_streamed = 0
        self._num_kept = 0
        self._missed: Counter[Cause] = Counter()
        self._missed_at: dict[str, Counter[Cause]] = {}  # by engine, of a front's
        self._watchers: list[deque[float]] = []

    # ---- API events ----------------------------------------------------------------------------

    def on_request_start(self, request: RequestInfo, now_s: float, deliveries: Deliveries) -> None:
        own, default = request.objective, self._engine.objective
        objective = Objective(own.tbt_s or default.tbt_s, own.ttft_s or default.ttft_s)
        last_s = [0.0] * request.num_continuations
        self._open[id(request)] = _OpenRequest(
            request, now_s, deliveries, objective, objective.tbt_s or math.inf, last_s
        )
        self.metrics.prompt_tokens.inc(request.num_prompt_tokens)
        self.metrics.prompt_length.observe(request.num_prompt_tokens)

    def on_finish(
        self, request: RequestInfo, outcome: RequestOutcome, now_s: float
    ) -> RequestTiming | None:
        entry = self._open.pop(id(request), None)
        self.metrics.count_ended(outcome.status, outcome.reason)
        self.metrics.cached_tokens.inc(outcome.num_cached_tokens)
        if entry is None:
            return None
        self._count((entry,))
        is_complete = outcome.status == 200 and outcome.reason != "disconnect"
        timing = _timing(entry, outcome, is_complete)
        if entry.first_s is not None:  # a refusal is no short answer, and no fast one
            self.metrics.output_length.observe(outcome.num_completion_tokens)
            if is_complete:
                self.metrics.e2e.observe(now_s - entry.start_s)
            planned_s = entry.start_s + timing.queued_s
            self.metrics.queue_time.observe(timing.queued_s)
            self.metrics.prefill_time.observe(entry.first_s - planned_s)
            self.metrics.decode_time.observe(now_s - entry.first_s)
        if is_complete and timing.kept is not False:
            self.metrics.goodput_requests.inc()
            self.metrics.goodput_tokens.inc(outcome.num_completion_tokens)
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
            self._log.request(request, outcome, timing, entry.objective, entry.start_s, now_s)
        return timing

    # ---- the engine ------------------------------------------------------------------------------

    def on_iterations(self, records: Sequence[IterationRecord], engine_id: str = "") -> None:
        """Add records. engine_id: their engine, if there are several."""
        iterations = self._iterations.get(engine_id)
        if iterations is None:
            iterations = self._iterations[engine_id] = EngineIterations()
            for other in self._iterations.values():
                other.forget_before(self._last_s - _FORGOTTEN_AFTER_S)
        iterations.add(records)
        self._last_s = max(self._last_s, iterations.last_s)
        self.catch_up()
        self.metrics.iterations(records, self._engine.num_blocks)
        for record in records:
            self._count_iteration(record, iterations, engine_id)

    def catch_up(self) -> None:
        """Count tokens delivered since the last call, and explain gaps whose records are here."""
        self._count(self._open.values())
        self._explain_missed()

    def _count(self, entries: Iterable[_OpenRequest]) -> None:
        num_generated, num_promised, gaps_s = 0, 0, list[float]()
        num_missed = len(self._unexplained)
        for entry in entries:
            if not entry.deliveries.tokens:
                continue
            if entry.first_s is None:
                entry.first_s = entry.deliveries.tokens[0][0]
                self.metrics.ttft.observe(entry.first_s - entry.start_s)
            last_s, tbt_s, num_before = entry.last_s, entry.tbt_s, len(gaps_s)
            longest_s = entry.max_tbt_s
            for now_s, num_tokens, index, num_steps in entry.deliveries.tokens:
                num_generated += num_tokens
                before_s = last_s[index]
                last_s[index] = now_s
                if not before_s:
                    continue
                gap_s = now_s - before_s
                gaps_s.append(gap_s)
                if gap_s > longest_s:
                    longest_s = gap_s
                if gap_s > tbt_s:
                    gap = Gap(before_s, now_s, tbt_s, num_tokens, num_steps)
                    self._unexplained.append((entry, index, gap))
            entry.max_tbt_s = longest_s
            if tbt_s < math.inf:
                num_promised += len(gaps_s) - num_before
            entry.deliveries.tokens.clear()
        self._num_streamed += num_generated
        self.metrics.generated.inc(num_generated)
        self.metrics.tbt.observe_all(gaps_s)
        num_kept = num_promised - (len(self._unexplained) - num_missed)
        self._num_kept += num_kept
        self.metrics.gaps_kept.inc(num_kept)
        for watcher in self._watchers:
            watcher += gaps_s

    def _explain_missed(self, even_uncovered: bool = False) -> None:
        if not self._unexplained:
            return
        missed, self._unexplained = self._unexplained, []
        causes: Counter[Cause] = Counter()
        for entry, index, gap in missed:
            engine_id, has_moved = entry.engine_during(gap, index)
            iterations = self._iterations.get(engine_id, _NONE)
            given_up = even_uncovered or gap.to_s < self._last_s - _GIVEN_UP_AFTER_S
            if has_moved:
                explanation = Explanation(Cause.MOVE, None)
            elif given_up or iterations.covers(gap, entry.start_s):
                explanation = iterations.explain(gap)
            else:
                self._unexplained.append((entry, index, gap))
                continue
            causes[explanation.cause] += 1
            if engine_id:
                self._missed_at.setdefault(engine_id, Counter())[explanation.cause] += 1
            if self._log is not None:
                self._log.gap(entry.request.request_id, index, gap, explanation, engine_id)
        for cause, count in causes.items():
            self._missed[cause] += count
            self.metrics.labeled(self.metrics.gaps_missed, cause=cause.value).inc(count)

    # ---- the console -----------------------------------------------------------------------------

    def objectives(self) -> Mapping[str, Any]:
        """Gaps of requests with a TBT objective since the start: kept, and missed by cause."""
        self.catch_up()
        missed = {cause.value: self._missed[cause] for cause in Cause if self._missed[cause]}
        return {"gaps_kept": self._num_kept, "gaps_missed": missed}

    def num_streamed(self) -> int:
        """Tokens streamed since the start; a step's own count has rejected drafts."""
        return self._num_streamed

    @contextmanager
    def watch_gaps(self) -> Iterator[deque[float]]:
        """A queue of all gaps in seconds as they are counted; the reader removes them."""
        watcher: deque[float] = deque(maxlen=_WATCHED_GAPS)
        self._watchers.append(watcher)
        try:
            yield watcher
        finally:
            self._watchers = [other for other in self._watchers if other is not watcher]

    # ---- output ----------------------------------------------------------------------------------

    def metrics_now(self) -> Metrics:
        """The metrics, up to date."""
        self.catch_up()
        self.metrics.tbt_objective.set(self._engine.objective.tbt_s or 0.0)
        if not self._open and "" in self._iterations:
            self.metrics.at_rest()
        return self.metrics

    def show_engines(self, engines: FrontEngines) -> None:
        """Set the gauges of a front, of all engines together and of each."""
        self.catch_up()
        here = {said.engine_id for said in engines.published}
        self._missed_at = {name: n for name, n in self._missed_at.items() if name in here}
        # Without those that have gone and are forgotten.
        self._iterations = {n: i for n, i in self._iterations.items() if n in here or i.last}
        last = {
            name: record
            for name, iterations in self._iterations.items()
            if name in here and (record := iterations.last) is not None
        }
        self.metrics.engines_together(engines, last.values())
        self.metrics.engines.show(engines, last, self._missed_at)

    def _count_iteration(
        self, record: IterationRecord, iterations: EngineIterations, engine_id: str
    ) -> None:
        for name, count in iterations.new_counts(record).items():
            self._counted[name].inc(count)
        for stage, bubble_s in iterations.bubbles(record):
            self.metrics.labeled(self.metrics.bubble, stage=str(stage)).inc(bubble_s)
        if self._log is not None:
            self._log.iteration({"engine": engine_id, **record._asdict()})

    def close(self) -> None:
        """Write buffered records."""
        self.catch_up()
        self._explain_missed(even_uncovered=True)
        if self._log is not None:
            self._log.close()
        if self._spans is not None:
            self._spans.close()


def _timing(entry: _OpenRequest, outcome: RequestOutcome, is_complete: bool) -> RequestTiming:
    objective, kept, ttft_s = entry.objective, None, None
    if entry.first_s is not None:
        ttft_s = entry.first_s - entry.start_s
    if objective.tbt_s is not None or objective.ttft_s is not None:
        kept = is_complete and kept_objectives(
            ttft_s or 0.0,
            entry.max_tbt_s,
            ttft_objective_s=objective.ttft_s,
            tbt_objective_s=objective.tbt_s,
        )
    queued_s = outcome.queued_s if ttft_s is None else min(outcome.queued_s, ttft_s)
    return RequestTiming(queued_s, ttft_s, entry.max_tbt_s, kept)
