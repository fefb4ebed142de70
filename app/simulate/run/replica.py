"""One replica on virtual time: the real scheduling core over a pipeline that only takes time.

The core comes from `actors.scheduling.build_core`, as in a live engine. A stage is modeled by the
time at which it becomes free; a plan passes the stages in order and pays the sends between them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import (
    Abort,
    Emit,
    Event,
    Execute,
    Instruction,
    KVMove,
    OutputRow,
    Refuse,
    StepDone,
    Tick,
    WakeAt,
)
from actors.scheduling.plan import SliceRow, StepPlan, StepResult
from app.simulate.hardware.step_ratios import StepRatios
from app.simulate.run.acceptance import Acceptance
from app.simulate.run.deployment import Deployment
from app.simulate.run.record import RunRecord

if TYPE_CHECKING:
    from actors.scheduling.core import Core

INFINITY = float("inf")

TokenOf = Callable[[int, int], int]  # (request id, position) -> token


class Replica:
    """`next_s` is the time of its next event; `advance` handles it."""

    __slots__ = (
        "_acceptance", "_core", "_in_flight", "_index", "_jitter", "_model", "_ratios", "_record",
        "_rng", "_stages", "_token_of", "_window", "host_s", "next_s", "num_live", "on_answer",
        "on_emit", "on_move", "on_refuse", "on_start", "step", "wake_s",
    )  # fmt: skip

    def __init__(
        self,
        core: Core,
        model: CostModel,
        record: RunRecord,
        *,
        index: int = 0,
        jitter: float = 0.0,
        ratios: StepRatios | None = None,
        seed: int = 0,
        host_s: float = 0.0,
        token_of: TokenOf | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        """
        model: the actual step times (the core may believe another model).
        jitter: sigma of the log-normal factor on each step's time (0: none).
        ratios: measured on a live machine; each step's factor is drawn from them.
        host_s: time from a step's end until the core receives its result.
        token_of: the sampled tokens; by default every token is 0.
        acceptance: of drafts, which the core plans only with it.
        """
        self._acceptance = acceptance
        if acceptance is not None:
            core.speculation.make_drafter = acceptance.drafter
        self._core = core
        self._index = index
        self._model = model
        self._record = record
        self._jitter = jitter
        self._ratios = ratios
        self._rng = random.Random(seed * 1_000_003 + index)
        self._stages = [0.0] * model.num_stages  # when each stage is free
        self._in_flight: deque[tuple[float, StepResult, Sequence[SliceRow]]] = deque()
        self._window = model.attention_window
        self._token_of = token_of
        self.host_s = host_s
        self.wake_s = INFINITY
        self.next_s = INFINITY
        self.num_live = 0  # submitted and not finished
        self.step: Sequence[SliceRow] = ()  # the last one that has begun
        self.on_refuse: Callable[[Refuse, float], None] = record.refused
        self.on_emit: Callable[[Sequence[OutputRow], float], int] = record.emitted
        self.on_start: Callable[[int, float], None] = record.started
        # What a step computed, before the core hears of it
        self.on_answer: Callable[[Sequence[SliceRow], float], None] | None = None
        self.on_move: Callable[[KVMove, float], None] | None = None  # of cores with a second tier

    @property
    def core(self) -> Core:
        return self._core

    @property
    def index(self) -> int:
        return self._index

    def submit(self, event: Event, now_s: float) -> None:
        """Pass an external event (Submit, Abort, Reconfigure) to the core."""
        self._apply(self._core.handle(event, now_s), now_s)

    def withdraw(self, request_ids: Sequence[int], now_s: float) -> None:
        """Remove requests that move to another engine; the record does not count them as ended."""
        for request_id in request_ids:
            instructions = self._core.handle(Abort(request_id), now_s)
            self.num_live -= 1
            self._apply([i for i in instructions if type(i) is not Emit], now_s)

    def advance(self) -> float:
        """Deliver the finished step or the tick due at `next_s`; returns that time."""
        now_s = self.next_s
        if self._in_flight and self._in_flight[0][0] <= now_s:
            _, result, slices = self._in_flight.popleft()
            if self.on_answer is not None:
                self.on_answer(slices, now_s)
            self._apply(self._core.handle(StepDone(result), now_s), now_s)
        else:
            self.wake_s = INFINITY
            self._apply(self._core.handle(Tick(), now_s), now_s)
        return now_s

    # ---- instructions -----------------------------------------------------------------

    def _apply(self, instructions: Sequence[Instruction], now_s: float) -> None:
        kv_moves: list[KVMove] = []
        for instruction in instructions:
            kind = type(instruction)
            if kind is Execute:
                self._execute(instruction.plan, now_s)  # type: ignore[union-attr]
            elif kind is Emit:
                self.num_live -= self.on_emit(instruction.rows, now_s)  # type: ignore[union-attr]
            elif kind is Refuse:
                self.on_refuse(instruction, now_s)  # type: ignore[arg-type]
                self.num_live -= 1
            elif kind is WakeAt:
                # An earlier wake-up requested by the core stays valid.
                self.wake_s = min(self.wake_s, instruction.time_s)  # type: ignore[union-attr]
            elif isinstance(instruction, KVMove):
                kv_moves.append(instruction)
        in_flight = self._in_flight
        done_s = in_flight[0][0] if in_flight else INFINITY
        self.next_s = done_s if done_s <= self.wake_s else max(self.wake_s, now_s)
        for move in kv_moves:  # an answer makes instructions that come after these
            assert self.on_move is not None
            self.on_move(move, now_s)

    def _execute(self, plan: StepPlan, now_s: float) -> None:
        record, model = self._record, self._model
        slices = self.step = plan.slices
        mix = Mix.of(slices, self._window)
        stage_s = model.stage_s(mix)
        if self._jitter:
            stage_s *= self._rng.lognormvariate(0.0, self._jitter)
        if self._ratios is not None:
            stage_s *= self._ratios.draw(mix.prefill_tokens > 0, stage_s, self._rng)
        stages = self._stages
        if len(stages) == 1:
            free_s = stages[0]
            start_s = now_s if now_s > free_s else free_s
            end_s = stages[0] = start_s + stage_s
            times: tuple[tuple[float, float], ...] = ((start_s, end_s),)
            bubble_s = 0.0
        else:
            start_s, end_s, bubble_s, times = self._pass_stages(mix, stage_s, now_s)
        if plan.started:
            for started in plan.started:
                self.on_start(started.request_id, start_s)
        token_of, num_drafts = self._token_of, 0
        further: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if plan.drafts:
            tokens, further, num_drafts = self._with_drafts(plan)
        elif token_of is None:
            tokens = tuple([(piece[0], 0) for piece in slices if piece[3]])
        else:
            tokens = tuple([(p[0], token_of(p[0], p[1] + p[2])) for p in slices if p[3]])
        result = StepResult(plan.step_id, tokens, stage_times_s=times, extra_tokens=further)
        self._in_flight.append((end_s + self.host_s, result, slices))
        record.num_steps += 1
        record.busy_s += stage_s * len(stages)
        record.bubble_s += bubble_s
        steps = record.steps
        if steps is not None:
            steps.replica.append(self._index)
            steps.start_s.append(start_s)
            steps.end_s.append(end_s)
            steps.stage_s.append(stage_s)
            steps.bubble_s.append(bubble_s)
            steps.prefill_tokens.append(mix.prefill_tokens - num_drafts)
            steps.decode_tokens.append(mix.num_decodes + num_drafts)

    def _with_drafts(
        self, plan: StepPlan
    ) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, tuple[int, ...]], ...], int]:
        """The sampled tokens, those of accepted drafts, and the tokens of slices with drafts."""
        acceptance, drafts = self._acceptance, dict(plan.drafts)
        token_of = self._token_of or (lambda *_: 0)
        assert acceptance is not None
        tokens, further, num_tokens = [], [], 0
        for request_id, start, count, samples in plan.slices:
            if not samples:
                continue
            num_drafts = len(drafts.get(request_id, ()))
            first = start + count - num_drafts
            tokens.append((request_id, token_of(request_id, first)))
            if num_drafts:
                num_tokens += count
                right = acceptance.num_right(request_id, first, num_drafts)
                after = [token_of(request_id, first + 1 + k) for k in range(right)]
                further.append((request_id, tuple(after)))
        return tuple(tokens), tuple([f for f in further if f[1]]), num_tokens

    def _pass_stages(
        self, mix: Mix, stage_s: float, now_s: float
    ) -> tuple[float, float, float, tuple[tuple[float, float], ...]]:
        """Pass the pipeline; a stage that waits while work is in flight has a bubble."""
        model, stages = self._model, self._stages
        send_s = model.send_s(mix.num_tokens)
        # Earlier stages lack the output projection.
        early_s = stage_s - model.last_s(mix.num_slices)
        arrives_s = now_s
        bubble_s = 0.0
        times = []
        last = len(stages) - 1
        for stage, free_s in enumerate(stages):
            start_s = arrives_s if arrives_s > free_s else free_s
            if self._in_flight:
                bubble_s += start_s - free_s
            end_s = start_s + (stage_s if stage == last else early_s)
            stages[stage] = end_s
            times.append((start_s, end_s))
            arrives_s = end_s + send_s
        return times[0][0], times[-1][1], bubble_s, tuple(times)


def build_replica(
    deployment: Deployment,
    config: SchedulerConfig,
    record: RunRecord,
    index: int,
    seed: int,
    token_of: TokenOf | None,
) -> Replica:
    """An engine of this deployment, with settings of its own."""
    d = deployment
    config, acceptance = d.drafting(config, seed)
    return Replica(
        build_core(config, cost_model=OnlineCostModel(d.believed or d.model)),
        d.model,
        record,
        index=index,
        jitter=d.jitter,
        ratios=d.ratios,
        seed=seed,
        host_s=d.host_s,
        token_of=token_of,
        acceptance=acceptance,
    )
