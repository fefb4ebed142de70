"""A budget per iteration: the largest prefill that the running decodes have time for.

Three bounds are computed anew for each step:

1. *Slack.* The step's predicted time plus the time outside the stages between two answers, both at
   a learned quantile, must fit the least slack of the step's decodes, and leave the decodes of
   other micro-batches their slack. If objectives are missed nevertheless, it plans for a smaller
   share of them (`slack.KeptShare`).
2. *Rate.* Of the sizes that fit, the one with the least time per token: a step ends at a tile edge,
   and is not extended where longer steps gain little (`StepSizes`). With a queue and one stage the
   time of the decodes counts too, because longer steps share it.
3. *Pace.* While sequence slots or KV blocks are nearly used up, prefill is spread evenly over the
   steps, because prompts computed earlier would only wait for a place: a step prefills as much as
   its decodes will free (prompt tokens per output token, learned), plus some advance while places
   are left. Evenly filled steps cost least and cause no pipeline bubbles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from actors.scheduling.budgets.slack import KeptShare, Slack, StepSizes
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel, RecentQuantile, cost_model_for
from actors.scheduling.interfaces import EngineView
from actors.scheduling.plan import StepShape

INFINITY = float("inf")
LEAST_PACED_TOKENS = 256.0  # smaller prefills waste more than uneven steps do
OUTSIDE_SHARE = 0.1  # of the objective: more time outside the stages than this is not planned for
PATIENCE = 20  # longest pause of all prefill, in TBT objectives
LEAST_RELIEF = 16  # tokens
DENIALS = 20  # steps without prefill after which the bound is learned anew
# In a queue one step in so many is so many times as long: steps not taken teach nothing.
TRY_EVERY, LONGER = 16, 4
LOOK_EVERY, OUTDATED = 256, 1.1  # steps; change of a ratio from which sizes are chosen anew
FULL = 0.98  # share of the places (slots or KV blocks) in use from which no request can start


@dataclass(slots=True)
class AdaptiveBudget:
    """Implements `interfaces.TokenBudget`.

    cost: the cost model, which the core updates.
    tbt_s: the deployment's objective; a request's own takes precedence; None: no objective.
    max_requests: sequence slots; with max_step_tokens the limits of the engine.
    smoothness: longest gap allowed, in objectives (see `slack`).
    headroom: share of every limit reserved for delays after the engine's answer, on the way to
        the client; a step that used it counts as a miss.
    growth: context tokens by which running requests may still grow; new prompts are held back
        while decodes alone would miss the objective after that growth.
    efficiency: share of the best token rate from which steps are not made longer.
    ease: likewise of the best prefill rate beside the decodes, with a queue and one stage.
    allowed_misses: share of the steps that may miss the objective (see `KeptShare`).
    pace: change of the pace of prefill, as a share per step; 0: no pacing.
    """

    learns: ClassVar[bool] = True

    cost: OnlineCostModel
    tbt_s: float | None
    max_step_tokens: int
    max_requests: int
    smoothness: float = 1.0
    headroom: float = 0.04
    growth: int = 128
    efficiency: float = 0.9
    ease: float = 0.9
    allowed_misses: float = 0.0075  # a P99 objective permits 0.01
    pace: float = 0.01
    follow_learnt: bool = False  # step sizes follow what is learnt of each size, not the profile
    overlap_chunks: bool = False  # chunks of one prompt may follow each other through the stages
    holds_starts: bool = field(init=False, default=False)
    _slack: Slack = field(init=False)
    _sizes: StepSizes = field(init=False)
    _fastest: StepSizes = field(init=False)  # while requests wait
    _efficient_tokens: int = field(init=False)  # beyond it longer steps hardly gain
    _size_ratios: list[float] = field(default_factory=list)  # that `_sizes` are for
    _num_observed: int = 0
    _relieves: bool = False  # this step gets prefill because all of it has paused for too long
    _pace_tokens: float = INFINITY  # see `_paced`
    _outside: RecentQuantile = field(init=False)  # seconds, see `_watch`
    _answered: list[tuple[StepShape, float]] = field(default_factory=list)  # for `_watch`
    _kept: KeptShare = field(init=False)
    _asked_at_s: float = 0.0
    _prefilled_at_s: float = 0.0  # when prompts last progressed, or none was held back
    _bounded: Mix | None = None  # kind of step whose error bound limited the last step
    _limit_s: float = INFINITY  # limit of the last planned step by slack
    _num_denied: int = 0  # steps in a row that took no prefill though prompts waited

    @classmethod
    def build(
        cls, config: SchedulerConfig, cost: OnlineCostModel | None, **options: Any
    ) -> AdaptiveBudget:
        return cls(
            cost_model_for("budget", "adaptive", cost),
            config.tbt_s,
            config.max_step_tokens,
            config.max_requests,
            overlap_chunks=config.overlap_chunks,
            **options,
        )

    def __post_init__(self) -> None:
        self._slack = Slack(self.cost, self.tbt_s, self.max_step_tokens, self.smoothness)
        self._kept = KeptShare(self.allowed_misses)
        self._choose_sizes()
        self._outside = RecentQuantile(self.cost.quantile, max(self.cost.memory, 1), (0.0,))

    def _choose_sizes(self) -> None:
        profile, most = self.cost.profile, self.max_step_tokens
        if self.follow_learnt:
            self._size_ratios = self.cost.size_ratios(most)
        self._sizes = StepSizes(profile, most, self.efficiency, ratios=self._size_ratios)
        self._fastest = StepSizes(profile, most, 1.0, 0.0, self._size_ratios)
        self._efficient_tokens = self._sizes.at_most(most)

    # ---- interfaces.TokenBudget -------------------------------------------------------

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        self._watch(engine)
        limit_s = self._slack.limit_s(shape, engine) * self._kept.value - self._outside.value
        self._limit_s = limit_s
        self.holds_starts = self._relieves = False
        if limit_s == INFINITY:
            self._prefilled_at_s = engine.now_s  # no prefill is held back
            if self.tbt_s is not None or not shape.num_decodes:
                return self.max_step_tokens
            return max(self._efficient_tokens, shape.num_decodes + LEAST_RELIEF)
        mix = Mix.of_shape(shape, self.cost.profile.attention_window)
        num_planned = mix.num_tokens
        tokens = self._fill(mix, limit_s * (1.0 - self.headroom), engine)
        tokens = min(tokens, num_planned + self._paced(engine))
        if tokens > num_planned or not self._holds_back(engine):
            self._prefilled_at_s = engine.now_s
        if tokens > num_planned:
            self._num_denied = 0
        elif engine.now_s - self._prefilled_at_s > PATIENCE * self._slack.tightest_s:
            self._prefilled_at_s = engine.now_s  # prefill has paused for many objectives
            self._relieves = True
            tokens += self._relief(shape)
        elif engine.prefilling or (engine.num_waiting and not self.holds_starts):
            self._doubt()
        return tokens

    def may_start(self, engine: EngineView) -> bool:
        """Whether decodes with one more request keep the tightest objective after growing."""
        if self._relieves or self._may_grow(engine):
            return True
        self.holds_starts = True
        return False

    def room_for_drafts(self, shape: StepShape) -> int:
        most = self.max_step_tokens - shape.num_tokens
        if self._limit_s == INFINITY or most < 1:
            return max(0, most)
        mix = Mix.of_shape(shape, self.cost.profile.attention_window)
        context = shape.decode_context_tokens // max(1, shape.num_decodes)
        limit_s = self._limit_s * (1.0 - self.headroom) / self._bound_factor(mix, self._limit_s)
        return self.cost.profile.largest_chunk(mix, context, most, limit_s)

    def _doubt(self) -> None:
        """Forget an error bound that has prevented prefill for a while: steps that are never run
        are not measured, so a bound from one bad moment would stay for ever."""
        self._num_denied += 1
        if self._bounded and self._num_denied >= DENIALS:
            self._num_denied = 0
            self.cost.forget(self._bounded)

    def _holds_back(self, engine: EngineView) -> bool:
        """Whether a step without prefill denies a prompt progress that it should make.

        A started prompt always should. A waiting one should if only an objective tighter than the
        deployment's prevents it.
        """
        if engine.prefilling:
            return True
        return engine.num_waiting > 0 and self._slack.tightest_s < (self.tbt_s or INFINITY)

    def _relief(self, shape: StepShape) -> int:
        """Prefill tokens that take about one objective longer than the decodes alone."""
        mix = Mix.of_shape(shape, self.cost.profile.attention_window)
        limit_s = self.cost.profile.stage_s(mix) + self._slack.tightest_s
        most = self.max_step_tokens - shape.num_tokens
        return max(self.cost.profile.largest_chunk(mix, 0, most, limit_s), min(LEAST_RELIEF, most))

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Record the step for `_watch`; the core itself updates the shared cost model."""
        del self._answered[:-1]  # not every policy asks for a budget
        self._answered.append((shape, duration_s))
        self._num_observed += 1
        if self.follow_learnt and self._num_observed % LOOK_EVERY == 0:
            now = zip(self.cost.size_ratios(self.max_step_tokens), self._size_ratios, strict=True)
            if any(not 1 / OUTDATED < ratio / used < OUTDATED for ratio, used in now):
                self._choose_sizes()

    def _watch(self, engine: EngineView) -> None:
        """Learn the time of an answer beyond its step (scheduling, transport, wake-up), and whether
        streams kept their objectives. Learns nothing with several stages, whose overlap hides it.
        """
        answered, begin_s = self._answered, self._asked_at_s
        self._asked_at_s = now_s = engine.now_s
        if not answered:
            return
        # The step began at the last call, when the one before was answered or the engine was
        # idle. If several have been answered since then, none is timed.
        running = engine.decoding or engine.prefilling
        if len(answered) == 1 and running and self.cost.profile.num_stages == 1:
            ((shape, duration_s),) = answered
            gap_s, tbt_s = now_s - begin_s, self._slack.tightest_s
            self._outside.add(min(max(0.0, gap_s - duration_s), OUTSIDE_SHARE * tbt_s))
            kept = gap_s <= tbt_s * (1.0 - self.headroom)
            # A step without prefill could not have been shorter.
            if shape.num_decodes and (kept or shape.prefills):
                self._kept.note(kept)
        answered.clear()

    @property
    def _one_at_a_time(self) -> bool:
        return self.cost.profile.num_stages > 1 and not self.overlap_chunks

    # ---- how much prefill fits --------------------------------------------------------

    def _fill(self, mix: Mix, limit_s: float, engine: EngineView) -> int:
        """Add chunks to `mix` in the order the policy will take them; returns its tokens."""
        profile = self.cost.profile
        sizes: StepSizes | None = self._sizes
        most = self._efficient_tokens
        if profile.num_stages == 1 and engine.num_waiting > 1:
            sizes, most = self._fastest, max(most, self._fastest.beside(mix, self.ease))
            if self.follow_learnt and self._num_observed % TRY_EVERY == 0:
                sizes, most = None, min(LONGER * most, self.max_step_tokens)
        most = max(most, mix.num_tokens)
        limit_s /= self._bound_factor(mix, limit_s)
        # A prompt with a chunk in flight cannot join this step in a pipeline.
        steps = {step.plan.step_id for step in engine.in_flight} if self._one_at_a_time else ()
        for view in engine.prefilling:
            if view.step_id in steps:
                continue
            remaining = min(view.num_tokens - view.num_computed_tokens, most - mix.num_tokens)
            if remaining < 1:
                continue
            chunk = profile.largest_chunk(mix, view.num_computed_tokens, remaining, limit_s)
            if chunk < remaining:
                return self._snap(mix, view.num_computed_tokens, chunk, sizes)
            mix.add(view.num_computed_tokens, chunk, profile.attention_window)
        waiting = min(engine.num_waiting_tokens, most - mix.num_tokens)
        if waiting > 0 and self.may_start(engine):
            chunk = profile.largest_chunk(mix, 0, waiting, limit_s)
            if chunk < waiting:
                return self._snap(mix, 0, chunk, sizes)
            mix.add(0, chunk, profile.attention_window)
        return mix.num_tokens

    def _snap(self, mix: Mix, start: int, chunk: int, sizes: StepSizes | None) -> int:
        """Cut the last chunk back to where tokens are cheapest, and add it; returns the tokens.

        Step time jumps at a tile edge: a step just past one costs more per token than a step that
        ends at it.
        """
        tokens = mix.num_tokens
        if chunk:
            best = tokens if sizes is None else sizes.at_most(tokens + chunk)
            chunk = best - tokens if best > tokens else chunk
            mix.add(start, chunk, self.cost.profile.attention_window)
        return tokens + chunk

    def _paced(self, engine: EngineView) -> int:
        """Most prefill tokens of the step (bound 3 above).

        Searches the balance: a step without prefill, because waiting prompts find no free place,
        shows that prefill was too fast and lowers the pace; every other step raises it a little.
        In equilibrium about one step in ten is without prefill.
        """
        if not self.pace:
            return self.max_step_tokens
        running = len(engine.decoding) + len(engine.prefilling)
        used_blocks = engine.num_blocks - engine.num_free_blocks
        used = max(running / self.max_requests, used_blocks / engine.num_blocks)
        if engine.num_waiting and used >= FULL and not engine.prefilling:
            self._pace_tokens *= 1.0 - 9.0 * self.pace
        elif engine.num_waiting:
            self._pace_tokens *= 1.0 + self.pace
        most = float(self.max_step_tokens)
        self._pace_tokens = min(most, max(self._pace_tokens, LEAST_PACED_TOKENS))
        return int(self._pace_tokens)

    def _bound_factor(self, mix: Mix, limit_s: float) -> float:
        """The learned error quantile of steps about the size of this one."""
        guess = self.cost.profile.largest_chunk(mix, 0, self.max_step_tokens, limit_s)
        self._bounded = None
        if guess:
            decodes = (mix.num_decodes, mix.decode_kv_tokens)
            self._bounded = Mix(*decodes, 1, guess, beside_move=mix.beside_move)
        return self.cost.bound_factor(self._bounded or mix)

    def _may_grow(self, engine: EngineView) -> bool:
        """Counts prompts, which decode soon, but not waiting requests: a strict one at the head of
        the queue would block all others."""
        soon = [view.request.objective.tbt_s or INFINITY for view in engine.prefilling]
        tightest_s = min([self._slack.tightest_s, *soon])
        if tightest_s == INFINITY:
            return True
        profile = self.cost.profile
        running = len(engine.decoding) + len(engine.prefilling) + 1
        context = sum(v.num_tokens for v in engine.decoding) + sum(
            v.num_tokens for v in engine.prefilling
        )
        stages = profile.num_stages
        share = -(-running // stages)
        mix = Mix(share, (context + running * self.growth) // stages)
        limit_s = profile.stage_share_s(tightest_s, share) * (1.0 - self.headroom)
        return profile.stage_s(mix) * self.cost.bound_factor(mix) <= limit_s
