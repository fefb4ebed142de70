"""Token budgets that come from an objective: profiled once, or chosen anew each iteration.

The fixed budget is in `defaults`. The paper profiles step time against tokens and keeps the
largest budget whose P99 meets the TBT objective (section 4.3): `ProfiledBudget`. It must assume
the worst batch it will ever meet, so most steps end early. `AdaptiveBudget` asks before every
step how much time the running decodes can still spare and fills exactly that with prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.scheduling import interfaces
from actors.scheduling.cost_model import CostModel, Mix
from actors.scheduling.interfaces import EngineView, RequestView, StepShape, TokenBudget
from actors.scheduling.online import OnlineCostModel
from actors.scheduling.slack import due_after

if TYPE_CHECKING:
    from actors.scheduling.config import SchedulerConfig


def largest_budget(
    profile: CostModel,
    tbt_s: float,
    *,
    num_decodes: int = 32,
    context_tokens: int = 4096,
    quantile: float = 0.99,
    max_tokens: int = 8192,
) -> int:
    """The paper's choice: the most tokens a step may hold so that its P99 meets the objective.

    The step is num_decodes decodes at context_tokens each plus one chunk of a prompt that is
    already context_tokens long. With n stages a token takes n stages and n - 1 sends, so each
    stage gets that much less. Falls back to num_decodes when even decodes alone miss it.
    """
    limit_s = stage_share_s(profile, tbt_s, max_tokens) / max(profile.ratio_at(quantile), 1e-9)
    mix = Mix(num_decodes, num_decodes * context_tokens)
    return num_decodes + profile.largest_chunk(
        mix, context_tokens, max_tokens - num_decodes, limit_s
    )


def stage_share_s(profile: CostModel, tbt_s: float, num_tokens: int) -> float:
    """What one stage may spend per step so that a token comes round within tbt_s."""
    n = profile.num_stages
    if n == 1:
        return tbt_s
    linear_s = profile.linear_s(num_tokens)
    while num_tokens > 1 and linear_s * n > tbt_s:  # the send is that of a step that fits
        num_tokens //= 2
        linear_s = profile.linear_s(num_tokens)
    return (tbt_s - (n - 1) * profile.send_s(num_tokens)) / n


@dataclass(frozen=True, slots=True)
class ProfiledBudget:
    """A constant derived from the objective and the profile at start."""

    tokens: int

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        return self.tokens

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """The profile was taken once."""


@dataclass(slots=True)
class AdaptiveBudget:
    """Each step the largest prefill whose predicted time fits the slack of the running decodes.

    cost: what predicts and learns.
    tbt_s: the deployment's objective; a request's own takes precedence; None promises nothing.
    smoothness: longest gap allowed, in objectives (see `slack`).
    headroom: share of every limit kept back for what happens outside the stages.
    growth: context tokens by which running requests may still grow; new prompts are held back
        while decodes alone would miss the objective after that growth.
    """

    cost: OnlineCostModel
    tbt_s: float | None
    max_step_tokens: int
    smoothness: float = 1.0
    headroom: float = 0.01
    growth: int = 128
    last_limit_s: float = 0.0  # what the last step was allowed to take, for traces
    _due: dict[int, tuple[float, float]] = field(default_factory=dict)  # id: (last token, due)
    _busy_until_s: float = 0.0  # when the steps in flight should have left the last stage
    _first_free_s: float = 0.0  # when the first stage should be free
    _step_start_s: float = -1.0  # start of the step awaiting feedback, -1 when none
    _overhead_s: float = 0.0  # learned time of a step outside its slowest stage

    # ---- interfaces.TokenBudget -------------------------------------------------------

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        now_s = engine.now_s
        if not engine.num_in_flight:
            self._busy_until_s = self._first_free_s = now_s
        limit_s = self._limit_s(engine, now_s)
        profile = self.cost.profile
        mix = Mix.of_shape(shape, profile.attention_window)
        if limit_s is None:
            tokens = self.max_step_tokens
            self.last_limit_s = 0.0
        else:
            limit_s = limit_s * (1.0 - self.headroom) - self._overhead_s
            self.last_limit_s = limit_s
            tokens = self._fill(mix, limit_s, engine)
        self._note_step(mix, now_s)
        return tokens

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """The core teaches the shared cost model itself; nothing is left to learn here."""

    # ---- how long may this step take --------------------------------------------------

    def _limit_s(self, engine: EngineView, now_s: float) -> float | None:
        """Seconds the slowest stage may spend on this step; None when nobody would notice."""
        profile = self.cost.profile
        busy_s = max(self._busy_until_s, now_s)
        smooth, due_of = self.smoothness, self._due
        seen: dict[int, tuple[float, float]] = {}
        least_due_s = least_tbt_s = float("inf")
        for view in engine.decoding:
            tbt_s = view.request.objective.tbt_s or self.tbt_s
            if tbt_s is None:
                continue
            if tbt_s < least_tbt_s:
                least_tbt_s = tbt_s
            last_s = view.last_token_s
            in_flight = view.planned >= view.length
            if last_s is None or smooth == 1.0:
                base_s = busy_s if in_flight or last_s is None else last_s
                due_s = base_s + tbt_s
            else:
                due_s = self._bank(view, last_s, tbt_s, due_of, seen)
                if in_flight:
                    due_s = due_after(due_s, busy_s, tbt_s, smooth)
            if due_s < least_due_s:
                least_due_s = due_s
        self._due = seen
        if least_tbt_s == float("inf"):
            return None
        stages = profile.num_stages
        if stages == 1:
            return least_due_s - busy_s
        # This micro-batch must come through every stage in time, and behind those in flight at
        # the last one; and no stage may be held so long that the other micro-batches miss.
        start_s = max(now_s, self._first_free_s)
        sends_s = (stages - 1) * profile.send_s(self.max_step_tokens // 8)
        share_s = (least_tbt_s * smooth - sends_s) / stages
        return min((least_due_s - start_s - sends_s) / stages, least_due_s - busy_s, share_s)

    def _bank(
        self,
        view: RequestView,
        last_s: float,
        tbt_s: float,
        known: Mapping[int, tuple[float, float]],
        seen: dict[int, tuple[float, float]],
    ) -> float:
        """Due time of a stream's next token, from its bank of early tokens."""
        entry = known.get(view.request_id)
        if entry is None:
            entry = (last_s, last_s + tbt_s)
        elif entry[0] != last_s:
            entry = (last_s, due_after(entry[1], last_s, tbt_s, self.smoothness))
        seen[view.request_id] = entry
        return entry[1]

    # ---- how much prefill fits --------------------------------------------------------

    def _fill(self, mix: Mix, limit_s: float, engine: EngineView) -> int:
        """Add chunks to `mix` in the order the policy will take them; returns its tokens."""
        profile = self.cost.profile
        most = self.max_step_tokens
        limit_s /= self._bound_factor(mix, limit_s)
        for view in engine.prefilling:
            remaining = min(view.length - view.planned, most - mix.num_tokens)
            if remaining < 1:
                continue
            chunk = profile.largest_chunk(mix, view.planned, remaining, limit_s)
            if chunk:
                mix.add(view.planned, chunk, profile.attention_window)
            if chunk < remaining:
                return mix.num_tokens
        waiting = min(engine.num_waiting_tokens, most - mix.num_tokens)
        if waiting > 0 and self._may_grow(engine):
            chunk = profile.largest_chunk(mix, 0, waiting, limit_s)
            if chunk:
                mix.add(0, chunk, profile.attention_window)
        return mix.num_tokens

    def _bound_factor(self, mix: Mix, limit_s: float) -> float:
        """The learned error quantile of steps about as large as this one will be."""
        guess = self.cost.profile.largest_chunk(mix, 0, self.max_step_tokens, limit_s)
        return self.cost.bound_factor(
            Mix(mix.num_decodes, mix.decode_kv_tokens, 1, guess) if guess else mix
        )

    def _may_grow(self, engine: EngineView) -> bool:
        """Whether decodes alone would keep the objective with one request more, all grown."""
        if self.tbt_s is None:
            return True
        profile = self.cost.profile
        running = len(engine.decoding) + len(engine.prefilling) + 1
        context = sum(v.length for v in engine.decoding) + sum(v.length for v in engine.prefilling)
        stages = profile.num_stages
        share = -(-running // stages)
        mix = Mix(share, (context + running * self.growth) // stages)
        limit_s = stage_share_s(profile, self.tbt_s, share) * (1.0 - self.headroom)
        return profile.stage_s(mix) * self.cost.bound_factor(mix) <= limit_s

    # ---- what is in flight ------------------------------------------------------------

    def _note_step(self, mix: Mix, now_s: float) -> None:
        """Predict when the step just sized will leave the first and the last stage."""
        profile = self.cost.profile
        stage_s = profile.stage_s(mix) * self.cost.ratio(mix)
        self._first_free_s = max(now_s, self._first_free_s) + stage_s
        arrives_s = self._first_free_s
        if profile.num_stages > 1:
            arrives_s += profile.send_s(mix.num_tokens)
            arrives_s += (profile.num_stages - 2) * (stage_s + profile.send_s(mix.num_tokens))
            self._busy_until_s = max(arrives_s, self._busy_until_s) + stage_s
        else:
            self._busy_until_s = arrives_s


BUDGETS = ("fixed", "profiled", "adaptive")


def build_budget(config: SchedulerConfig, cost_model: interfaces.CostModel | None) -> TokenBudget:
    """The budget that `config` names. Raises ConfigError naming what is missing or unknown."""
    from actors.scheduling.config import ConfigError
    from actors.scheduling.defaults import FixedBudget

    if config.budget not in BUDGETS:
        raise ConfigError("budget", f"unknown {config.budget!r}; known: {', '.join(BUDGETS)}")
    options = dict(config.budget_options)
    if config.budget == "fixed":
        return FixedBudget(int(options.pop("tokens", config.token_budget)))
    if not isinstance(cost_model, OnlineCostModel):
        raise ConfigError("budget", f"{config.budget!r} needs a cost model: run `legato profile`")
    try:
        if config.budget == "profiled":
            if config.tbt_s is None:
                raise ConfigError("slo.tbt_ms", "a profiled budget needs an objective")
            options.setdefault("max_tokens", config.max_step_tokens)
            return ProfiledBudget(largest_budget(cost_model.profile, config.tbt_s, **options))
        return _adaptive(config, cost_model, options)
    except TypeError as error:
        raise ConfigError("budget_options", str(error)) from error


def _adaptive(
    config: SchedulerConfig, cost: OnlineCostModel, options: dict[str, Any]
) -> AdaptiveBudget:
    known = {"smoothness", "headroom", "growth"}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"unknown options: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return AdaptiveBudget(cost, config.tbt_s, config.max_step_tokens, **options)
