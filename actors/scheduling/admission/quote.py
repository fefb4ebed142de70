"""What would become of a request submitted now: admission's own prediction, without its effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from actors.scheduling.admission.limits import QueueLimits
from actors.scheduling.admission.predictive import Forecast, PredictiveAdmission, late
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Refuse
from actors.scheduling.interfaces import EngineView, Quote
from actors.scheduling.request import Objective, Request, SamplingParams

ASKING = -1  # no request has this id
NO_COST_MODEL = (
    "nothing can be predicted without a cost model: scheduling.budget adaptive or auto measures "
    "one at start, scheduling.cost_model names one that `legato profile` wrote"
)


def quote(
    engine: EngineView,
    limits: QueueLimits,
    now_s: float,
    num_prompt_tokens: int,
    max_tokens: int,
    tbt_s: float | None = None,
    ttft_s: float | None = None,
    tenant: str = "",
) -> Quote:
    """For a request of so many tokens under these objectives (None: the deployment's).

    Changes nothing, whatever it finds.
    """
    request = Request(
        ASKING,
        (0,) * num_prompt_tokens,
        SamplingParams(max_tokens),
        now_s,
        tenant=tenant,
        objective=Objective(tbt_s, ttft_s),
    )
    refusals = [limits.impossible(request, engine) or limits.overload(request, engine)]
    if not isinstance(limits.cost, OnlineCostModel):
        return _judged(Quote(None, message=NO_COST_MODEL), refusals)
    admission = limits.admission
    if not isinstance(admission, PredictiveAdmission):  # it would queue whatever comes
        admission = PredictiveAdmission.build(limits.config, limits.cost, max_wait_s=math.inf)
    predictor = admission.predictor
    forecast = admission.forecast(request, engine, now_s)
    said = Quote(
        True,
        forecast.expected_s,
        forecast.bound_s,
        predictor.tbt_bound_s(engine, num_prompt_tokens),
        # Few steps hold prefill alone, so what was learnt of them may be old: busy is not faster.
        min(predictor.least_ttft_s(num_prompt_tokens), forecast.expected_s),
        limits.least_tbt_s(num_prompt_tokens),
    )
    refusals.append(_first_token(request, said, forecast, admission, engine, now_s))
    refusals.append(_between_tokens(request, said, admission, engine))
    return _judged(said, refusals)


def _judged(said: Quote, refusals: Sequence[Refuse | None]) -> Quote:
    """What never passes outweighs what does, and the longest wait the others."""
    reasons = [refusal for refusal in refusals if refusal is not None]
    if not reasons:
        return said
    worst = max(reasons, key=lambda r: math.inf if r.retry_after_s is None else r.retry_after_s)
    return replace(
        said,
        can_serve_now=False,
        retry_after_s=worst.retry_after_s,
        message=worst.message,
        param=worst.param,
    )


def _first_token(
    request: Request,
    said: Quote,
    forecast: Forecast,
    admission: PredictiveAdmission,
    engine: EngineView,
    now_s: float,
) -> Refuse | None:
    """Admission takes a request that waiting would not help; a quote says that it will be late."""
    name, limit_s = request.request_id, forecast.limit_s
    if forecast.wait_s <= 0.0 or (forecast.alone and forecast.expected_s <= limit_s):
        return None
    if said.least_ttft_s is not None and said.least_ttft_s > limit_s:
        message = (
            f"a first token within {1000 * limit_s:g} ms cannot be had unless the prompt's "
            f"beginning is cached: it takes at least {1000 * said.least_ttft_s:.3g} ms"
        )
        return Refuse(name, message, "slo.ttft_ms")
    wait_s = admission.retry_after_s(forecast, now_s)
    if forecast.alone:  # what is in its way are the decodes
        wait_s = admission.predictor.ended_s(engine, len(engine.decoding))
    return Refuse(name, late(forecast), "slo.ttft_ms", wait_s)


def _between_tokens(
    request: Request, said: Quote, admission: PredictiveAdmission, engine: EngineView
) -> Refuse | None:
    """Whether steps with this request among those that run keep its objective."""
    predictor, context = admission.predictor, len(request.prompt)
    tbt_s = request.objective.tbt_s or predictor.tbt_s
    if tbt_s is None or said.tbt_bound_s is None or said.tbt_bound_s <= tbt_s:
        return None
    name, param = request.request_id, "slo.tbt_ms"
    running = len(engine.decoding) + len(engine.prefilling)
    fewer = next(
        (k for k in range(running + 1) if predictor.tbt_bound_s(engine, context, k) <= tbt_s), None
    )
    message = (
        f"steps beside {running} running requests take up to {1000 * said.tbt_bound_s:.3g} ms, "
        f"the objective allows {1000 * tbt_s:g} ms"
    )
    if fewer is None:
        return Refuse(name, f"{message}: not with this budget", param)
    fewer = min(fewer, len(engine.decoding))  # how long the others will run is not known yet
    wait_s = predictor.ended_s(engine, fewer) if fewer else said.ttft_s
    return Refuse(name, message, param, wait_s)
