"""Which requests of a step ask the last stage for drafts of the tokens after it, and how many.

The stage makes them once it has drawn, so their number is decided a step before they are verified.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.plan import StepPlan, StepResult, StepShape, logit_rows
from actors.scheduling.request import Request
from actors.scheduling.speculation.choice import LEAST_CHANCE, Wish, choose
from actors.scheduling.speculation.offered import LOOK_EVERY, Offered
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder
from actors.scheduling.step_contents import StepContents

_PRIOR = 0.5  # least acceptance rate assumed of a new request
# Of text that a grammar forces, whose tokens may be cut otherwise
_FORCED_PRIOR = 0.9
_MEAN_MEMORY = 0.95  # weight of the mean acceptance rate so far, at each answer of a request
# Time of one pass of the draft model, as a share of the step of the same decodes: before the first
# was measured, and the weight of the share so far at each measurement.
_PASS_SHARE, _PASS_MEMORY = 0.25, 0.8
# After so many steps in which none paid, and so many tokens of a request for which none did while
# others ask, one is asked for all the same, to be compared.
_PROBE_STEPS, _PROBE_TOKENS = 128, 64


class Asking:
    """One per core whose stages have a draft model, or that has requests with a grammar.

    acceptance_rate: mean over the requests of late. num_idle: steps since one asked.
    """

    def __init__(self, config: SchedulerConfig, cost_model: StepTimePredictor | None) -> None:
        self.acceptance_rate = 0.0
        self.has_model = config.draft_model is not None
        self._config = config
        self._cost_model = cost_model
        self._pass_share = _PASS_SHARE
        self._was_measured = False
        self._num_rows = logit_rows(config.most_requests)
        self.num_idle = 0
        self._num_looks = 0  # steps since a request was asked that had long brought nothing

    def drafter(self, request: Request) -> Offered:
        if request.sampling.grammar is not None:
            return Offered(_FORCED_PRIOR)
        return Offered(max(_PRIOR, self.acceptance_rate))

    @staticmethod
    def awaits(state: RequestState) -> bool:
        """Whether a step in flight will bring drafts."""
        drafter = state.drafter
        return (
            isinstance(drafter, Offered)
            and state.in_flight > 0
            and drafter.asked_in == state.step_id
        )

    def ask(self, step: StepBuilder) -> bool:
        """Ask for drafts of the step's requests, for the next step, which is taken to be like this
        one; False if no number of them pays."""
        contents = step.contents
        members, chunks = self._members(contents)
        asking = [(s, d) for s in step.draftable(members) if (d := self._follow(s)) is not None]
        room = min(step.room_for_drafts(), self._num_rows - contents.num_slices)
        if not asking or room <= 0:
            return True
        context = sum([s.num_computed_tokens + 1 for s in members])
        shape = StepShape(len(members), context, chunks)
        pass_s = self._pass_s(shape)
        most = self._most_passes(step, room, pass_s)
        wishes = [
            Wish(
                s.num_computed_tokens,
                d.acceptance_rate,
                max(0, min(most, s.end - s.num_computed_tokens - 1)),
            )
            for s, d in asking
        ]
        goes_back = self._config.num_saved_states is not None
        counts = choose(self._cost_model, shape, wishes, room, pass_s, goes_back)
        self.num_idle = 0 if any(counts) else self.num_idle + 1
        if sum(counts) < room and (not self.num_idle or self.num_idle >= _PROBE_STEPS):
            # Without it nothing would be learned any more.
            since = [len(s.output_token_ids) - d.asked_at for s, d in asking]
            unasked = [i for i, wish in enumerate(wishes) if wish.most and not counts[i]]
            longest = max(unasked, key=since.__getitem__, default=-1)
            if longest >= 0 and (self.num_idle or since[longest] >= _PROBE_TOKENS):
                self.num_idle, counts[longest] = 0, 1
        for (state, drafter), count in zip(asking, counts, strict=True):
            if count:
                drafter.ask(contents.step_id)
                contents.drafts_asked.append((state.request_id, count))
        return any(counts) or not any(w.most and w.rate >= LEAST_CHANCE for w in wishes)

    def ask_grammars(self, step: StepBuilder, least_share: float) -> None:
        """Without a model: ask what grammars force. It costs next to nothing, but no step is
        planned ahead meanwhile. least_share: of the answers that must bring something."""
        contents = step.contents
        self._num_looks += 1  # one that has long brought nothing: after so many steps and tokens
        for state in step.draftable(self._members(contents)[0]):
            drafter = state.drafter
            if not isinstance(drafter, Offered) or state.suspicion is not None:
                continue
            drafter.follow(state.output_token_ids)
            count = min(self._config.most_drafts, state.end - state.num_computed_tokens - 1)
            is_due = (
                self._num_looks >= LOOK_EVERY
                and len(state.output_token_ids) - drafter.asked_at >= LOOK_EVERY
            )
            brings = drafter.offer_rate * drafter.acceptance_rate
            if count > 0 and (is_due or brings >= least_share):
                if is_due:
                    self._num_looks = 0  # one request at a time: all others wait for its answer
                drafter.ask(contents.step_id)
                contents.drafts_asked.append((state.request_id, count))

    def answered(
        self, plan: StepPlan, result: StepResult, by_id: Mapping[int, RequestState]
    ) -> None:
        """Take the drafts that a step brings, and learn what they took."""
        for request_id, tokens in result.drafts_offered:
            state = by_id.get(request_id)
            if state is not None and isinstance(state.drafter, Offered):
                state.drafter.take(tokens, state.output_token_ids)
                if state.request.sampling.grammar is None:
                    self.acceptance_rate *= _MEAN_MEMORY
                    self.acceptance_rate += (1 - _MEAN_MEMORY) * state.drafter.acceptance_rate
        if self._cost_model is not None and result.draft_pass_s > 0:
            asked = dict(plan.drafts_asked)
            ends = [start + count for i, start, count, _ in plan.slices if i in asked]
            share = result.draft_pass_s / self._cost_model.step_s(StepShape(len(ends), sum(ends)))
            memory = _PASS_MEMORY if self._was_measured else 0.0
            self._pass_share = memory * self._pass_share + (1 - memory) * share
            self._was_measured = True

    @staticmethod
    def _members(contents: StepContents) -> tuple[list[RequestState], tuple[tuple[int, int], ...]]:
        """The requests that draw a token in this step, and the chunks of the others, as the next
        step may have them again."""
        members, chunks = [*contents.decode_states, *contents.drafted], []
        for state, count in contents.prefills.items():
            if state.num_computed_tokens == state.num_tokens:
                members.append(state)
            else:
                chunks.append((state.num_computed_tokens, count))
        return members, tuple(chunks)

    def _follow(self, state: RequestState) -> Offered | None:
        """The drafter of a request that may ask, level with its tokens."""
        if state.suspicion is not None or state.request.pooling is not None:
            return None
        if state.drafter is None:
            state.drafter = self.drafter(state.request)
        if not isinstance(state.drafter, Offered):
            return None
        state.drafter.follow(state.output_token_ids)
        return state.drafter

    def _pass_s(self, shape: StepShape) -> float:
        if self._cost_model is None:
            return 0.0
        return self._pass_share * self._cost_model.step_s(shape)

    def _most_passes(self, step: StepBuilder, room: int, pass_s: float) -> int:
        """Passes that take no longer than the drafts that the budget has room for: they lengthen
        this step, which may end no later than the budget allows."""
        most = self._config.most_drafts
        if self._cost_model is None or pass_s <= 0:
            return most
        shape = step.shape
        context = shape.decode_context_tokens // max(1, shape.num_decodes)
        fuller = shape._replace(prefills=(*shape.prefills, (context, room)))
        room_s = self._cost_model.step_s(fuller) - self._cost_model.step_s(shape)
        return min(most, int(room_s / pass_s))
