"""Admission by what accepting a request would break.

It predicts the TBT of running and the TTFT of queued requests, and refuses early, with the time at
which the same request would be accepted, what would break either. Memory is judged by `peak`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from actors.scheduling.admission.peak import PredictedPeak
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel, RecentQuantile, cost_model_for
from actors.scheduling.interfaces import (
    EngineView,
    Refusal,
    RequestView,
    StepTimePredictor,
    pending_tokens,
)
from actors.scheduling.request import Request

MAX_RETRY_AFTER_S = 3600.0
WATCHED = 200  # predictions whose outcome is remembered
ENOUGH, CAUTION = 20, 1 / 0.9  # see `Correction`


class Bottleneck(IntEnum):
    """What a queued prompt waits for: each is mispredicted in its own way."""

    COMPUTE = 0
    PLACES = 1  # sequence slots or KV memory, which come free as running requests end


class Correction:
    """What became of recent predictions: the factor that would have kept a share of them.

    share: of predictions that shall be kept. Until `ENOUGH` are known the factor is at least
    `CAUTION`: budgets stop lengthening steps at nine tenths of the best token rate.
    """

    def __init__(self, share: float) -> None:
        self._recent = RecentQuantile(share, WATCHED)  # of log(actual / predicted)

    def observe(self, actual_s: float, predicted_s: float) -> None:
        self._recent.add(math.log(max(actual_s, 1e-3) / max(predicted_s, 1e-3)))

    @property
    def factor(self) -> float:
        if not self._recent:
            return CAUTION
        learned = math.exp(self._recent.value)
        return learned if len(self._recent) >= ENOUGH else max(learned, CAUTION)


@dataclass(slots=True)
class PredictiveAdmission:
    """Refuses a request whose acceptance would break a promise, and says when to come again.

    tbt_s, ttft_s: the deployment's objectives; a request's own take precedence.
    max_requests: sequence slots of the engine.
    max_wait_s: the queue's bound where no TTFT objective is stated.
    action: "refuse", or "queue": admit it anyway (a `deadline` order then relegates what is
        lost), and only hold back starts that would stall running decodes.
    confidence: share of accepted requests whose first token shall come as predicted. What came
        of earlier predictions corrects later ones (`Correction`, one per bottleneck).
    margin: share of the TTFT objective kept back, as the engine changes while a prompt waits.
    """

    cost: OnlineCostModel
    tbt_s: float | None
    ttft_s: float | None
    max_step_tokens: int
    max_requests: int
    max_wait_s: float = 10.0
    action: str = "refuse"
    confidence: float = 0.99
    margin: float = 0.1
    peak: PredictedPeak = field(default_factory=PredictedPeak)
    _promised_s: float = 0.0  # work that refused clients were told to bring later
    _promised_at_s: float = 0.0  # when `_promised_s` was last brought up to date
    # Accepted, first token still to come: what for, how long, uncorrected.
    _predicted: dict[int, tuple[Bottleneck, float]] = field(default_factory=dict)
    _corrections: tuple[Correction, Correction] = field(init=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.confidence < 1.0:
            raise TypeError(f"confidence lies between 0 and 1, not {self.confidence}")
        self._corrections = (Correction(self.confidence), Correction(self.confidence))

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
        return cls(
            cost_model_for("admission", "predictive", cost),
            config.tbt_s,
            config.ttft_s,
            config.max_step_tokens,
            config.max_requests,
            peak=PredictedPeak(expected_share, reserve),
            **options,
        )

    # ---- interfaces.Admission ---------------------------------------------------------

    def on_submit(self, request: Request, engine: EngineView) -> Refusal | None:
        if self.action != "refuse":
            return None
        self._learn(engine)
        own = len(request.prompt) + len(request.output)
        rate = self.prefill_rate(engine)
        limit_s = request.objective.ttft_s or self.ttft_s or self.max_wait_s
        bottleneck, raw_s = self._bottleneck(own, engine)
        ttft_s = raw_s * self._corrections[bottleneck].factor
        wait_s = ttft_s - limit_s * (1.0 - self.margin)
        idle = not engine.num_waiting and not engine.prefilling
        if wait_s <= 0.0 or (idle and own / rate > limit_s):
            # It will be in time; or nothing is in its way, and waiting would never help.
            if raw_s >= 0.5 * limit_s:  # an empty queue teaches nothing about a full one
                self._predicted[request.request_id] = (bottleneck, raw_s)
            return None
        return Refusal(
            f"overloaded: the first token would take {ttft_s:.1f} s, "
            f"the objective allows {limit_s:.1f} s",
            retry_after_s=self._retry_after_s(wait_s, self._service_s(own, rate, engine), engine),
        )

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        if self._stalls(engine, request.num_tokens):
            return False
        return self.peak.may_start(request, engine)

    # ---- predictions ------------------------------------------------------------------

    def first_token_s(self, num_tokens: int, engine: EngineView) -> float:
        """Seconds until a prompt of num_tokens submitted now gives its first token."""
        bottleneck, raw_s = self._bottleneck(num_tokens, engine)
        return raw_s * self._corrections[bottleneck].factor

    def _bottleneck(self, num_tokens: int, engine: EngineView) -> tuple[Bottleneck, float]:
        """What the prompt will wait for and the seconds to its first token, uncorrected.

        Two queues must let it through: prefill work ahead, and places.
        """
        ahead = pending_tokens(engine)
        compute_s = (ahead + num_tokens) / self.prefill_rate(engine)
        finish_rate = self._finish_rate(engine) if engine.decoding else 0.0
        # Prompts ahead turn into decodes, which take their part of each step: half of them have,
        # on average, and half of those that end meanwhile are gone.
        joined = len(engine.prefilling) + engine.num_waiting - finish_rate * compute_s
        rate = self.prefill_rate(engine, joined / 2)
        compute_s = (ahead + num_tokens) / rate
        share = self._lacking_share(num_tokens, engine)
        if share <= 0.0 or not finish_rate:
            return Bottleneck.COMPUTE, compute_s
        places_s = share * len(engine.decoding) / finish_rate + num_tokens / rate
        compute, places = self._corrections
        if places_s * places.factor > compute_s * compute.factor:
            return Bottleneck.PLACES, places_s
        return Bottleneck.COMPUTE, compute_s

    def _lacking_share(self, num_tokens: int, engine: EngineView) -> float:
        """Share of the decodes that must end before a prompt queued now finds a place."""
        decoding = engine.decoding
        if not decoding:
            return 0.0
        running = len(decoding) + len(engine.prefilling)
        slots = engine.num_waiting + 1 - (self.max_requests - running)
        free_tokens = self.peak.free_tokens(engine)
        tokens = engine.num_waiting_tokens + num_tokens - free_tokens
        held = sum(view.max_length for view in decoding)
        return max(slots / len(decoding), tokens / held)

    def prefill_rate(self, engine: EngineView, more: float = 0.0) -> float:
        """Prompt tokens per second while every running request keeps decoding to the objective.

        more: decodes to count on top of those that run now (negative: fewer), of mean length.
        """
        profile = self.cost.profile
        stages = profile.num_stages
        decoding = engine.decoding
        running = round(min(max(len(decoding) + more, 0.0), float(self.max_requests)))
        context = sum(view.num_tokens for view in decoding)
        if decoding:
            context = context * running // len(decoding)
        elif engine.num_waiting:
            context = engine.num_waiting_tokens * running // engine.num_waiting
        mix = Mix(-(-running // stages), context // stages)
        if self.tbt_s is None or not running:
            chunk = min(2048, self.max_step_tokens)
            step_s = profile.stage_s(Mix(mix.num_decodes, mix.decode_kv_tokens, 1, chunk, chunk))
        else:
            step_s = profile.stage_share_s(self.tbt_s, self.max_step_tokens)
            allowed_s = step_s / self.cost.bound_factor(mix)
            chunk = profile.largest_chunk(mix, 0, self.max_step_tokens, allowed_s)
        # Even a saturated engine frees time as its decodes finish: never predict "never".
        return max(chunk, 16) / max(step_s, 1e-6)

    def _finish_rate(self, engine: EngineView) -> float:
        """Running requests that end per second, at the pace their tokens have come so far.

        A request met at random is half done, so whole outputs are twice what is left: n requests
        with L left each on average end at a rate of n / (2 L) a step.
        """
        decoding = engine.decoding
        left = sum(v.max_length - v.num_tokens for v in decoding) * self.peak.expected_share
        return len(decoding) ** 2 / max(2.0 * left * self._pace_s(engine), 1e-6)

    def _pace_s(self, engine: EngineView) -> float:
        """Mean time between the tokens of decodes; the objective before any came."""
        span_s, count = 0.0, 0
        for view in engine.decoding:
            if view.first_token_s is not None and view.last_token_s is not None:
                span_s += view.last_token_s - view.first_token_s
                count += view.num_output_tokens - 1
        if count > 0 and span_s > 0.0:
            return span_s / count
        return self.tbt_s or self.cost.profile.stage_s(Mix(len(engine.decoding)))

    def _stalls(self, engine: EngineView, context: int) -> bool:
        """Whether decodes alone would miss the TBT objective with one request more."""
        running = len(engine.decoding) + len(engine.prefilling)
        if self.tbt_s is None or not running:
            return False
        profile = self.cost.profile
        stages = profile.num_stages
        held = sum(v.num_tokens for v in engine.decoding) + sum(
            v.num_tokens for v in engine.prefilling
        )
        mix = Mix(-(-(running + 1) // stages), (held + context) // stages)
        limit_s = profile.stage_share_s(self.tbt_s, mix.num_decodes)
        return profile.stage_s(mix) * self.cost.bound_factor(mix) > limit_s

    # ---- learning and promising -------------------------------------------------------

    def _learn(self, engine: EngineView) -> None:
        """Compare first tokens that have come with what was predicted."""
        if not self._predicted:
            return
        for view in engine.decoding:
            if view.first_token_s is None:
                continue
            predicted = self._predicted.pop(view.request_id, None)
            if predicted is not None:
                bottleneck, raw_s = predicted
                actual_s = view.first_token_s - view.request.arrival_s
                self._corrections[bottleneck].observe(actual_s, raw_s)
        if len(self._predicted) > 4 * self.max_requests + 1024:  # aborted ones never come
            self._predicted.clear()

    def _service_s(self, num_tokens: int, rate: float, engine: EngineView) -> float:
        """Time that the engine must set aside for one such request, of compute or of slots."""
        slot_s = 1.0 / self._finish_rate(engine) if engine.decoding else 0.0
        busy = len(engine.decoding) + len(engine.prefilling) >= 0.9 * self.max_requests
        return 1.1 * max(num_tokens / rate, slot_s if busy else 0.0)

    def _retry_after_s(self, wait_s: float, own_s: float, engine: EngineView) -> float:
        """When it would be accepted, behind all that were told to come earlier."""
        now_s = engine.now_s
        self._promised_s = max(0.0, self._promised_s - (now_s - self._promised_at_s))
        self._promised_at_s = now_s
        retry_after_s = min(wait_s + self._promised_s, MAX_RETRY_AFTER_S)
        self._promised_s = min(self._promised_s + own_s, MAX_RETRY_AFTER_S)
        return retry_after_s
