"""What one step holds: a trial of suspects or the policy's choice, and then drafts."""

from __future__ import annotations

from actors.scheduling.faults import Faults
from actors.scheduling.interfaces import Admission, TokenBudget
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.policies import Policy
from actors.scheduling.speculation.speculation import Speculation
from actors.scheduling.state import InFlight
from actors.scheduling.step import StepBuilder


class Planner:
    """Of one core. `use` comes before the first plan, and again when settings change."""

    def __init__(self, requests: LiveRequests, faults: Faults, speculation: Speculation) -> None:
        self._requests = requests
        self._faults = faults
        self._speculation = speculation
        self._trial_is_next = True  # suspects and the others take turns
        self.num_forced_steps = 0  # planned because the policy alone would have stood still

    def use(self, policy: Policy, budget: TokenBudget, admission: Admission) -> None:
        self.policy = policy
        self.budget = budget
        self.builder = StepBuilder(self._requests, budget, admission, policy.reserve)

    def plan(self, step_id: int) -> InFlight | None:
        """The next step; None if nothing can run now."""
        (builder := self.builder).clear(step_id)
        if self._requests.trials and self._plan_trial(builder):
            return builder.build()
        self.policy.plan(builder)
        if builder.empty and not self._requests.in_flight:
            self._plan_anything(builder)
        if self._speculation.is_on:
            self._speculation.extend(builder)
        return builder.build()

    def _plan_trial(self, builder: StepBuilder) -> bool:
        """Plan the turn of the suspects, or else of the others; False: plan as always."""
        if not self._trial_is_next:
            self.policy.plan(builder)
        self._trial_is_next = not builder.empty
        if builder.empty:
            self._faults.plan_trial(builder)
        return not builder.empty

    def _plan_anything(self, builder: StepBuilder) -> None:
        """Progress comes before policy: with nothing in flight, nothing would wake the core."""
        self.num_forced_steps += 1
        builder.decode(self._requests.decoding)
        for state in builder.runnable_prefills():
            builder.chunk(state, builder.room)
        if builder.empty and (head := builder.head()) is not None:
            builder.start(head, builder.room)
