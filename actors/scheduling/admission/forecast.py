"""Predicts the time to first token of a prompt submitted now, and the time between its tokens.

The prediction has no side effects: admission decides by it, and a quote reports it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from actors.scheduling.admission.peak import Places, PredictedPeak
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.interfaces import EngineView, RequestView, pending_tokens

CONSTANT_BUDGETS = ("fixed", "throttled")
LEAST_CHUNK = 16  # tokens
LEAST_SHARE = 0.5  # of the full rate; a single short step must not lower it further


class Bottleneck(IntEnum):
    """Resource that a queued prompt waits for; forecast errors are corrected per kind."""

    COMPUTE = 0
    PLACES = 1  # sequence slots or KV memory, freed when running requests end
    NOTHING = 2  # a short wait, which says little about long ones


@dataclass(slots=True)
class Situation:
    """What the forecasts of all prompts have in common, by an engine between two of its events.

    ahead: prompt tokens to compute before. begin_s: until a step planned now could begin.
    share, finish_rate, tightest_s: see `Predictor`. places: behind all that wait.
    full_steps: by the decodes in them, as needed.
    """

    engine: EngineView
    ahead: int
    begin_s: float
    share: float
    finish_rate: float
    tightest_s: float | None
    places: Places
    full_steps: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts from the cost model and the state of the engine.

    tbt_s: the deployment's objective; a request's own takes precedence.
    step_tokens: tokens of a step of a constant budget; None: the budget follows the objective.
    max_step_tokens, max_requests, max_model_len: limits of the engine.
    """

    cost: OnlineCostModel
    tbt_s: float | None
    step_tokens: int | None
    max_step_tokens: int
    max_requests: int
    max_model_len: int
    peak: PredictedPeak = field(default_factory=PredictedPeak)

    @classmethod
    def build(
        cls, config: SchedulerConfig, cost: OnlineCostModel, peak: PredictedPeak | None = None
    ) -> Predictor:
        step_tokens, most = None, config.max_step_tokens
        name = "most" if config.budget == "throttled" else "tokens"
        given = config.budget_options.get(name, config.token_budget)
        if config.budget in CONSTANT_BUDGETS or (config.budget == "auto" and given is not None):
            step_tokens = min(int(given or config.constant_budget), most)
        peak = peak or PredictedPeak()
        limits = most, config.max_requests, config.max_model_len
        return cls(cost, config.tbt_s, step_tokens, *limits, peak)

    # ---- to the first token -----------------------------------------------------------

    def situation(self, engine: EngineView, now_s: float) -> Situation:
        """What the engine looks like now; valid until its next event."""
        share, tightest_s = self._granted_share(engine), self.tightest_s(engine)
        chunk = share * self._full_step(self._decodes(engine), tightest_s)[0]
        return Situation(
            engine,
            ahead=pending_tokens(engine) - engine.num_shared_tokens,
            begin_s=self._begin_s(engine, now_s),
            share=share,
            finish_rate=self.finish_rate(engine),
            tightest_s=tightest_s,
            places=self.peak.places(engine, self.max_requests, chunk),
        )

    def waits_s(self, num_tokens: int, output: int, there: Situation) -> tuple[float, float]:
        """Seconds to the first token of a prompt of num_tokens, by `Bottleneck`.

        It waits for the prefill work ahead, and for a place (0.0: one is free).
        """
        engine, begin_s, finish_rate = there.engine, there.begin_s, there.finish_rate
        compute_s = begin_s + self._prefill_s(there.ahead + num_tokens, there)
        # Prompts ahead become decodes, which take a part of each step. On average half of them
        # have done so, and half of the decodes that end meanwhile have ended.
        joined = len(engine.prefilling) + engine.num_waiting - finish_rate * compute_s
        if joined:
            compute_s = begin_s + self._prefill_s(there.ahead + num_tokens, there, joined / 2)
        unused = engine.block_size / 2
        output = round(min(output, self.max_model_len - num_tokens) * self.peak.expected_share)
        steps, together = there.places.when(num_tokens + unused, output)
        if steps <= 0.0 or not finish_rate:
            return compute_s, 0.0
        places_s = steps * self.pace_s(engine)
        return compute_s, places_s + self._prefill_s(round(together), there, joined / 2)

    def unevenness(self, there: Situation) -> float:
        """The quantile of the time of a full step over its mean."""
        decodes = self._decodes(there.engine)
        mix = self._beside(decodes, self._full_step(decodes, there.tightest_s)[0])
        return self.cost.bound_factor(mix) / self.cost.ratio(mix)

    def _begin_s(self, engine: EngineView, now_s: float) -> float:
        """Seconds until a step planned now could begin, after those in flight."""
        steps, stages = engine.in_flight, self.cost.profile.num_stages
        if len(steps) < stages or not steps:
            return 0.0
        oldest = steps[0]
        if stages > 1:
            return max(0.0, oldest.planned_at_s + self.cost.latency_s(oldest.shape) - now_s)
        # The oldest began when the one before it was answered, and the next was planned then.
        begun_s = steps[1].planned_at_s if len(steps) > 1 else oldest.planned_at_s
        left_s = max(0.0, begun_s + self.cost.step_s(oldest.shape) - now_s)
        return left_s + sum([self.cost.step_s(step.shape) for step in steps][1:])

    def _prefill_s(self, num_tokens: int, there: Situation, more: float = 0.0) -> float:
        """Seconds of the steps (full ones and a last one) for this much prefill beside the decodes
        and so many more of mean length (negative: fewer)."""
        decodes = self._decodes(there.engine, more)
        key = decodes.num_decodes, decodes.decode_kv_tokens
        if key not in there.full_steps:
            there.full_steps[key] = self._full_step(decodes, there.tightest_s)
        return self._steps_s(num_tokens, decodes, *there.full_steps[key], there.share)

    def _steps_s(
        self, num_tokens: int, decodes: Mix, chunk: int, step_s: float, share: float = 1.0
    ) -> float:
        chunk = max(LEAST_CHUNK, round(chunk * share))
        whole, rest = divmod(num_tokens - 1, chunk)
        last = self._beside(decodes, rest + 1)
        return whole * step_s + self.cost.profile.latency_s(last) * self.cost.ratio(last)

    def prefill_rate(self, engine: EngineView) -> float:
        """Prompt tokens per second while every running request keeps decoding to the objective."""
        chunk, step_s = self._full_step(self._decodes(engine), self.tightest_s(engine))
        return self._granted_share(engine) * chunk / step_s

    def light_rate(self, engine: EngineView) -> float:
        """Prompt tokens per second beside a single decode: the upper limit of prefill."""
        chunk, step_s = self._full_step(self._single(engine), self.tightest_s(engine))
        return chunk / step_s

    def decode_share(self, engine: EngineView) -> float:
        """The running decodes' share of step time, not counting the time of a single decode; 1.0
        leaves none for prefill. It grows in proportion to the number of decodes."""
        if not engine.decoding:
            return 0.0
        profile, single, decodes = self.cost.profile, self._single(engine), self._decodes(engine)
        _, step_s = self._full_step(single, self.tightest_s(engine))
        lone_s = profile.stage_s(single) * self.cost.ratio(single)
        taken_s = profile.stage_s(decodes) * self.cost.ratio(decodes) - lone_s
        return min(1.0, max(0.0, taken_s / max(step_s - lone_s, 1e-6)))

    def _single(self, engine: EngineView) -> Mix:
        """One decode, of the mean context of those that run."""
        decodes = self._decodes(engine)
        return Mix(1, decodes.decode_kv_tokens // max(decodes.num_decodes, 1))

    def _beside(self, decodes: Mix, chunk: int) -> Mix:
        mix = Mix(decodes.num_decodes, decodes.decode_kv_tokens)
        mix.add(0, chunk, self.cost.profile.attention_window)
        return mix

    def _decodes(self, engine: EngineView, more: float = 0.0) -> Mix:
        """The decodes that a step holds, one stage's share of them."""
        stages, decoding = self.cost.profile.num_stages, engine.decoding
        running = round(min(max(len(decoding) + more, 0.0), float(self.max_requests)))
        context = sum([view.num_tokens for view in decoding])
        if decoding:
            context = context * running // len(decoding)
        elif engine.num_waiting:
            context = engine.num_waiting_tokens * running // engine.num_waiting
        return Mix(-(-running // stages), context // stages)

    def _full_step(self, decodes: Mix, tbt_s: float | None) -> tuple[int, float]:
        """Prefill tokens that the budget allows beside these decodes, and the seconds of such a
        step. tbt_s: the objective of the decodes."""
        profile = self.cost.profile
        if self.step_tokens is not None:
            chunk = self.step_tokens - decodes.num_decodes
        elif tbt_s is None or not decodes.num_decodes:
            chunk = self.max_step_tokens - decodes.num_decodes
        else:
            step_s = profile.stage_share_s(tbt_s, self.max_step_tokens)
            allowed_s = step_s / self.cost.bound_factor(decodes)
            chunk = profile.largest_chunk(decodes, 0, self.max_step_tokens, allowed_s)
        # Never zero: even a saturated engine gets free time when decodes end.
        chunk = max(chunk, LEAST_CHUNK)
        mix = self._beside(decodes, chunk)
        return chunk, max(profile.stage_s(mix) * self.cost.ratio(mix), 1e-6)

    def _granted_share(self, engine: EngineView) -> float:
        """The current prefill rate, as a share of the rate that the objectives would allow.

        An adaptive budget uses less than they allow. This is measurable only with a backlog of
        prompts; otherwise steps are short because prompts are.
        """
        # Among the prefills of a shape are decodes with drafts
        steps = [*engine.backlogged]
        steps += [(s.num_prompt_tokens, s.shape) for s in engine.in_flight if s.num_prompt_tokens]
        if self.step_tokens is not None or not steps or not pending_tokens(engine):
            return 1.0
        rate = sum([n for n, _ in steps]) / max(sum([self.cost.step_s(s) for _, s in steps]), 1e-6)
        seen = Mix(steps[-1][1].num_decodes, steps[-1][1].decode_context_tokens)
        chunk, step_s = self._full_step(seen, self.tightest_s(engine))
        return min(1.0, max(LEAST_SHARE, rate * step_s / chunk))

    def tightest_s(self, engine: EngineView, *more: RequestView) -> float | None:
        """The tightest TBT objective of the running streams and `more`, or the deployment's."""
        limits_s = [v.request.objective.tbt_s or self.tbt_s for v in (*engine.decoding, *more)]
        return min([s for s in limits_s if s is not None], default=None) if limits_s else self.tbt_s

    # ---- places -----------------------------------------------------------------------

    def ended_s(self, engine: EngineView, count: int) -> float:
        """Seconds until `count` (positive) of the running ones have ended."""
        left = sorted([view.max_length - view.num_tokens for view in engine.decoding])
        return left[count - 1] * self.peak.expected_share * self.pace_s(engine)

    def finish_rate(self, engine: EngineView) -> float:
        """Running requests that end per second, at the pace their tokens have come so far.

        A running request is half done on average, so an output is twice what is left: n requests
        with L tokens left each on average end at a rate of n / (2 L) per step. 0.0 while none
        decodes.
        """
        decoding = engine.decoding
        if not decoding:
            return 0.0
        left = sum([v.max_length - v.num_tokens for v in decoding]) * self.peak.expected_share
        return len(decoding) ** 2 / max(2.0 * left * self.pace_s(engine), 1e-6)

    def pace_s(self, engine: EngineView, more: int = 0) -> float:
        """Mean time between tokens of the decodes. At least the step time of the decodes alone,
        because there may have been fewer before.

        more: decodes to come; before the second token it is then that step time, with them."""
        span_s, count = 0.0, 0
        for view in engine.decoding:
            if view.first_token_s is not None and view.last_token_s is not None:
                span_s += view.last_token_s - view.first_token_s
                count += view.num_output_tokens - 1
        mix = self._decodes(engine, more)
        alone_s = self.cost.profile.latency_s(mix) * self.cost.ratio(mix)
        if count > 0 and span_s > 0.0:
            return max(alone_s, span_s / count)
        if more or not engine.decoding:
            return alone_s
        return self._first_pace_s(engine, mix, alone_s)

    def _first_pace_s(self, engine: EngineView, decodes: Mix, alone_s: float) -> float:
        """While none has a second token: full steps as long as there is prefill, then the decodes
        alone, as a mean over what is left of them."""
        full = self._beside(decodes, self._full_step(decodes, self.tightest_s(engine))[0])
        full_s = self.cost.profile.latency_s(full) * self.cost.ratio(full)
        left = sum([v.max_length - v.num_tokens for v in engine.decoding]) / len(engine.decoding)
        ahead = pending_tokens(engine) - engine.num_shared_tokens
        num_full = ahead / (full.num_tokens - decodes.num_tokens)
        share = min(1.0, num_full / max(1.0, left * self.peak.expected_share))
        return alone_s + share * max(0.0, full_s - alone_s)

    def least_ttft_s(self, num_tokens: int) -> float:
        """Seconds to the first token of a prompt without cached tokens, on an idle engine."""
        steps_s = self._steps_s(num_tokens, Mix(), *self._full_step(Mix(), None))
        return steps_s * math.exp(-self.cost.slowness)  # the usual time

    # ---- between tokens ---------------------------------------------------------------

    def tbt_bound_s(self, engine: EngineView, context: int, fewer: int = 0) -> float:
        """Upper bound on the time between tokens of a request with `context` tokens. An adaptive
        budget gives prefill only the time that decodes leave; a constant one takes its tokens
        whatever their time. fewer: running requests that have ended by then."""
        mix = self._all_decodes(engine, context, fewer)
        if self.step_tokens is not None and self.step_tokens > mix.num_decodes:
            mix = self._beside(mix, self.step_tokens - mix.num_decodes)
        return self.cost.profile.latency_s(mix) * self.cost.bound_factor(mix)

    def stalls(self, engine: EngineView, starting: RequestView) -> bool:
        """Whether one more request would make even steps without prefill miss a TBT objective."""
        tbt_s = self.tightest_s(engine, *engine.prefilling, starting)
        if tbt_s is None or not (engine.decoding or engine.prefilling):
            return False
        mix, profile = self._all_decodes(engine, starting.num_tokens), self.cost.profile
        limit_s = profile.stage_share_s(tbt_s, mix.num_decodes)
        return profile.stage_s(mix) * self.cost.bound_factor(mix) > limit_s

    def _all_decodes(self, engine: EngineView, context: int, fewer: int = 0) -> Mix:
        """A stage's share of a step in which all running requests and one of `context` tokens
        decode."""
        running = len(engine.decoding) + len(engine.prefilling)
        held = sum([view.num_tokens for view in (*engine.decoding, *engine.prefilling)])
        held = held * (running - fewer) // max(1, running)
        stages = self.cost.profile.num_stages
        return Mix(-(-(running - fewer + 1) // stages), (held + context) // stages)
