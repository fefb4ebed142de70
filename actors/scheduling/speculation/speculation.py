"""Which decodes of a step carry drafts of the next tokens, and how many.

Drafts are guesses of the next tokens. They follow a decode's own token in its slice; the last stage
draws at every position, and a draft is accepted if and only if it equals the draw. So drafts change
how many tokens a step yields, never which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import Drafter, StepTimePredictor
from actors.scheduling.plan import StepPlan, StepResult, StepShape, logit_rows
from actors.scheduling.request import Request
from actors.scheduling.speculation.asking import Asking
from actors.scheduling.speculation.choice import LEAST_CHANCE, Wish, choose, least_rate
from actors.scheduling.speculation.history import AT_ONCE, Histories, Reading
from actors.scheduling.speculation.lookup import PromptLookup
from actors.scheduling.speculation.offered import LOOK_EVERY
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder

# Share of a step saved by planning it ahead; drafts must gain more to make the core wait.
_AHEAD_SHARE = 0.05
# Without drafts, after the present decodes left no room for them or they did not pay together.
_REST_STEPS = 16
# Time of one search for a match, and the share of a step that those of its requests take.
_SEARCH_S, _SEARCH_SHARE = 10e-6, 0.01
# The price of drafts is predicted anew after so many looks at decodes, or with a number of decodes
# that has changed by this share.
_PRICE_STEPS, _PRICE_CHANGE = 64, 0.125


class Speculation:
    """One per core. Each request has a drafter from its first decode on."""

    def __init__(self, config: SchedulerConfig, cost_model: StepTimePredictor | None) -> None:
        self.config = config
        self.cost_model = cost_model
        self.num_drafts = 0  # planned so far
        self._least_rate = LEAST_CHANCE  # that a draft of the present decodes must have to pay
        self._search_every = 1  # tokens of a request that has no guess
        self._priced = (0, 0)  # the number of those decodes, and for how many looks it holds
        self._num_rests = 0  # steps to plan without drafts
        self._num_rows = logit_rows(config.most_requests)  # that the stages have memory for
        self._overlaps = config.steps_per_request > 1
        self._had_room = True  # for drafts in the last step
        # Where layers keep a state, which is of the slice's end
        self._goes_back = config.num_saved_states is not None
        # Else planning would wait for drafts of which none ever fits (`StepBuilder`)
        has_room = not self._goes_back or config.max_step_tokens > config.most_requests
        self.is_on = has_room and (
            config.drafter in ("lookup", "model")
            or (config.drafter == "auto" and cost_model is not None)
        )
        # With a draft model, or from the first request with a grammar on
        self._asking: Asking | None = None
        if self.is_on and config.draft_model is not None:
            self._asking = Asking(config, cost_model)

        self.make_drafter = self._drafter
        self._reading = Reading()
        self._histories = Histories()

    def holds_back(self, step: StepBuilder) -> bool:
        """Whether to wait for the tokens in flight before planning the next step.

        Only if a request may be in several steps at once: drafts continue a known token, so a
        slice after an unknown one cannot carry any. Prompts do not wait for drafts that the last
        step had no room for.
        """
        if not (self.is_on and self._overlaps):
            return False
        decoding = step.draftable(step.decoding)
        self._price(decoding)
        if any(state.num_drafts for state in step.decoding):
            return True
        if self._is_vain:
            return False
        asking = self._asking
        if asking is not None and any(asking.awaits(state) for state in step.decoding):
            return True
        if asking is not None and asking.has_model:
            return False
        if self._num_rests or (step.wants_prefill and not self._had_room):
            return False
        worth = 0.0
        for state in self._candidates(decoding):
            if state.in_flight and self._may_draft(state) and self._follow(state):
                assert state.drafter is not None
                # The first guess is of the token in flight.
                both_right = state.drafter.acceptance_rate**2
                if both_right >= LEAST_CHANCE and state.drafter.draft(2):
                    worth += both_right
        return worth > _AHEAD_SHARE * len(decoding)

    def extend(self, step: StepBuilder) -> None:
        """Add drafts to decodes of the planned step, in the room that its prefill leaves."""
        self._extend(step)
        self._histories.read(self._reading)
        self._reading.left = AT_ONCE

    def ended(self, state: RequestState) -> None:
        """Remember the text of a request that has been served."""
        drafter, request = state.drafter, state.request
        was_vain = drafter is None and self.is_on and len(state.output_token_ids) > 1
        if isinstance(drafter, PromptLookup) or (was_vain and self._looks_up(request)):
            self._histories.of(request).add(request.prompt, tuple(state.output_token_ids))

    def _extend(self, step: StepBuilder) -> None:
        self._price(step.draftable(step.decoding))
        if self._is_vain:
            return
        if self._num_rests:
            self._num_rests -= 1
            if self._asking is not None:
                self._asking.num_idle += 1
            return
        asking = self._asking
        # Room is looked for where drafts or prompts want it: a step of decodes mostly has some.
        offers = None
        if asking is None and not step.contents.prefills:
            offers = self._offers(step)
            self._had_room = True
            if not offers:
                return
        room = min(step.room_for_drafts(), self._num_rows - step.contents.num_slices)
        self._had_room = room > 0
        if not self._had_room:
            self._num_rests = 0 if step.contents.prefills else _REST_STEPS
            return
        pays = self._add_drafts(step, room, self._offers(step) if offers is None else offers)
        if asking is not None and not asking.has_model:
            asking.ask_grammars(step, _AHEAD_SHARE * step.contents.num_slices * self._overlaps)
        elif asking is not None:
            pays = asking.ask(step) and pays
        if not (pays or step.contents.prefills):  # of which the next steps may have less
            self._num_rests = _REST_STEPS

    def answered(
        self, plan: StepPlan, result: StepResult, by_id: Mapping[int, RequestState]
    ) -> None:
        """Take the drafts that the last stage offers."""
        if self._asking is not None:
            self._asking.answered(plan, result, by_id)

    def _offers(self, step: StepBuilder) -> list[tuple[RequestState, tuple[int, ...]]]:
        candidates = self._candidates(step.draftable(step.contents.decodes_alone))
        if self._goes_back and self.cost_model is None:
            # What is computed again would grow with every wrong draft.
            candidates = [s for s in candidates if not step.contents.num_redone_of(s)]
        return [(s, d) for s in candidates if (d := self._offer(s))]

    def _add_drafts(
        self, step: StepBuilder, room: int, offers: list[tuple[RequestState, tuple[int, ...]]]
    ) -> bool:
        """False if there were some, but no number of them pays."""
        if not offers:
            return True
        wishes = []
        for state, drafts in offers:
            num_known = 1 + step.contents.num_redone_of(state)
            start = state.num_computed_tokens - num_known
            wishes.append(Wish(start, _acceptance_rate(state), len(drafts), num_known))
        shape = step.shape
        counts = choose(self.cost_model, shape, wishes, room, goes_back=self._goes_back)
        for (state, drafts), count in zip(offers, counts, strict=True):
            if count:
                self.num_drafts += step.add_drafts(state, drafts[:count])
        return any(counts)

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
            state.drafter = self.make_drafter(state)
        is_whole = state.drafter.follow(state.output_token_ids)
        return is_whole and state.drafter.acceptance_rate >= self._least_rate

    @property
    def _is_vain(self) -> bool:
        """Whether guesses would not pay beside so many decodes, were all of them right. Texts are
        not followed then, for which a step of 32 short ones would lack a fortieth of its time."""
        return self._least_rate >= 1.0 and self._asking is None

    def _looks_up(self, request: Request) -> bool:
        asking = self._asking
        return asking is None or not (asking.has_model or request.sampling.grammar)

    def _drafter(self, state: RequestState) -> Drafter:
        request = state.request
        if request.sampling.grammar is not None and self._asking is None:
            self._asking = Asking(self.config, self.cost_model)
        if self._asking is not None and not self._looks_up(request):
            return self._asking.drafter(request)
        history = self._histories.of(request)
        return PromptLookup(request.prompt, request.output, self._reading, history)

    def _candidates(self, decoding: Sequence[RequestState]) -> list[RequestState]:
        """Those whose drafts may pay; every few tokens the others too, which may begin to copy."""
        least, every = self._least_rate, self._search_every
        return [
            state
            for state in decoding
            if (drafter := state.drafter) is None
            or not (rest := drafter.rest if drafter.acceptance_rate >= least else LOOK_EVERY)
            or (len(state.output_token_ids) + state.request_id) % max(rest, every) == 0
        ]

    def _price(self, decoding: Sequence[RequestState]) -> None:
        """Predict from which acceptance rate drafts can pay beside so many decodes: those of one
        request, or, where a step of one token more is much longer, those of all together."""
        if self.cost_model is None or not decoding:
            return
        num_decodes, left = self._priced
        if left and abs(len(decoding) - num_decodes) <= _PRICE_CHANGE * num_decodes:
            self._priced = (num_decodes, left - 1)
            return
        num_decodes, most = len(decoding), self.config.most_drafts
        context = sum([state.num_computed_tokens for state in decoding])
        mean = context // num_decodes
        alone_s = self.cost_model.step_s(StepShape(num_decodes, context + num_decodes))
        lowest = 1.0
        for number, count in ((1, 1), (1, most), (num_decodes, most)):
            others = num_decodes - number
            drafted = StepShape(others, (mean + 1) * others, ((mean, 1 + count),) * number)
            longer = self.cost_model.step_s(drafted) / alone_s - 1.0
            gain = longer * num_decodes / number
            lowest = min(lowest, least_rate(gain, count, self._goes_back))
            if lowest <= LEAST_CHANCE:
                break
        self._least_rate = max(lowest, LEAST_CHANCE)
        searches = _SEARCH_SHARE * alone_s / _SEARCH_S
        self._search_every = min(LOOK_EVERY, math.ceil(num_decodes / searches))
        self._priced = (num_decodes, _PRICE_STEPS)
        self._num_rests = 0


def _acceptance_rate(state: RequestState) -> float:
    drafter: Drafter | None = state.drafter
    assert drafter is not None
    return drafter.acceptance_rate
