"""A budget per step: the largest prefill that the running decodes have time for.

Three bounds are computed anew for each step:

1. *Slack.* The step's predicted time plus the time outside the stages between two answers, both at
   a learned quantile, must fit the least slack of the step's decodes, and leave the decodes of
   other micro-batches their slack. If objectives are missed nevertheless, it plans for a smaller
   share of them (`slack.KeptShare`).
2. *Rate.* Of the sizes that fit, the one with the least time per token: a step ends at a tile edge,
   and is not extended where longer steps gain little (`StepSizes`). With a queue and one stage the
   time of the decodes counts too, because longer steps share it.
3. *Pace.* While sequence slots or KV blocks are nearly used up, prefill is spread evenly over the
   steps (`Pace`). Evenly filled steps cost least and cause no pipeline bubbles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from actors.scheduling.budgets.adapter_loads import UNPROMISED_LOAD_S, least_load_s, load_s
from actors.scheduling.budgets.background import BackgroundRoom
from actors.scheduling.budgets.slack import INITIAL_SHARE, KeptShare, Slack, TimeOutside
from actors.scheduling.budgets.step_sizes import LOOK_EVERY, Pace, SizeChoice, StepSizes, add_chunk
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.delays import ArrivalCost, WayToClient
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel, cost_model_for
from actors.scheduling.interfaces import EngineView
from actors.scheduling.plan import StepShape
from actors.scheduling.registry import within

INFINITY = math.inf
PATIENCE = 20  # longest pause of all prefill, in TBT objectives
# Beside one prompt that has the engine's prefill to itself, hundreds of steps in a row keep the
# objective only by a bound that one in thousands exceeds. The noisier they are, the later it ends.
LONE_CAUTION = 2.5
SLOW, SLOW_PATIENCE = math.log(1.1), 3  # in a moment this much slower than usual, so many times
LEAST_RELIEF = 16  # tokens
DENIALS = 20  # steps without prefill after which the bound is learned anew
EASE_EVERY = 3  # such steps; see `_may_ease`


@dataclass(slots=True)
class AdaptiveBudget:
    """Implements `interfaces.TokenBudget`.

    cost: the cost model, which the core updates.
    tbt_s: the deployment's objective; a request's own takes precedence; None: no objective.
    max_requests: sequence slots; with max_step_tokens the limits of the engine.
    smoothness: longest gap allowed, in objectives (see `slack`).
    headroom, delivery_s: left of each limit for the way to the client (see `WayToClient`). One on
        the same cores reads sixteen streams up to 3 ms later than they were sent.
    growth: context tokens by which running requests may still grow; new prompts are held back
        while decodes alone would miss the objective after that growth.
    efficiency: share of the best token rate from which steps are not made longer.
    ease: likewise of the best prefill rate beside the decodes, with a queue and one stage.
    hands_over: streams leave with their first token.
    allowed_misses, miss_cost, first_share: share of the steps that may miss the objective, by how
        much a miss lowers the share of it that is planned for, and its first value (`KeptShare`).
    caution: the bound of a step's time is so many times as far from its mean as the learned one.
    pace: change of the pace of prefill, as a share per step; 0: no pacing.
    """

    learns: ClassVar[bool] = True

    cost: OnlineCostModel
    tbt_s: float | None
    max_step_tokens: int
    max_requests: int
    smoothness: float = 1.0
    headroom: float = 0.04
    delivery_s: float = 0.0
    growth: int = 128
    efficiency: float = 0.9
    ease: float = 0.9
    allowed_misses: float = 0.0075  # a P99 objective permits 0.01
    miss_cost: float = 0.02
    first_share: float = INITIAL_SHARE
    caution: float = 1.0
    pace: float = 0.01
    hands_over: bool = False
    follow_learnt: bool = False  # sizes follow what is learned of each, bad moments are forgotten
    overlap_chunks: bool = False  # chunks of one prompt may follow each other through the stages
    holds_starts: bool = field(init=False, default=False)
    _most_alone: int = field(init=False)  # tokens of a step beside which no decode waits
    _slack: Slack = field(init=False)
    _sizes: SizeChoice = field(init=False)
    _background: BackgroundRoom = field(init=False)
    _pace: Pace = field(init=False)
    _outside: TimeOutside = field(init=False)
    _kept: KeptShare = field(init=False)
    _way: WayToClient = field(init=False)
    _arrivals: ArrivalCost = field(init=False)
    _prefilled_at_s: float = field(init=False, default=0.0)  # or when none was held back
    _num_denied: int = field(init=False, default=0)  # steps in a row that denied prompts prefill
    # Of the planning under way, set at the end of `num_tokens`, as is `holds_starts`:
    _limit_s: float = field(init=False, default=INFINITY)  # by slack
    _relieves: bool = field(init=False, default=False)  # prefill after too long a pause of it all
    _caution: float = field(init=False, default=1.0)  # of the planning under way, set at its begin

    @classmethod
    def build(
        cls, config: SchedulerConfig, cost: OnlineCostModel | None, **options: Any
    ) -> AdaptiveBudget:
        limits = (config.tbt_s, config.max_step_tokens, config.max_requests)
        cost = cost_model_for("budget", "adaptive", cost)
        return cls(
            cost, *limits, delivery_s=config.delivery_s, hands_over=config.hands_over,
            overlap_chunks=config.overlap_chunks, **options,
        )  # fmt: skip

    def __post_init__(self) -> None:
        within(0.01, 1e9, smoothness=self.smoothness)
        within(0, 1e9, growth=self.growth, caution=self.caution)
        shares = ("headroom", "efficiency", "ease", "allowed_misses", "miss_cost", "first_share")
        within(0, 1, **{name: getattr(self, name) for name in shares})
        within(0, 0.1, pace=self.pace)  # nine times it is taken off at once
        most = self.max_step_tokens
        self._slack = Slack(self.cost, self.tbt_s, most, self.smoothness)
        self._sizes = SizeChoice(self.cost, most, self.efficiency, self.ease, self.follow_learnt)
        self._most_alone = self._sizes.hand_over_tokens if self.hands_over else most
        self._background = BackgroundRoom(self.cost)
        self._pace = Pace(self.pace, most, self.max_requests)
        self._outside = TimeOutside(self.cost)
        of_misses = (self.allowed_misses, self.follow_learnt, self.miss_cost, self.first_share)
        self._kept = KeptShare(*of_misses)
        self._way = WayToClient(self.headroom, self.delivery_s)
        shares_steps = self.follow_learnt and self.cost.profile.num_stages == 1
        self._arrivals = ArrivalCost(self.delivery_s if shares_steps else None)

    # ---- interfaces.TokenBudget -------------------------------------------------------

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        self._watch(engine)
        share = self._kept.for_queue(engine.num_waiting)
        lone = self.follow_learnt and not engine.num_waiting
        self._caution = max(self.caution, LONE_CAUTION) if lone else self.caution
        limit_s = self._slack.limit_s(shape, engine) * share - self._outside.seconds
        limit_s -= self._arrivals.seconds(limit_s, self.cost.slowness)
        if self.hands_over and all(view.last_token_s is None for view in engine.decoding):
            limit_s = INFINITY  # the streams that now begin leave before this step would delay them
        holds_starts = relieves = False
        if limit_s < INFINITY:
            limit_s -= least_load_s(self._slack.tightest_s) if engine.num_adapter_loads else 0.0
            tokens, holds_starts, relieves = self._fit(limit_s, shape, engine)
        else:
            tokens = self._most_alone
            self._prefilled_at_s = engine.now_s  # no prefill is held back
            if self.tbt_s is None and shape.num_decode_tokens:
                tokens = max(self._sizes.efficient_tokens, shape.num_decode_tokens + LEAST_RELIEF)
        if engine.is_background:
            tokens = min(tokens, self._sizes.of_background(shape.num_decodes + LEAST_RELIEF))
        self._limit_s, self._relieves, self.holds_starts = limit_s, relieves, holds_starts
        return tokens

    def may_start(self, engine: EngineView) -> bool:
        """Whether decodes with one more request keep the tightest objective after growing."""
        grows = self._relieves or self._may_grow(engine)
        self.holds_starts |= not grows  # known only when the core asks
        return grows

    def num_background_decodes(self, live: StepShape, most: int, context: int) -> int:
        return self._background.num_decodes(live, most, context)

    def room_for_background(self, shape: StepShape) -> int:
        return self._background.num_tokens(shape, self.max_step_tokens - shape.num_tokens)

    def room_for_drafts(self, shape: StepShape) -> int:
        most = self.max_step_tokens - shape.num_tokens
        if self._limit_s == INFINITY or most < 1:
            return max(0, most)
        mix = Mix.of_shape(shape, self.cost.profile.attention_window)
        context = shape.decode_context_tokens // max(1, shape.num_decodes)
        limit_s = self._limit_s * self._share() / self._bound_factor(mix, self._limit_s)[0]
        return self.cost.profile.largest_chunk(mix, context, most, limit_s)

    def room_for_adapter_loads_s(self, shape: StepShape) -> float:
        if self._limit_s == INFINITY:
            return UNPROMISED_LOAD_S
        mix = Mix.of_shape(shape, self.cost.profile.attention_window)
        step_s = self.cost.profile.stage_s(mix) * self.cost.bound_factor(mix, self._caution)
        return load_s(self._slack.tightest_s, self._limit_s * self._share() - step_s)

    def observe(self, shape: StepShape, duration_s: float, drafting_s: float) -> None:
        """The core itself updates the shared cost model, next."""
        self.cost.stands_in = self.follow_learnt  # not as it is built: the change may be refused
        self._outside.answered(shape, duration_s + drafting_s)
        self._arrivals.answered(duration_s, self.cost.usual_s(shape))
        self._sizes.num_answered += 1
        if self._sizes.num_answered % LOOK_EVERY == 0:
            self._sizes.look_again()

    def delivery_took(self, seconds: float) -> None:
        self._way.took(seconds)

    def _share(self) -> float:
        """Of the tightest objective and of every limit: what steps may use."""
        return 1.0 - self._way.share(self._slack.tightest_s)

    def _watch(self, engine: EngineView) -> None:
        """Learn from the last step whether streams keep their objectives."""
        tbt_s = self._slack.tightest_s
        self._arrivals.planning(engine.num_arrived)
        if timed := self._outside.planning(engine, tbt_s):
            (shape, took_s), allowed_s = timed, tbt_s * self._share()
            kept = took_s <= allowed_s
            # A step without prefill or drafts could not have been shorter.
            if (shape.num_decodes or shape.num_drafted) and (kept or shape.prefills):
                self._kept.note(kept, took_s / allowed_s)

    def _doubt(self, bounded: Mix | None) -> None:
        """Forget an error bound that has prevented prefill for a while, as no step measures it."""
        self._num_denied += 1
        if bounded and self._num_denied >= DENIALS:
            self._num_denied = 0
            self.cost.forget(bounded)

    def _may_ease(self, mix: Mix, limit_s: float, engine: EngineView) -> bool:
        """Whether one of `EASE_EVERY` denied steps may hold `LEAST_RELIEF` tokens, which fit by the
        expected time, not by its bound: few misses, where the relief of a pause is a certain one.
        """
        if not self.follow_learnt or self._num_denied % EASE_EVERY:
            return False
        start = engine.prefilling[0].num_computed_tokens if engine.prefilling else 0
        eased = Mix(mix.num_decodes, mix.decode_kv_tokens, beside_move=mix.beside_move)
        eased.add(start, LEAST_RELIEF, self.cost.profile.attention_window)
        expected_s = self.cost.profile.stage_s(eased) * self.cost.ratio(eased)
        return expected_s <= limit_s and eased.num_tokens <= self.max_step_tokens

    def _patience(self) -> int:
        """In objectives. A slow moment of the machine may pass, and relief would double its gap."""
        slow = self.follow_learnt and self.cost.slowness > SLOW
        return PATIENCE * (SLOW_PATIENCE if slow else 1)

    def _relief(self, mix: Mix) -> int:
        """Prefill tokens that take about one objective longer than the decodes alone."""
        limit_s = self.cost.profile.stage_s(mix) + self._slack.tightest_s
        most = self.max_step_tokens - mix.num_tokens
        return max(self.cost.profile.largest_chunk(mix, 0, most, limit_s), min(LEAST_RELIEF, most))

    # ---- how much prefill fits --------------------------------------------------------

    def _fit(self, limit_s: float, shape: StepShape, engine: EngineView) -> tuple[int, bool, bool]:
        """The tokens of a step of this length, whether starts are held, and whether it relieves."""
        mix = Mix.of_shape(shape, self.cost.profile.attention_window)
        num_planned, now_s = mix.num_tokens, engine.now_s
        limit_s *= self._share()
        factor, bounded = self._bound_factor(mix, limit_s)
        tokens, holds_starts = self._fill(mix, limit_s / factor, engine)
        tokens = min(tokens, num_planned + self._pace.next_tokens(engine))
        if tokens > num_planned:
            self._prefilled_at_s, self._num_denied = now_s, 0
            return tokens, holds_starts, False
        # A waiting prompt is denied only by an objective stricter than the deployment's.
        stricter = self._slack.tightest_s < (self.tbt_s or INFINITY)
        if not (engine.prefilling or (engine.num_waiting and stricter)):
            self._prefilled_at_s = now_s
        if now_s - self._prefilled_at_s > self._patience() * self._slack.tightest_s:
            self._prefilled_at_s = now_s
            return tokens + self._relief(mix), holds_starts, True
        if engine.prefilling or (engine.num_waiting and not holds_starts):
            self._doubt(bounded)
            if mix.num_tokens == num_planned and self._may_ease(mix, limit_s, engine):
                if engine.prefilling:
                    self._prefilled_at_s = now_s
                return tokens + LEAST_RELIEF, holds_starts, False
        return tokens, holds_starts, False

    def _fill(self, mix: Mix, limit_s: float, engine: EngineView) -> tuple[int, bool]:
        """Add chunks to `mix` as the policy will; returns its tokens and if starts are held."""
        profile = self.cost.profile
        sizes: StepSizes | None = self._sizes.usual
        most = self._sizes.efficient_tokens
        if profile.num_stages == 1 and engine.num_waiting > 1:
            sizes, most = self._sizes.in_queue(mix, self._outside.median_s)
        most = max(most, mix.num_tokens)
        # A prompt with a chunk in flight cannot join this step in a pipeline.
        one_at_a_time = profile.num_stages > 1 and not self.overlap_chunks
        steps = {step.plan.step_id for step in engine.in_flight} if one_at_a_time else ()
        for view in engine.prefilling:
            done, left = view.num_computed_tokens, most - mix.num_tokens
            if left < 1 or view.step_id in steps:
                continue
            left = min(view.num_tokens - done, left)
            if left > 0 and not add_chunk(profile, mix, done, left, limit_s, sizes):
                return mix.num_tokens, False
        left = min(engine.num_waiting_tokens, most - mix.num_tokens)
        holds_starts = left > 0 and not self._may_grow(engine)
        if left > 0 and not holds_starts:
            add_chunk(profile, mix, 0, left, limit_s, sizes)
        return mix.num_tokens, holds_starts

    def _bound_factor(self, mix: Mix, limit_s: float) -> tuple[float, Mix | None]:
        """The learned error quantile of steps about this long; their mix, if they hold prefill."""
        guess = self.cost.profile.largest_chunk(mix, 0, self.max_step_tokens, limit_s)
        decodes = (mix.num_decodes, mix.decode_kv_tokens)
        bounded = Mix(*decodes, 1, guess, beside_move=mix.beside_move) if guess else None
        return self.cost.bound_factor(bounded or mix, self._caution), bounded

    def _may_grow(self, engine: EngineView) -> bool:
        """Counts prompts, which decode soon; a waiting request that is strict would block all."""
        soon = [view.request.objective.tbt_s or INFINITY for view in engine.prefilling]
        tightest_s = min([self._slack.tightest_s, *soon])
        if tightest_s == INFINITY:
            return True
        profile = self.cost.profile
        views = [*engine.decoding, *engine.prefilling]
        running, context = len(views) + 1, sum([view.num_tokens for view in views])
        stages, share = profile.num_stages, -(-running // profile.num_stages)
        shape = StepShape(share, (context + running * self.growth) // stages)
        mix = Mix.of_shape(shape, profile.attention_window)
        limit_s = profile.stage_share_s(tightest_s, share) * self._share()
        return profile.stage_s(mix) * self.cost.bound_factor(mix, self.caution) <= limit_s
