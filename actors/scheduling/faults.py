"""Handling of requests when a step fails or the pipeline is lost.

No token is lost: every affected request is computed again from its known tokens. The requests of
the step are suspects until they have been computed past the point of the fault. Suspects are tried
in groups, one step at a time with nothing else in flight, in turn with steps of other requests.
Their recomputation is chunked like any prompt, so that the others keep their objectives.

- A failed step is cheap: its requests are halved until one fails alone. Twice ends it, but only if
  the stages were new or had just succeeded each time: else they may be at fault.
- A lost pipeline costs seconds: suspects are tried in groups of about the square root of their
  number, then the members of a group that causes another loss one by one; the third loss ends the
  request at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt

from actors.scheduling.events import Output, PipelineLost
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.request import FAILS_ALWAYS, MAX_LOSSES
from actors.scheduling.state import NEVER, Fate, InFlight, RequestState, RequestStatus, Suspicion
from actors.scheduling.step import StepBuilder

_MAX_FAILURES_ALONE = 2
LEAST_TRIAL_TOKENS, MOST_TRIAL_TOKENS = 64, 2048  # of a step, whatever the budget
_GROUP_FROM_BEFORE = 16  # group size for suspects of an earlier engine, which arrive one by one


class Faults:
    """Plans trials of suspects: `requests.trials` holds each once, in groups, first in turn."""

    def __init__(self, requests: LiveRequests) -> None:
        self.requests = requests
        self._trial_is_next = True  # suspects and the others take turns
        self.num_failures_in_a_row = 0  # failed steps since the last success or rebuild

    # ---- trials -----------------------------------------------------------------------

    def drop_settled(self) -> None:
        """Drop members that were cleared or have ended; then the first group is the next to try."""
        trials = self.requests.trials
        while trials:
            trials[0] = [
                s for s in trials[0] if s.suspicion and s.status is not RequestStatus.ENDED
            ]
            if trials[0]:
                return
            trials.popleft()

    def plan_turn(self, step: StepBuilder, plan_others: Callable[[StepBuilder], None]) -> bool:
        """Plan a step of suspects or, in turn, of the others, who are asked once; False: nothing is
        planned."""
        others_are_next = not self._trial_is_next
        if others_are_next:
            plan_others(step)
        self._trial_is_next = not step.contents.is_empty
        if step.contents.is_empty:
            self._plan_trial(step)
        if step.contents.is_empty and not others_are_next:
            plan_others(step)
        return not step.contents.is_empty

    def _plan_trial(self, step: StepBuilder) -> None:
        """Plan a step of suspects only; the slack of the others bounds its prefill.

        Later requests are preempted for it. Called only while nothing is in flight.
        """
        group = self.requests.trials[0]
        left = self.trial_tokens(step)
        step.is_trial = True
        prefilling = set(step.prefilling)
        running = [state for state in group if state.status is RequestStatus.RUNNING]
        step.decode([state for state in running if state not in prefilling])
        for state in group:
            limit = min(left, step.room)
            waits = state.status is RequestStatus.WAITING and limit > 0
            if state in prefilling or (waits and self._start(state, step, limit)):
                left -= step.chunk(state, limit)
        step.is_trial = False

    def trial_tokens(self, step: StepBuilder) -> int:
        """Prefill tokens of a step of suspects: as many as the budget allows beside all decodes.

        The decodes of other requests wait meanwhile, and get the next step.
        """
        single = [state for state in step.decoding if state.decode_length == 1]
        redone = [state for state in step.decoding if state.decode_length > 1]
        shape = step.shape._replace(
            num_decodes=len(single),
            decode_context_tokens=sum([state.num_computed_tokens + 1 for state in single]),
            prefills=tuple([(s.num_computed_tokens, s.decode_length) for s in redone]),
            num_drafted=len(redone),
        )
        left = step.budget_of(shape) - shape.num_tokens
        return max(min(left, MOST_TRIAL_TOKENS), LEAST_TRIAL_TOKENS)

    def _start(self, state: RequestState, step: StepBuilder, limit: int) -> bool:
        requests, running, step_id = self.requests, self.requests.running, step.contents.step_id
        if requests.start(state, limit, step.reserve):
            return True
        later = running.victims(state, step_id)
        if not running.could_start(state, limit, step.reserve, later):
            return False  # a move of KV holds the memory: preempted in vain, they would come again
        while (victim := running.victim(state, step_id)) is not None:
            requests.preempt(victim)
            if requests.start(state, limit, step.reserve):
                return True
        return False

    def succeeded(self, step: InFlight) -> None:
        """A step succeeded: clear members that are past their fault."""
        self.num_failures_in_a_row = 0
        for part in step.plan.named_slices:
            state = self.requests.by_id.get(part.request_id)
            if (
                state is None
                or state.suspicion is None
                or state.status is not RequestStatus.RUNNING
            ):
                continue
            end = part.start + part.num_tokens
            if part.start >= state.suspicion.begin and end >= state.suspicion.end:
                state.suspicion = None

    def suspect_from_before(self, state: RequestState) -> None:
        """Make a new request a suspect that was in a lost engine before."""
        trials, num_losses = self.requests.trials, state.request.num_losses
        # The point of the fault is unknown: assume its known tokens, and one more.
        begin = state.num_tokens if state.request.pooling is None else 0
        state.suspicion = Suspicion(begin, num_losses=num_losses)
        last = trials[-1] if trials else []
        if num_losses > 1 or not 0 < len(last) < _GROUP_FROM_BEFORE or _lost_twice(last[0]):
            trials.append([state])
        else:
            last.append(state)

    def _suspect(self, steps: Sequence[InFlight]) -> list[RequestState]:
        """These steps failed; returns their continuing members, all of them suspects now."""
        suspects: dict[RequestState, None] = {}
        for step in steps:
            of_id = {state.request_id: state for state in step.members()}
            for part in step.plan.named_slices:
                state = of_id[part.request_id]
                if state.status is RequestStatus.FINISHING and state.fate is Fate.END:
                    continue
                if state.suspicion is None:
                    state.suspicion = Suspicion()
                suspicion = state.suspicion
                suspicion.begin = max(suspicion.begin, part.start)
                suspicion.end = max(suspicion.end, part.start + part.num_tokens)
                suspects[state] = None
        return list(suspects)

    def _try_in(self, suspects: list[RequestState], group_size: int) -> None:
        """Make new groups of these, tried after the current group."""
        trials = self.requests.trials
        moved = set(suspects)
        for group in trials:
            group[:] = [state for state in group if state not in moved]
        for begin in range(0, len(suspects), max(1, group_size)):
            trials.append(suspects[begin : begin + group_size])

    # ---- a failed step ----------------------------------------------------------------

    def step_failed(self, step: InFlight, message: str) -> list[Output]:
        requests, outputs = self.requests, list[Output]()
        members = step.members()
        # A step after a failed one may fail as a consequence, which is no new evidence.
        is_explained = any(state.discard for state in members)
        for state in members:
            state.in_flight -= 1
        for part in step.drafted:
            part.state.num_drafts = 0
        requests.settle_states(step.plan, is_done=False)
        self._distrust_copies(step)
        # These releases may not have reached the stages; a restart replaces the old state.
        for request_id in step.plan.released:
            known = requests.by_id.get(request_id)
            if known is None or not known.on_stages:
                requests.running.released.append(request_id)
        suspects = [] if is_explained else self._suspect((step,))
        self.num_failures_in_a_row += not is_explained
        is_culprit = len(members) == len(suspects) == 1 and self._failed_alone(members[0])
        if is_culprit:
            suspects = []
        for state in members:
            if state.status is RequestStatus.FINISHING and state.fate is Fate.END:
                pass  # its result is not needed
            elif is_culprit:
                outputs.append(Output.failed(state.request_id, state.num_output_tokens, message))
                requests.end(state)
                self._explained_by(state)
            else:
                # Later steps in flight used tokens of this one: discard their results.
                state.discard = True
                if state.status is RequestStatus.RUNNING:
                    requests.stop(state, Fate.QUEUE)
                    continue
            if state.status is RequestStatus.FINISHING and state.in_flight == 0:
                requests.drained(state)
        self._try_in(suspects, -(-len(suspects) // 2))
        return outputs

    def _failed_alone(self, state: RequestState) -> bool:
        """A step with only this request failed; returns whether the request must end."""
        suspicion = state.suspicion
        assert suspicion is not None
        suspicion.num_failures += self.num_failures_in_a_row == 1
        return suspicion.num_failures >= _MAX_FAILURES_ALONE

    def _explained_by(self, culprit: RequestState) -> None:
        """The failures in a row end with it, unless there are other suspects: it may have left the
        stages broken, which must not be their second failure.
        """
        others = self.requests.by_id.values()
        if not any(state.suspicion for state in others if state is not culprit):
            self.num_failures_in_a_row = 0

    def _distrust_copies(self, step: InFlight) -> None:
        """Drop KV on the host that the failed step may not have written."""
        for state in step.swapped_out:
            if state.status is RequestStatus.WAITING:
                self.requests.running.swap.distrust(state)
            elif state.status is RequestStatus.RUNNING:  # a later step has swapped it in
                state.discard = True
                self.requests.stop(state, Fate.QUEUE)
            else:
                state.discard = True

    # ---- a lost pipeline --------------------------------------------------------------

    def pipeline_lost(self, steps: Sequence[InFlight], event: PipelineLost) -> list[Output]:
        """Drop all state but known tokens and order keys, and requeue all running requests.

        steps: all that were in flight."""
        requests, outputs = self.requests, list[Output]()
        self.num_failures_in_a_row = 0
        first = NEVER if event.first_dropped is None else event.first_dropped
        for step in steps:
            if step.plan.step_id >= first:
                _wait_on(step)
        steps = [s for s in steps if event.steps_are_suspect and s.plan.step_id < first]
        num_members = len({state for step in steps for state in step.members()})
        once, again = list[RequestState](), list[RequestState]()
        for state in sorted(self._suspect(steps), key=lambda state: state.order_key):
            suspicion = state.suspicion
            assert suspicion is not None
            suspicion.num_losses += 1
            if num_members == 1 and suspicion.num_losses >= MAX_LOSSES:
                known = state.num_output_tokens
                outputs.append(Output.failed(state.request_id, known, FAILS_ALWAYS))
                requests.end(state)
            else:
                (again if suspicion.num_losses > 1 else once).append(state)
        for state in list(requests.by_id.values()):
            state.in_flight = state.num_drafts = 0
            state.on_stages = False
            requests.running.swap.distrust(state)
            state.discard = True  # there is no KV to swap out
            if state.status is RequestStatus.RUNNING:
                requests.stop(state, Fate.QUEUE)
            elif state.status is RequestStatus.FINISHING:
                requests.drained(state)
            state.discard = False
        requests.running.lose_device()
        self._try_in(once, isqrt(len(once)))
        self._try_in(again, 1)
        return outputs


def _wait_on(dropped: InFlight) -> None:
    """No stage got this step: what it would have begun has not been queued any less."""
    for state in dropped.members():
        if state.first_planned_s == dropped.planned_at_s:
            state.first_planned_s = None


def _lost_twice(state: RequestState) -> bool:
    return state.suspicion is not None and state.suspicion.num_losses > 1
