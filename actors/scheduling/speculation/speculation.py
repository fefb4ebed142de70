"""Which decodes of a step carry drafts of the next tokens, and how many; a drafter: prompt lookup.

Drafts are guesses of the next tokens. They follow a decode's own token in its slice; the last stage
draws at every position, and a draft is accepted if and only if it equals the draw. So drafts change
how many tokens a step yields, never which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import Drafter, StepTimePredictor
from actors.scheduling.plan import StepPlan, StepResult, StepShape, logit_rows
from actors.scheduling.request import Request
from actors.scheduling.speculation.asking import Asking
from actors.scheduling.speculation.offered import GUESS_MEMORY, LOOK_EVERY
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder

_LEAST_RATE = 0.25  # of being reached and right, for a draft to be worth its compute
_LEAST_GAIN = 1.05  # least ratio of tokens per second with drafts to those without
# Share of a step saved by planning it ahead; drafts must gain more to make the core wait.
_AHEAD_SHARE = 0.05
_REST_STEPS = 16  # without drafts, after they did not pay together for the present decodes
_PRICE_STEPS = 64  # looks at decodes until the price of drafts is predicted anew

# Of `PromptLookup`
_GRAM = 3  # tokens that must match
_MOST_AT_ONCE = 2048  # tokens taken in by one call: about a millisecond
_PRIOR = 0.5  # assumed acceptance rate before a request's first draft


class Speculation:
    """One per core. Each request has a drafter from its first decode on."""

    def __init__(self, config: SchedulerConfig, cost_model: StepTimePredictor | None) -> None:
        self.config = config
        self.cost_model = cost_model
        self.num_drafts = 0  # planned so far
        self._least_rate = _LEAST_RATE  # that a draft of the present decodes must have to pay
        self._priced = (0, 0)  # the number of those decodes, and how often it is still taken
        self._num_rests = 0  # steps to plan without drafts
        self._num_rows = logit_rows(config.most_requests)  # that the stages have memory for
        self._overlaps = config.steps_per_request > 1
        self.is_on = config.drafter in ("lookup", "model") or (
            config.drafter == "auto" and cost_model is not None
        )
        # With a draft model, or from the first request with a grammar on
        self._asking: Asking | None = None
        if self.is_on and config.draft_model is not None:
            self._asking = Asking(config, cost_model)
        self._draft_share = 0.0  # of a step, that one draft of each decode adds

    def holds_back(self, decoding: list[RequestState]) -> bool:
        """Whether to wait for the tokens in flight before planning the next step.

        Only if a request may be in several steps at once: drafts continue a known token, so a
        slice after an unknown one cannot carry any.
        """
        if not (self.is_on and self._overlaps):
            return False
        self._price(decoding)
        if any(state.num_drafts for state in decoding):
            return True
        asking = self._asking
        if asking is not None and any(asking.awaits(state) for state in decoding):
            return True
        if asking is not None and asking.has_model:
            return False
        if self._num_rests:
            return False
        worth = 0.0
        for state in self._candidates(decoding):
            if state.in_flight and self._may_draft(state) and self._follow(state):
                assert state.drafter is not None
                # The first guess is of the token in flight.
                both_right = state.drafter.acceptance_rate**2
                if both_right >= _LEAST_RATE and state.drafter.draft(2):
                    worth += both_right
        return worth > _AHEAD_SHARE * len(decoding)

    def extend(self, step: StepBuilder) -> None:
        """Add drafts to decodes of the planned step; none while prompts wait or are unfinished."""
        if not self.is_on or step.wants_prefill:
            return
        self._price(step.decoding)
        if self._num_rests:
            self._num_rests -= 1
            if self._asking is not None:
                self._asking.num_idle += 1
            return
        self._add_drafts(step)
        asking = self._asking
        if asking is None:
            return
        if not asking.has_model:
            asking.ask_grammars(step, _AHEAD_SHARE * step.contents.num_slices * self._overlaps)
        elif not asking.ask(step, _LEAST_RATE, self._draft_share, self._pays):
            self._num_rests = _REST_STEPS

    def answered(
        self, plan: StepPlan, result: StepResult, by_id: Mapping[int, RequestState]
    ) -> None:
        """Take the drafts that the last stage offers."""
        if self._asking is not None:
            self._asking.answered(plan, result, by_id)

    def _add_drafts(self, step: StepBuilder) -> None:
        candidates = self._candidates(step.contents.decodes_alone)
        offers = [(s, d) for s in candidates if (d := self._offer(s))]
        if not offers:
            return
        room = min(step.room_for_drafts(), self._num_rows - step.contents.num_slices)
        counts = [0] * len(offers)
        for depth in range(1, self.config.most_drafts + 1):
            for i, (state, drafts) in enumerate(offers):
                reached = _acceptance_rate(state) ** depth
                if depth <= len(drafts) and room > 0 and reached >= self._least_rate:
                    counts[i] = depth
                    room -= 1
        while any(counts):
            wished = [
                (s.num_computed_tokens - 1, _acceptance_rate(s), count)
                for (s, _), count in zip(offers, counts, strict=True)
                if count
            ]
            if self._pays(step.shape, wished):
                break
            counts = [count // 2 for count in counts]
            if not any(counts):
                self._num_rests = _REST_STEPS
        for (state, drafts), count in zip(offers, counts, strict=True):
            if count:
                self.num_drafts += step.add_drafts(state, drafts[:count])

    def _offer(self, state: RequestState) -> tuple[int, ...]:
        if not self._may_draft(state) or not self._follow(state):
            return ()
        assert state.drafter is not None
        # Its own token is at num_computed_tokens - 1; nothing is computed from `end` on.
        most = min(self.config.most_drafts, state.end - state.num_computed_tokens)
        return state.drafter.draft(most) if most > 0 else ()

    @staticmethod
    def _may_draft(state: RequestState) -> bool:
        """Not for a suspect, which is tried without drafts."""
        return state.suspicion is None

    def _follow(self, state: RequestState) -> bool:
        """Give the drafter all known tokens; False if its drafts would not pay, or while a long
        prompt takes more calls."""
        if state.drafter is None:
            state.drafter = self._drafter(state.request)
        is_whole = state.drafter.follow(state.output_token_ids)
        return is_whole and state.drafter.acceptance_rate >= self._least_rate

    def _drafter(self, request: Request) -> Drafter:
        if request.sampling.grammar is not None and self._asking is None:
            self._asking = Asking(self.config, self.cost_model)
        if self._asking is None or not (self._asking.has_model or request.sampling.grammar):
            return PromptLookup(request.prompt)
        return self._asking.drafter(request)

    def _candidates(self, decoding: Sequence[RequestState]) -> list[RequestState]:
        """Those whose drafts may pay; every few tokens the others too, which may begin to copy."""
        least = self._least_rate
        return [
            state
            for state in decoding
            if (drafter := state.drafter) is None
            or drafter.acceptance_rate >= least
            or len(state.output_token_ids) % LOOK_EVERY == 0
        ]

    def _price(self, decoding: Sequence[RequestState]) -> None:
        """Predict what one draft of each of these lengthens their step by, as a share of it: a
        draft that is right less often cannot pay."""
        if self.cost_model is None or not decoding:
            return
        num_decodes, left = self._priced
        if num_decodes == len(decoding) and left:
            self._priced = (num_decodes, left - 1)
            return
        num_decodes = len(decoding)
        context = sum([state.num_computed_tokens for state in decoding])
        alone = StepShape(num_decodes, context + num_decodes)
        drafted = StepShape(0, 0, ((context // num_decodes, 2),) * num_decodes)
        longer = self.cost_model.step_s(drafted) / self.cost_model.step_s(alone) - 1.0
        self._draft_share, self._least_rate = longer, max(_LEAST_RATE, longer)
        self._priced = (num_decodes, _PRICE_STEPS)
        self._num_rests = 0

    def _pays(
        self,
        shape: StepShape,
        wished: Sequence[tuple[int, float, int]],
        drafting_s: float = 0.0,
    ) -> bool:
        """Whether drafts give more tokens per predicted second than a step of this shape.

        wished: (position of the known token, acceptance rate, number of drafts) of each request.
        """
        if self.cost_model is None:
            return True
        gained, prefills = 0.0, list(shape.prefills)
        num_decodes, context = shape.num_decodes, shape.decode_context_tokens
        for start, rate, count in wished:
            gained += sum([rate**k for k in range(1, count + 1)])
            prefills.append((start, 1 + count))
            num_decodes -= 1
            context -= start + 1
        with_drafts_s = self.cost_model.step_s(StepShape(num_decodes, context, tuple(prefills)))
        longer = (with_drafts_s + drafting_s) / self.cost_model.step_s(shape)
        return (shape.num_decodes + gained) / shape.num_decodes >= _LEAST_GAIN * longer


def _acceptance_rate(state: RequestState) -> float:
    drafter: Drafter | None = state.drafter
    assert drafter is not None
    return drafter.acceptance_rate


class PromptLookup:
    """Implements `interfaces.Drafter`: guesses what followed the last n-gram where it stood before.

    Outputs that quote, edit or repeat text of the request continue like their source. A table holds
    the last position of each n-gram; a match is followed token by token, so most tokens cost one
    comparison and one entry.
    """

    __slots__ = ("_at", "_match", "_num_prompt", "_prompt", "_tokens", "acceptance_rate")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.acceptance_rate = _PRIOR
        self._prompt = prompt
        self._num_prompt = len(prompt)
        self._tokens: list[int] = []  # of prompt and output, taken in so far
        self._at: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._match: int | None = None  # position of the token that should come next

    def follow(self, output: Sequence[int]) -> bool:
        tokens, num_prompt = self._tokens, self._num_prompt
        known = len(tokens)
        if known < num_prompt:
            self._append(self._prompt[known : known + _MOST_AT_ONCE], learns=False)
            known = len(tokens)
            if known < num_prompt:
                return False
        new = output[known - num_prompt : known - num_prompt + _MOST_AT_ONCE]
        self._append(new, learns=True)
        return len(tokens) == num_prompt + len(output)

    def _append(self, new: Sequence[int], learns: bool) -> None:
        tokens, table = self._tokens, self._at
        for token in new:
            match = self._match
            if match is not None:
                is_right = tokens[match] == token
                if learns:
                    self.acceptance_rate *= GUESS_MEMORY
                    self.acceptance_rate += (1.0 - GUESS_MEMORY) * is_right
                match = match + 1 if is_right else None
            tokens.append(token)
            gram = tuple(tokens[-_GRAM:])
            self._match = table.get(gram) if match is None else match
            if len(gram) == _GRAM:
                table[gram] = len(tokens)

    def draft(self, most: int) -> tuple[int, ...]:
        match, tokens = self._match, self._tokens
        if match is None:
            return ()
        found = tokens[match : match + most]
        period = len(tokens) - match  # a repetition continues
        while len(found) < most:
            found.append(found[-period])
        return tuple(found)
