"""What happens to requests when a step fails or the pipeline is lost.

Nobody loses a token: whoever was touched is computed again from its known tokens. If nothing
tells who is at fault, everyone of the failed step is tried alone, once; who fails alone twice in
a row is ended with an error, so that one poisoned request cannot hold the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.events import Output
from actors.scheduling.outcomes import Outcomes
from actors.scheduling.request import FinishReason
from actors.scheduling.memory.running import Residents
from actors.scheduling.state import Fate, RequestState, Status
from actors.scheduling.step import InFlight

_MAX_LONELY_FAILURES = 2


class Faults:
    def __init__(self, residents: Residents, outcomes: Outcomes) -> None:
        self.residents = residents
        self.outcomes = outcomes
        self._lost_since_answer = False  # a pipeline was lost and no step has succeeded since

    def cleared(self, step: InFlight) -> None:
        """A step succeeded: its members are above suspicion."""
        self._lost_since_answer = False
        for state, _ in step.partial:
            state.lonely_failures = 0
        if len(step.sampled) == 1:
            step.sampled[0].lonely_failures = 0

    def step_failed(self, step: InFlight, message: str, culprit: int | None) -> list[Output]:
        residents, outputs = self.residents, list[Output]()
        members = step.members()
        for state in members:
            state.in_flight -= 1
        self._distrust_copies(step)
        # The stages may not have heard of these releases; started again, it is a new life.
        for request_id in step.plan.released:
            known = residents.states.get(request_id)
            if known is None or not known.mirrored:
                residents.released.append(request_id)
        alone = len(members) == 1
        for state in members:
            if state.status is Status.LEAVING and state.fate is Fate.END:
                pass  # nobody waits for its result any more
            elif state.request_id == culprit or (alone and self._is_poison(state)):
                outputs.append(_error(state, message))
                self.outcomes.end(state)
            else:
                # Later steps in flight were fed by this one: their results are worthless.
                state.discard = True
                fate = Fate.ISOLATE if culprit is None else Fate.QUEUE
                if state.status is Status.RUNNING:
                    residents.leave(state, fate)
                    continue
                state.fate = fate
            if state.status is Status.LEAVING and state.in_flight == 0:
                residents.drained(state)
        return outputs

    def _distrust_copies(self, step: InFlight) -> None:
        """KV that the failed step should have copied to the host may be garbage there."""
        for state in step.swapped_out:
            if state.status is Status.WAITING:
                self.residents.swap.distrust(state)
            elif state.status is Status.RUNNING:  # a later step has brought the garbage back
                state.discard = True
                self.residents.leave(state, Fate.QUEUE)
            else:
                state.discard = True

    def _is_poison(self, state: RequestState) -> bool:
        state.lonely_failures += 1
        return state.lonely_failures >= _MAX_LONELY_FAILURES

    def pipeline_lost(self, steps: Sequence[InFlight]) -> list[Output]:
        """Everything is forgotten but the known tokens; order of ranks is kept.

        Losing the pipeline twice with no success between points at what was in flight.
        """
        residents, outputs = self.residents, list[Output]()
        members = {state: None for step in steps for state in step.members()}
        again, self._lost_since_answer = self._lost_since_answer, True
        suspicious = again and bool(members)
        alone = len(members) == 1
        for state in list(residents.states.values()):
            state.in_flight = 0
            state.mirrored = False
            residents.swap.distrust(state)
            state.discard = True  # nothing survives to be swapped
            if state.status is Status.LEAVING:
                residents.drained(state)
            elif state.status is Status.RUNNING:
                suspect = suspicious and state in members
                if suspect and alone and self._is_poison(state):
                    outputs.append(_error(state, "the engine is lost whenever this request runs"))
                    self.outcomes.end(state)
                else:
                    residents.leave(state, Fate.ISOLATE if suspect else Fate.QUEUE)
            state.discard = False
        residents.lose_device()
        return outputs


def _error(state: RequestState, message: str) -> Output:
    return Output(state.request_id, state.num_output_tokens, (), FinishReason.ERROR, error=message)
