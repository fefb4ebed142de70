"""When each stage will be free: the steps in flight, laid end to end by the cost model.

Stage k starts a micro-batch when it has arrived there and the one before it has left. Budgets ask
how long the next micro-batch may occupy a stage so that its tokens, and those of the micro-batches
behind it, still come in time.
"""

from __future__ import annotations

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.interfaces import EngineView, StepView


class PipelineClock:
    """Call `sync` once per planning; `free_s` and `ends` then hold.

    free_s: when each stage is free of what is in flight (absolute, never before now for stage 0).
    ends: (end on the last stage, its decodes alone in stage seconds) per step in flight.
    """

    def __init__(self, cost: OnlineCostModel) -> None:
        self._cost = cost
        self._known: list[tuple[StepView, list[float], float]] = []
        self._base_s = [0.0] * cost.profile.num_stages
        self.free_s = list(self._base_s)
        self.ends: list[tuple[float, float]] = []

    def sync(self, engine: EngineView) -> None:
        """Follow the engine: forget answered steps, add those planned since."""
        now_s, known = engine.now_s, self._known
        steps = engine.in_flight
        oldest = steps[0] if steps else None
        while known and known[0][0] is not oldest:
            self._base_s = [min(s, now_s) for s in known.pop(0)[1]]
        if len(known) < len(steps):
            for step in list(steps)[len(known) :]:
                known.append(self._place(step))
        free_s = known[-1][1] if known else self._base_s
        self.free_s = [max(free_s[0], now_s), *(max(s, now_s) for s in free_s[1:])]
        self.ends = [(max(frees[-1], now_s), alone_s) for _, frees, alone_s in known]

    def _place(self, step: StepView) -> tuple[StepView, list[float], float]:
        profile, shape = self._cost.profile, step.shape
        mix = Mix.of_shape(shape, profile.attention_window)
        stage_s = profile.stage_s(mix) * self._cost.ratio(mix)
        before = self._known[-1][1] if self._known else self._base_s
        arrives_s, frees = step.planned_at_s, []
        send_s = profile.send_s(mix.num_tokens)
        for free_s in before:
            end_s = max(arrives_s, free_s) + stage_s
            frees.append(end_s)
            arrives_s = end_s + send_s
        # A prompt that ends in this step decodes in the next.
        alone = Mix(mix.num_slices, mix.decode_kv_tokens + mix.prefill_kv_tokens)
        return step, frees, profile.stage_s(alone) * self._cost.ratio(alone)

    def room_s(self, due_s: float, send_s: float) -> float:
        """Longest stage time of a step planned now whose last stage must end by due_s."""
        n = len(self.free_s)
        return min(
            (due_s - send_s * (n - 1 - k) - free_s) / (n - k)
            for k, free_s in enumerate(self.free_s)
        )

    def room_before_others_s(self, tbt_s: float, send_s: float) -> float:
        """Longest stage time that still lets those in flight come round within tbt_s.

        Each will want a step of its decodes alone behind ours, in turn.
        """
        room_s, alone_sum_s, n = float("inf"), 0.0, len(self.free_s)
        for end_s, alone_s in self.ends:
            alone_sum_s += alone_s
            due_s = end_s + tbt_s
            # Behind our step at the last stage, and behind it at the first.
            room_s = min(room_s, self.room_s(due_s - alone_sum_s, send_s))
            first_s = due_s - alone_sum_s - (n - 1) * (alone_s + send_s) - self.free_s[0]
            room_s = min(room_s, first_s)
        return room_s
