"""Admission: who may enter, judged by what accepting them would break.

`PredictedPeak` watches memory: a request starts only if the predicted peak of KV use, as running
ones grow and finish, stays within the cache (the method of LightLLM's scheduler). `Promises` adds
time: it predicts the TBT of those who run and the TTFT of those who queue, and refuses early, with
the time at which the same request would be accepted, what would break either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.scheduling import interfaces
from actors.scheduling.budget import stage_share_s
from actors.scheduling.cost_model import Mix
from actors.scheduling.interfaces import Admission, EngineView, Refusal, RequestView
from actors.scheduling.online import OnlineCostModel
from actors.scheduling.request import Request

if TYPE_CHECKING:
    from actors.scheduling.config import SchedulerConfig

MAX_RETRY_AFTER_S = 3600.0


def peak_kv_tokens(requests: Iterable[tuple[int, int]]) -> int:
    """Most KV tokens ever held by requests (tokens now, tokens still to come) that run together.

    All grow by one token a step; whoever finishes frees everything. Peaks can only be where one
    finishes, so sorting by what is left and walking from the longest suffices.

    >>> peak_kv_tokens([(10, 5), (4, 2)])
    18
    """
    peak = held = 0
    for count, (now, left) in enumerate(sorted(requests, key=lambda r: -r[1]), start=1):
        held += now
        peak = max(peak, held + count * left)
    return peak


@dataclass(slots=True)
class PredictedPeak:
    """A request starts only if the predicted KV peak fits; everybody may queue.

    expected_share: part of max_tokens that outputs are expected to reach (1: the worst case).
    reserve: share of the cache kept free of predictions.
    """

    expected_share: float = 1.0
    reserve: float = 0.02

    def on_submit(self, request: Request, engine: EngineView) -> Refusal | None:
        return None

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        held = [self._growth(view) for view in engine.decoding]
        held += [self._growth(view) for view in engine.prefilling]
        held.append(self._growth(request))
        capacity = engine.num_blocks * engine.block_size * (1.0 - self.reserve)
        # A request occupies whole blocks: half of one is wasted on average.
        return peak_kv_tokens(held) + len(held) * engine.block_size / 2 <= capacity

    def _growth(self, view: RequestView) -> tuple[int, int]:
        """(tokens held once its prompt is in, tokens expected beyond them)."""
        total = view.max_length - view.num_prompt_tokens
        expected = max(int(total * self.expected_share), view.num_output_tokens + 1)
        return view.length, max(
            0, min(view.max_length, view.num_prompt_tokens + expected) - view.length
        )


@dataclass(slots=True)
class Promises:
    """Refuses a request whose acceptance would break a promise, and says when to come again.

    tbt_s, ttft_s: the deployment's objectives; a request's own take precedence.
    max_wait_s: the queue's bound where nobody states a TTFT objective.
    action: "refuse", or "queue": admit it anyway (a `deadline` order then relegates what is
        lost), and only hold back starts that would stall running decodes.
    """

    cost: OnlineCostModel
    tbt_s: float | None
    ttft_s: float | None
    max_step_tokens: int
    max_wait_s: float = 10.0
    action: str = "refuse"
    peak: PredictedPeak = field(default_factory=PredictedPeak)
    _promised: float = 0.0  # work (seconds) that refused clients were told to bring later
    _promised_at_s: float = 0.0  # when `_promised` was last brought up to date

    # ---- interfaces.Admission ---------------------------------------------------------

    def on_submit(self, request: Request, engine: EngineView) -> Refusal | None:
        if self.action != "refuse":
            return None
        now_s = engine.now_s
        rate = self.prefill_rate(engine)
        own = len(request.prompt) + len(request.output)
        ahead = engine.num_waiting_tokens + sum(v.length - v.planned for v in engine.prefilling)
        ttft_s = (ahead + own) / rate
        limit_s = request.objective.ttft_s or self.ttft_s or self.max_wait_s
        wait_s = ttft_s - limit_s
        if self._stalls(engine, extra=1, context=own):
            wait_s = max(wait_s, self._first_finish_s(engine))
        if wait_s <= 0.0:
            return None
        if own / rate > limit_s and not ahead:
            # Nothing is in its way: waiting longer will never help this prompt.
            return None
        # Everyone told to wait will bring work: the next one must wait behind it.
        self._promised = max(0.0, self._promised - (now_s - self._promised_at_s))
        self._promised_at_s = now_s
        retry_after_s = min(wait_s + self._promised, MAX_RETRY_AFTER_S)
        self._promised = min(self._promised + own / rate, MAX_RETRY_AFTER_S)
        return Refusal(
            f"overloaded: the first token would take {ttft_s:.1f} s, "
            f"the objective allows {limit_s:.1f} s",
            retry_after_s=retry_after_s,
        )

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        if self._stalls(engine, extra=1, context=request.length):
            return False
        return self.peak.may_start(request, engine)

    # ---- predictions ------------------------------------------------------------------

    def prefill_rate(self, engine: EngineView) -> float:
        """Prompt tokens per second while everyone who runs keeps decoding to the objective."""
        profile = self.cost.profile
        stages = profile.num_stages
        running = len(engine.decoding)
        context = sum(view.length for view in engine.decoding)
        mix = Mix(-(-running // stages), context // stages)
        if self.tbt_s is None or not running:
            chunk = min(2048, self.max_step_tokens)
            step_s = profile.stage_s(Mix(mix.num_decodes, mix.decode_kv_tokens, 1, chunk, chunk))
        else:
            step_s = stage_share_s(profile, self.tbt_s, self.max_step_tokens)
            allowed_s = step_s / self.cost.bound_factor(mix)
            chunk = profile.largest_chunk(mix, 0, self.max_step_tokens, allowed_s)
        # Even a saturated engine frees time as its decodes finish: never predict "never".
        return max(chunk, 16) / max(step_s, 1e-6)

    def _stalls(self, engine: EngineView, extra: int, context: int) -> bool:
        """Whether decodes alone would miss the TBT objective with `extra` requests more."""
        if self.tbt_s is None:
            return False
        profile = self.cost.profile
        stages = profile.num_stages
        running = len(engine.decoding) + len(engine.prefilling)
        if not running:
            return False
        held = sum(v.length for v in engine.decoding) + sum(v.length for v in engine.prefilling)
        mix = Mix(-(-(running + extra) // stages), (held + context) // stages)
        limit_s = stage_share_s(profile, self.tbt_s, mix.num_decodes)
        return profile.stage_s(mix) * self.cost.bound_factor(mix) > limit_s

    def _first_finish_s(self, engine: EngineView) -> float:
        """When the first running request will have ended, at the objective's pace at the latest."""
        left = min((v.max_length - v.length for v in engine.decoding), default=0)
        return max(left, 1) * (self.tbt_s or 0.0)


