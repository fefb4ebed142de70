"""Admission by prediction: refuses requests that would make this or another miss an objective.

It predicts the TBT of running and the TTFT of queued requests. A refusal is made at once and names
the time at which the request would be accepted. Memory is judged by `peak`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.scheduling.admission.forecast import Bottleneck, Predictor, Situation
from actors.scheduling.admission.peak import PredictedPeak
from actors.scheduling.admission.returning import Place, Returning
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.online import RecentQuantile, cost_model_for
from actors.scheduling.events import MayReturn, Refuse
from actors.scheduling.interfaces import (
    EngineView,
    RequestView,
    StepTimePredictor,
)
from actors.scheduling.registry import within
from actors.scheduling.request import Request

MAX_RETRY_AFTER_S = 3600.0
WATCHED = 200  # predictions whose outcome is remembered
ENOUGH, CAUTION = 20, 1 / 0.9  # see `Correction`
HOLDS, MOST_CLOSED_S = 0.5, 0.5  # share of a refused request's wait; see `_closed_s`
RETRY_PADDING = 1.2  # of the predicted wait: predictions vary, and early is refused
HARDLY = 0.2  # of the objective; see `wait_s`
SHORT = 0.5  # of the objective: shorter predictions are corrected separately


class Correction:
    """The factor on predictions with which a given share of recent ones would have held.

    share: of predictions that should hold. Until `ENOUGH` are known the factor is at least
    `CAUTION`, as budgets stop lengthening steps at nine tenths of the best token rate, and at least
    what lies between the mean of a step's time and its quantile: on a machine that has just become
    busy, all steps take longer than they did.
    """

    def __init__(self, share: float) -> None:
        self._recent = RecentQuantile(share, WATCHED)  # of log(actual / predicted)

    def observe(self, actual_s: float, predicted_s: float) -> None:
        self._recent.add(math.log(max(actual_s, 1e-3) / max(predicted_s, 1e-3)))

    def factor(self, unevenness: float = 1.0) -> float:
        """unevenness: the quantile of the time of a step over its mean."""
        caution = max(CAUTION, unevenness)
        if not self._recent:
            return caution
        learned = math.exp(self._recent.value)
        return learned if len(self._recent) >= ENOUGH else max(learned, caution)

    @property
    def median(self) -> float:
        """The median error of recent predictions, as a factor."""
        return math.exp(self._recent.at(0.5)) if len(self._recent) >= ENOUGH else 1.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for a request submitted now, in seconds.

    bottleneck, raw_s: what it waits for, and the uncorrected time to its first token.
    expected_s: median of the time to its first token.
    bound_s: a bound that holds for a share `confidence` of requests; decisions use it.
    wait_s: by how much the bound exceeds the objective (<= 0: it is kept).
    alone: no other work delays it, so that waiting would not help.
    """

    bottleneck: Bottleneck
    raw_s: float
    expected_s: float
    bound_s: float
    limit_s: float
    wait_s: float
    alone: bool


