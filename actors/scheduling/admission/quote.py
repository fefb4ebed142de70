"""The prediction for a request submitted now: that of admission, without its side effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from actors.scheduling.admission.limits import QueueLimits
from actors.scheduling.admission.predictive import Forecast, PredictiveAdmission, late
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Refuse
from actors.scheduling.interfaces import EngineView, Quote, QuoteRequest
from actors.scheduling.request import Request, SamplingParams

ASKING = -1  # no request has this id
BACKGROUND_SHARE = 0.5
NO_COST_MODEL = (
    "nothing can be predicted without a cost model: scheduling.budget adaptive or auto measures "
    "one at start, scheduling.cost_model names one that `legato profile` wrote"
)


def quote(engine: EngineView, limits: QueueLimits, asked: QuoteRequest, now_s: float) -> Quote:
    """The quote for a request that arrived now; changes nothing."""
    num_prompt_tokens = asked.num_prompt_tokens
    request = Request(
        ASKING,
        (0,) * num_prompt_tokens,
        SamplingParams(asked.max_tokens),
        now_s,
        tenant=asked.tenant,
        objective=asked.objective,
        priority=asked.priority,
    )
    refusals = [limits.impossible(request, engine) or limits.overload(request, engine)]
    if not isinstance(limits.cost, OnlineCostModel):
        return _judged(Quote(None, message=NO_COST_MODEL), refusals)
    admission = limits.admission
    if not isinstance(admission, PredictiveAdmission):  # it accepts every request
        admission = PredictiveAdmission.build(limits.config, limits.cost, max_wait_s=math.inf)
    predictor = admission.predictor
    engine = engine.found_by(request.priority, request.tenant)
    forecast = admission.forecast(request, engine, now_s)
    predicted = Quote(
        True,
        forecast.expected_s,
        forecast.bound_s,
        predictor.tbt_bound_s(engine, num_prompt_tokens),
        # Few steps hold only prefill, so their correction may be old: an idle engine is no slower.
        min(predictor.least_ttft_s(num_prompt_tokens), forecast.expected_s),
        limits.least_tbt_s(num_prompt_tokens),
    )
    refusals.append(_first_token(request, predicted, forecast, admission, engine, now_s))
    refusals.append(_between_tokens(request, predicted, admission, engine))
    return _judged(predicted, refusals)


def _judged(predicted: Quote, refusals: Sequence[Refuse | None]) -> Quote:
    """Permanent obstacles come first, then the longest wait."""
    reasons = [refusal for refusal in refusals if refusal is not None]
    if not reasons:
        return predicted
    worst = max(reasons, key=lambda r: math.inf if r.retry_after_s is None else r.retry_after_s)
    return replace(
        predicted,
        can_serve_now=False,
        retry_after_s=worst.retry_after_s,
        message=worst.message,
        param=worst.param,
    )


def _first_token(
    request: Request,
    predicted: Quote,
    forecast: Forecast,
    admission: PredictiveAdmission,
    engine: EngineView,
    now_s: float,
) -> Refuse | None:
    """Admission accepts a request that waiting would not help; a quote says it is late."""
    name, limit_s = request.request_id, forecast.limit_s
    if admission.wait_s(request, forecast, now_s) <= 0.0 or (
        forecast.alone and forecast.expected_s <= limit_s
    ):
        return None
    if predicted.least_ttft_s is not None and predicted.least_ttft_s > limit_s:
        message = (
            f"a first token within {1000 * limit_s:g} ms is not achievable unless the prompt's "
            f"beginning is cached: it takes at least {1000 * predicted.least_ttft_s:.3g} ms"
        )
        return Refuse(name, message, "slo.ttft_ms")
    wait_s = admission.retry_after_s(request, forecast, now_s)
    if forecast.alone and engine.decoding:  # only these delay it
        wait_s = admission.predictor.ended_s(engine, len(engine.decoding))
    return Refuse(name, late(forecast), "slo.ttft_ms", wait_s)


def _between_tokens(
    request: Request, predicted: Quote, admission: PredictiveAdmission, engine: EngineView
) -> Refuse | None:
    """Whether steps with this request and the running ones keep its objective.

    Of a negative priority it takes at most a part of the running ones' objectives too, so that
    prompts which come have the rest; with nothing running it always may.
    """
    predictor, context = admission.predictor, len(request.prompt)
    tbt_s = request.objective.tbt_s or predictor.tbt_s
    running = len(engine.decoding) + len(engine.prefilling)
    if request.priority < 0 and tbt_s is not None:
        others_s = [view.request.objective.tbt_s or tbt_s for view in engine.decoding]
        alone_s = predictor.tbt_bound_s(engine, context, running)
        tbt_s = max(BACKGROUND_SHARE * min([tbt_s, *others_s]), alone_s)
    if tbt_s is None or predicted.tbt_bound_s is None or predicted.tbt_bound_s <= tbt_s:
        return None
    name, param = request.request_id, "slo.tbt_ms"
    fewer = next(
        (k for k in range(running + 1) if predictor.tbt_bound_s(engine, context, k) <= tbt_s), None
    )
    message = (
        f"steps beside running requests ({running}) take up to "
        f"{1000 * predicted.tbt_bound_s:.3g} ms, the objective allows {1000 * tbt_s:.3g} ms"
    )
    if fewer is None:
        return Refuse(name, f"{message}: not with this budget", param)
    fewer = min(fewer, len(engine.decoding))  # it is unknown how long the others run
    wait_s = predictor.ended_s(engine, fewer) if fewer else predicted.ttft_s
    return Refuse(name, message, param, wait_s)
