"""Which decodes of a step carry drafts, and how many.

Drafts are guesses of the tokens that come next. They ride behind a decode's own token in its slice,
the last stage draws at every one of their positions, and a draft stands if and only if it equals
the draw. So drafts decide how many tokens a step yields, never which.
"""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import Drafter, StepTimePredictor
from actors.scheduling.plan import StepShape, logit_rows
from actors.scheduling.speculation.lookup import PromptLookup
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder

_LEAST_CHANCE = 0.25  # that a draft is reached and right, below which it is not worth its compute
_LEAST_GAIN = 1.05  # tokens per second with drafts over without, below which predictions may err
# What planning a step ahead saves, as a share of it: drafts must bring more than that to forgo it.
_AHEAD_SHARE = 0.05


class Speculation:
    """One per core. Drafters live in the requests and are made when they first decode."""

    def __init__(self, config: SchedulerConfig, cost_model: StepTimePredictor | None) -> None:
        self.config = config
        self.cost_model = cost_model
        self.num_drafts = 0  # planned so far
        self._overlaps = config.steps_per_request > 1
        self.is_on = config.drafter == "lookup" or (
            config.drafter == "auto" and cost_model is not None
        )

    def holds_back(self, decoding: list[RequestState]) -> bool:
        """Whether the next step is worth waiting for, to plan it on tokens still in flight.

        Only where a request may be in several steps at once: a slice behind a token that is not
        known yet cannot carry drafts, as they continue that token.
        """
        if not (self.is_on and self._overlaps):
            return False
        worth = 0.0
        for state in decoding:
            if state.num_drafts:
                return True
            if state.in_flight and self._may_draft(state) and self._follow(state):
                drafter = state.drafter
                # The first guess is of the token in flight.
                if drafter is not None and drafter.chance**2 >= _LEAST_CHANCE and drafter.draft(2):
                    worth += drafter.chance**2
        return worth > _AHEAD_SHARE * len(decoding)

    def extend(self, step: StepBuilder) -> None:
        """Add drafts to decodes of the planned step: they fill what prefill leaves, and prompts
        that wait leave nothing."""
        if not self.is_on or step.wants_prefill or step.is_trial:
            return
        offers = [(s, d) for s in step.decodes_alone if (d := self._offer(s))]
        if not offers:
            return
        room = min(step.room_for_drafts(), logit_rows(self.config.most_requests) - step.num_slices)
        counts = [0] * len(offers)
        for depth in range(1, self.config.most_drafts + 1):
            for i, (state, drafts) in enumerate(offers):
                if depth <= len(drafts) and room > 0 and _chance(state) ** depth >= _LEAST_CHANCE:
                    counts[i] = depth
                    room -= 1
        while any(counts) and not self._pays(step, offers, counts):
            counts = [count // 2 for count in counts]
        for (state, drafts), count in zip(offers, counts, strict=True):
            if count:
                self.num_drafts += step.add_drafts(state, drafts[:count])

    def _offer(self, state: RequestState) -> tuple[int, ...]:
        if not self._may_draft(state) or not self._follow(state):
            return ()
        assert state.drafter is not None
        # Its own token stands at num_computed_tokens - 1; nothing is computed from `end` on.
        most = min(self.config.most_drafts, state.end - state.num_computed_tokens)
        return state.drafter.draft(most) if most > 0 else ()

    @staticmethod
    def _may_draft(state: RequestState) -> bool:
        """A grammar's state follows drawn tokens and cannot be taken back; a suspect is tried with
        nothing but its own tokens."""
        return state.request.sampling.grammar is None and state.suspicion is None

    @staticmethod
    def _follow(state: RequestState) -> bool:
        """Bring the drafter to the tokens that are known; False while a long prompt is read."""
        if state.drafter is None:
            state.drafter = PromptLookup(state.request.prompt)
        return state.drafter.follow(state.output_token_ids)

    def _pays(
        self, step: StepBuilder, offers: list[tuple[RequestState, tuple[int, ...]]],
        counts: list[int],
    ) -> bool:  # fmt: skip
        """Whether the decodes get more tokens per predicted second with so many drafts."""
        if self.cost_model is None:
            return True
        shape = step.shape
        gained, prefills = 0.0, list(shape.prefills)
        num_decodes, context = shape.num_decodes, shape.decode_context_tokens
        for (state, _), count in zip(offers, counts, strict=True):
            if count:
                gained += sum(_chance(state) ** k for k in range(1, count + 1))
                prefills.append((state.num_computed_tokens - 1, 1 + count))
                num_decodes -= 1
                context -= state.num_computed_tokens
        with_drafts = StepShape(num_decodes, context, tuple(prefills))
        longer = self.cost_model.step_s(with_drafts) / self.cost_model.step_s(shape)
        return (shape.num_decodes + gained) / shape.num_decodes >= _LEAST_GAIN * longer


def _chance(state: RequestState) -> float:
    drafter: Drafter | None = state.drafter
    assert drafter is not None
    return drafter.chance