@dataclass(slots=True)
class PredictiveAdmission:
    """Refuses a request whose acceptance would make an objective be missed, with a retry time.

    predictor: makes the predictions.
    ttft_s: the deployment's objective; a request's own takes precedence.
    max_wait_s: longest wait in the queue without a TTFT objective.
    action: "refuse", or "queue": admit it anyway (a `deadline` order then moves late requests
        back), and only delay starts that would stall running decodes.
    confidence: share of accepted requests whose first token should come within the bound. Errors
        of earlier predictions correct later ones (`Correction`, one per bottleneck).
    margin: share of the TTFT objective kept back, as the engine changes while a prompt waits. One
        that returns when it was told to has it.
    """

    predictor: Predictor
    ttft_s: float | None
    max_wait_s: float = 10.0
    action: str = "refuse"
    confidence: float = 0.99
    margin: float = 0.1
    _returning: Returning = field(default_factory=Returning)
    # Accepted requests without a first token: (bottleneck, uncorrected prediction, when made).
    _predicted: dict[int, tuple[Bottleneck, float, float]] = field(default_factory=dict)
    _corrections: tuple[Correction, ...] = field(init=False)  # by bottleneck

    def __post_init__(self) -> None:
        if not 0.0 < self.confidence < 1.0:
            raise TypeError(f"confidence lies between 0 and 1, not {self.confidence}")
        within(0, math.inf, max_wait_s=self.max_wait_s)
        within(0, 1, margin=self.margin)
        self._corrections = tuple(Correction(self.confidence) for _ in Bottleneck)

    @classmethod
    def build(
        cls,
        config: SchedulerConfig,
        cost: StepTimePredictor | None,
        expected_share: float = 1.0,
        reserve: float = 0.02,
        **options: Any,
    ) -> PredictiveAdmission:
        if options.get("action", "refuse") not in ("refuse", "queue"):
            raise ConfigError("admission_options", "action is 'refuse' or 'queue'")
        model = cost_model_for("admission", "predictive", cost)
        peak = PredictedPeak(expected_share, reserve)
        return cls(Predictor.build(config, model, peak), config.ttft_s, **options)

    # ---- interfaces.Admission ---------------------------------------------------------

    def on_submit(self, request: Request, engine: EngineView) -> Refuse | None:
        if self.action != "refuse":
            return None
        self._learn(engine)
        now_s = engine.now_s
        found = self.forecast(request, engine, now_s)
        key_of, returning = MayReturn.key_of, self._returning
        place = returning.take(key_of(request.tenant, request.prompt), now_s) if returning else None
        wait_s = self.wait_s(request, found, now_s, place)
        is_served = wait_s <= 0.0 or found.alone
        if place is not None:
            returning.judged(is_served)
        if is_served:
            if request.priority >= 0:  # others take longer, by what live requests come
                self._predicted[request.request_id] = (found.bottleneck, found.raw_s, now_s)
            return None
        retry_after_s = self.retry_after_s(request, found, now_s, place)
        own_s = self._service_s(request, engine)
        whose, key = (request.tenant, request.priority), key_of(request.tenant, request.prompt)
        returning.refused(MayReturn(key, own_s, retry_after_s, *whose), now_s)
        closed_s = _closed_s(found, engine)
        return Refuse(request.request_id, late(found), None, retry_after_s, closed_s, own_s)

    def turned_away(self, refused: Sequence[MayReturn], now_s: float) -> None:
        for one in refused:
            self._returning.refused(one, now_s)

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        if self.predictor.stalls(engine, request):
            return False
        return self.predictor.peak.may_start(request, engine)

    # ---- predictions, without side effects --------------------------------------------

    def forecast(
        self,
        request: Request,
        engine: EngineView,
        now_s: float,
        there: Situation | None = None,
    ) -> Forecast:
        """there: the engine's situation now, where several requests are asked for."""
        if there is None:
            there = self.predictor.situation(engine, now_s)
        own = len(request.prompt) + len(request.output)
        output = 0 if request.pooling else request.sampling.max_tokens - len(request.output)
        limit_s = request.objective.ttft_s or self.ttft_s or self.max_wait_s
        compute_s, places_s = self.predictor.waits_s(own, output, there)
        capped_s, _ = self._capped_s(request.tenant, engine)
        if capped_s:
            places_s = max(places_s, capped_s + own / self.predictor.prefill_rate(engine))
        waits_s = compute_s, places_s
        unevenness = self.predictor.unevenness(there)
        factors = [correction.factor(unevenness) for correction in self._corrections]
        places = waits_s[1] * factors[1] > waits_s[0] * factors[0]
        bottleneck = Bottleneck.PLACES if places else Bottleneck.COMPUTE
        raw_s = waits_s[bottleneck]
        factor = factors[bottleneck]
        if raw_s < SHORT * limit_s:
            bottleneck = Bottleneck.NOTHING
        expected_s = raw_s * self._corrections[bottleneck].median
        bound_s = max(raw_s * factor, expected_s)
        # Reading the request and its prompt's text has taken a part of the objective.
        left_s = limit_s * (1.0 - self.margin) - max(0.0, now_s - request.arrival_s)
        idle = not capped_s and not engine.num_waiting and not engine.prefilling
        return Forecast(
            bottleneck,
            raw_s,
            expected_s=expected_s,
            bound_s=bound_s,
            limit_s=limit_s,
            wait_s=bound_s - left_s,
            alone=idle
            and (not engine.decoding or own / self.predictor.prefill_rate(engine) > limit_s),
        )

    def wait_s(
        self, request: Request, found: Forecast, now_s: float, place: Place | None = None
    ) -> float:
        """By how much its bound exceeds the objective, behind refused requests that may return.

        place: kept for it, since it was refused before."""
        returning, wait_s = self._returning, found.wait_s
        # With hardly a queue they have not come as expected: the engine does not wait for them.
        if found.bound_s > HARDLY * found.limit_s:
            ahead_s = returning.ahead_s(now_s, request.tenant, request.priority, place)
            wait_s += returning.share * ahead_s
        return wait_s if place is None else wait_s - self.margin * found.limit_s

    def retry_after_s(
        self, request: Request, found: Forecast, now_s: float, place: Place | None = None
    ) -> float:
        """When it would be accepted, if it were refused now and all who may return did."""
        ahead_s = self._returning.ahead_s(now_s, request.tenant, request.priority, place)
        longest_s = max(found.wait_s + ahead_s, self.wait_s(request, found, now_s, place))
        return min(RETRY_PADDING * longest_s, MAX_RETRY_AFTER_S)

    # ---- learning -------------------------------------------------------------------

    def _learn(self, engine: EngineView) -> None:
        """Compare the first tokens since the last call with their predictions."""
        if not self._predicted:
            return
        for view in engine.decoding:
            if view.first_token_s is None:
                continue
            predicted = self._predicted.pop(view.request_id, None)
            if predicted is not None:
                bottleneck, raw_s, made_at_s = predicted
                self._corrections[bottleneck].observe(view.first_token_s - made_at_s, raw_s)
        if len(self._predicted) > 4 * self.predictor.max_requests + 1024:
            self._predicted.clear()  # the rest were aborted

    def _service_s(self, request: Request, engine: EngineView) -> float:
        """Time of compute, or of slots, that one such request takes."""
        predictor = self.predictor
        own = len(request.prompt) + len(request.output)
        slot_s = 1.0 / predictor.finish_rate(engine) if engine.decoding else 0.0
        busy = len(engine.decoding) + len(engine.prefilling) >= 0.9 * predictor.max_requests
        _, turn_s = self._capped_s(request.tenant, engine)
        return 1.1 * max(own / predictor.prefill_rate(engine), slot_s if busy else 0.0, turn_s)

    def _capped_s(self, tenant: str, engine: EngineView) -> tuple[float, float]:
        """Seconds until the tenant's cap lets a new request run, and those by which the one after
        it waits longer; zeros: a place is free."""
        cap, num_waiting = engine.cap_of(tenant)
        running = () if cap is None else (*engine.decoding, *engine.prefilling)
        # Those of the background do not count for live ones, as they give their places to these.
        own = [view for view in running if view.request.tenant == tenant]
        if cap is None or not own or len(own) + num_waiting < cap:
            return 0.0, 0.0
        whole = sum([view.max_length - view.num_prompt_tokens for view in own]) / len(own)
        # Of those that wait, some take the places still free.
        left = [float(view.max_length - view.num_tokens) for view in own]
        left = sorted(left + [whole] * (cap - len(own)))
        rounds, last = divmod(len(own) + num_waiting - cap, len(left))
        step_s = self.predictor.pace_s(engine, more=len(engine.prefilling) + 1)
        step_s *= self.predictor.peak.expected_share
        return step_s * (left[last] + rounds * whole), step_s * whole / cap


def _closed_s(found: Forecast, engine: EngineView) -> float:
    """For how long such a refusal holds for longer prompts too."""
    if found.wait_s <= 0.0:
        return 0.0  # only those who may return are before it
    if not (engine.num_waiting or engine.prefilling):
        return 0.0  # one so long that waiting would not help is accepted
    # The bound shrinks faster than time passes, and every step brings other predictions.
    return min(HOLDS * found.wait_s * found.raw_s / found.bound_s, MOST_CLOSED_S)


def late(found: Forecast) -> str:
    """The message of a refusal."""
    if found.wait_s <= 0.0:
        return "overloaded: requests that were refused before may return, and go first"
    return (
        f"overloaded: the first token would take {found.bound_s:.1f} s, "
        f"the objective allows {found.limit_s:.1f} s"
    )