ADMISSIONS = ("all", "predicted_peak", "promises")


def build_admission(config: SchedulerConfig, cost_model: interfaces.CostModel | None) -> Admission:
    """The admission that `config` names. Raises ConfigError naming what is missing or unknown."""
    from actors.scheduling.config import ConfigError
    from actors.scheduling.defaults import AcceptAll

    options = dict(config.admission_options)
    try:
        if config.admission == "all":
            return AcceptAll(**options)
        if config.admission == "predicted_peak":
            return PredictedPeak(**options)
        if config.admission == "promises":
            if not isinstance(cost_model, OnlineCostModel):
                raise ConfigError(
                    "admission", "'promises' needs a cost model: run `legato profile`"
                )
            peak = PredictedPeak(
                **{k: options.pop(k) for k in ("expected_share", "reserve") if k in options}
            )
            if options.get("action", "refuse") not in ("refuse", "queue"):
                raise ConfigError("admission_options", "action is 'refuse' or 'queue'")
            return Promises(
                cost_model,
                config.tbt_s,
                config.ttft_s,
                config.max_step_tokens,
                peak=peak,
                **options,
            )
    except TypeError as error:
        raise ConfigError("admission_options", str(error)) from error
    raise ConfigError("admission", f"unknown {config.admission!r}; known: {', '.join(ADMISSIONS)}")
