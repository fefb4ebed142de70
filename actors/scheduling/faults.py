"""What happens to requests when a step fails or the pipeline is lost.

No token is lost: every request that was touched is computed again from its known tokens. If
nothing tells which is at fault, each request of the failed step is tried alone, once; one that
fails alone twice in a row is ended with an error, so that it cannot hold the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.events import Output
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.request import FinishReason
from actors.scheduling.state import Fate, InFlight, RequestState, Status

_MAX_FAILURES_ALONE = 2


class Faults:
    def __init__(self, requests: LiveRequests) -> None:
        self.requests = requests
        self.is_alert = False  # something failed lately: `cleared` wants to hear of successes
        self._lost_since_answer = False  # a pipeline was lost and no step has succeeded since

    def cleared(self, step: InFlight) -> None:
        """A step succeeded: its members are above suspicion."""
        self._lost_since_answer = False
        for state, _ in step.partial:
            state.num_failures_alone = 0
        if len(step.sampled) == 1:
            step.sampled[0].num_failures_alone = 0
        self.is_alert = any(s.num_failures_alone for s in self.requests.by_id.values())

    def step_failed(self, step: InFlight, message: str, culprit: int | None) -> list[Output]:
        requests, outputs = self.requests, list[Output]()
        self.is_alert = True
        members = step.members()
        for state in members:
            state.in_flight -= 1
        self._distrust_copies(step)
        # The stages may not have heard of these releases; started again, it is a new life.
        for request_id in step.plan.released:
            known = requests.by_id.get(request_id)
            if known is None or not known.on_stages:
                requests.running.released.append(request_id)
        alone = len(members) == 1
        for state in members:
            if state.status is Status.FINISHING and state.fate is Fate.END:
                pass  # its result is not awaited any more
            elif state.request_id == culprit or (alone and self._is_poison(state)):
                outputs.append(_error(state, message))
                self.requests.end(state)
            else:
                # Later steps in flight were fed by this one: their results are worthless.
                state.discard = True
                fate = Fate.ISOLATE if culprit is None else Fate.QUEUE
                if state.status is Status.RUNNING:
                    requests.stop(state, fate)
                    continue
                state.fate = fate
            if state.status is Status.FINISHING and state.in_flight == 0:
                requests.drained(state)
        return outputs

    def _distrust_copies(self, step: InFlight) -> None:
        """KV that the failed step should have copied to the host may be garbage there."""
        for state in step.swapped_out:
            if state.status is Status.WAITING:
                self.requests.running.swap.distrust(state)
            elif state.status is Status.RUNNING:  # a later step has brought the garbage back
                state.discard = True
                self.requests.stop(state, Fate.QUEUE)
            else:
                state.discard = True

    def _is_poison(self, state: RequestState) -> bool:
        state.num_failures_alone += 1
        return state.num_failures_alone >= _MAX_FAILURES_ALONE

    def pipeline_lost(self, steps: Sequence[InFlight]) -> list[Output]:
        """Everything is forgotten but the known tokens; order of ranks is kept.

        Losing the pipeline twice with no success between points at what was in flight.
        """
        requests, outputs = self.requests, list[Output]()
        self.is_alert = True
        members = {state: None for step in steps for state in step.members()}
        again, self._lost_since_answer = self._lost_since_answer, True
        suspicious = again and bool(members)
        alone = len(members) == 1
        for state in list(requests.by_id.values()):
            state.in_flight = 0
            state.on_stages = False
            requests.running.swap.distrust(state)
            state.discard = True  # nothing survives to be swapped
            if state.status is Status.FINISHING:
                requests.drained(state)
            elif state.status is Status.RUNNING:
                suspect = suspicious and state in members
                if suspect and alone and self._is_poison(state):
                    outputs.append(_error(state, "the engine is lost whenever this request runs"))
                    self.requests.end(state)
                else:
                    requests.stop(state, Fate.ISOLATE if suspect else Fate.QUEUE)
            state.discard = False
        requests.running.lose_device()
        return outputs


def _error(state: RequestState, message: str) -> Output:
    return Output(state.request_id, state.num_output_tokens, (), FinishReason.ERROR, error=message)
