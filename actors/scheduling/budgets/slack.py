"""The time that the next step may take, by due tokens and what is in flight.

A deadline schedule (token k of a stream is due k objectives after the first) lets early tokens pay
for later ones. Without a limit a stream far ahead could be stalled for seconds, which the objective
forbids; so no gap may exceed `smoothness` objectives. At smoothness 1 every gap keeps the
objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel, RecentQuantile
from actors.scheduling.interfaces import EngineView, RequestView, StepView
from actors.scheduling.plan import StepShape

NO_STEP = -2  # the `step_id` of no request, not even of one that has had no step
SENT = 16  # stages usually send each other one part in so many of the longest step
OUTSIDE_SHARE = 0.1  # of the objective: more time outside the stages than this is not planned for
INITIAL_SHARE, LEAST_SHARE, MOST_SHARE = 0.9, 0.7, 0.95  # of `KeptShare`
IN_A_ROW, CALM, RECOVERY = 16, 64, 8  # see `KeptShare.forgives`: steps, and times as fast

Followers = list[tuple[float, float]]  # when such a step is due, and its stage seconds


@dataclass(slots=True)
class Slack:
    """The time that running decodes leave for a step.

    tbt_s: the deployment's objective; a request's own takes precedence; None: no objective.
    smoothness: longest gap allowed, in objectives.
    tightest_s: the tightest objective of the decodes at the last call.
    """

    cost: OnlineCostModel
    tbt_s: float | None
    max_step_tokens: int
    smoothness: float = 1.0
    tightest_s: float = math.inf
    clock: PipelineClock = field(init=False)
    _send_s: float = field(init=False)  # to the next stage, of a step of usual size
    _due: dict[int, tuple[float, float]] = field(default_factory=dict)  # id: (last token, due)
    # Decodes for which this step has no place, and when the first of their tokens is due
    _left_out: Mix = field(default_factory=Mix)
    _left_out_due_s: float = math.inf
    _saved: dict[int, list[float]] = field(default_factory=dict)  # see `PipelineClock.followers`

    def __post_init__(self) -> None:
        self.clock = PipelineClock(self.cost)
        self._send_s = self.cost.profile.send_s(self.max_step_tokens // SENT)

    def limit_s(self, shape: StepShape, engine: EngineView) -> float:
        """Seconds each stage may spend on this step; infinite if no decode has an objective.

        Call once per planning."""
        clock, default_s, send_s = self.clock, self.tbt_s, self._send_s
        clock.sync(engine)
        # The decodes already in this step have the newest step of all.
        steps = [view.step_id for view in engine.decoding] if shape.num_decode_tokens else ()
        due_s, ours_tbt_s, others_tbt_s = self._due_s(engine, max(steps, default=NO_STEP))
        self.tightest_s = min(ours_tbt_s, others_tbt_s)
        if self.tightest_s == math.inf and default_s is not None:
            self.tightest_s = default_s
        limit_s = clock.room_s(due_s, send_s) if due_s < math.inf else math.inf
        if others_tbt_s < math.inf:
            followers = clock.followers(others_tbt_s, self._saved)
            if self._left_out.num_slices:  # these come before
                followers.insert(0, (self._left_out_due_s, clock.stage_s(self._left_out)))
            limit_s = min(limit_s, clock.room_before_others_s(followers, send_s))
        return limit_s

    def _due_s(self, engine: EngineView, ours: int) -> tuple[float, float, float]:
        """When the first token of step `ours` is due; the tightest objectives in and beside it."""
        # Passes all decodes once per iteration: no calls for the usual one.
        clock, smooth, default_s = self.clock, self.smoothness, self.tbt_s
        busy_s = max(next(reversed(clock.ends.values()), 0.0), engine.now_s)
        seen: dict[int, tuple[float, float]] = {}
        self._left_out, self._left_out_due_s, self._saved = Mix(), math.inf, {}
        due_s = ours_tbt_s = others_tbt_s = math.inf
        for view in engine.decoding:
            tbt_s = view.request.objective.tbt_s or default_s
            if tbt_s is None:
                continue
            last_s = view.last_token_s
            if view.step_id != ours:
                if tbt_s < others_tbt_s:
                    others_tbt_s = tbt_s
                if last_s is None:
                    continue
                if view.num_computed_tokens < view.num_tokens:  # nor in flight
                    self._leave_out(view, self._banked_s(view, last_s, tbt_s, seen), engine.now_s)
                elif smooth != 1.0:
                    self._note_saved(view, self._banked_s(view, last_s, tbt_s, seen), tbt_s)
                continue
            if tbt_s < ours_tbt_s:
                ours_tbt_s = tbt_s
            # With lookahead a token of it may still be in flight; this one follows it.
            pending = view.num_computed_tokens > view.num_tokens or last_s is None
            if smooth == 1.0 or last_s is None:
                next_s = (busy_s if pending or last_s is None else last_s) + tbt_s
            else:
                next_s = self._banked_s(view, last_s, tbt_s, seen)
                if pending:
                    next_s = due_after(next_s, busy_s, tbt_s, smooth)
            if next_s < due_s:
                due_s = next_s
        self._due = seen
        return due_s, ours_tbt_s, others_tbt_s

    def _note_saved(self, view: RequestView, due_s: float, tbt_s: float) -> None:
        """Its token, due then, is in flight; the next one may use what this one saves."""
        if (end_s := self.clock.ends.get(view.step_id)) is not None:
            next_s = due_after(due_s, end_s, tbt_s, self.smoothness)
            self._saved.setdefault(view.step_id, []).append(next_s)

    def _leave_out(self, view: RequestView, due_s: float, now_s: float) -> None:
        """Its token comes after this step. One late anyway, for lack of memory, shortens none."""
        if due_s > now_s:
            first, window = view.num_computed_tokens, self.cost.profile.attention_window
            self._left_out.add(first, view.num_tokens - first, window)
            self._left_out_due_s = min(self._left_out_due_s, due_s)

    def _banked_s(
        self, view: RequestView, last_s: float, tbt_s: float, seen: dict[int, tuple[float, float]]
    ) -> float:
        """Due time of a stream's next token, given how early its tokens have been."""
        entry = self._due.get(view.request_id)
        if entry is None:
            entry = (last_s, last_s + tbt_s)
        elif entry[0] != last_s:
            entry = (last_s, due_after(entry[1], last_s, tbt_s, self.smoothness))
        seen[view.request_id] = entry
        return entry[1]


def due_after(due_s: float, now_s: float, tbt_s: float, smoothness: float) -> float:
    """When a stream's next token is due; the last was due at `due_s` and left at `now_s`.

    Never later than smoothness * tbt_s from now; never earlier than tbt_s from now unless this
    token was late; then the schedule restarts from it, so that a stall is not made up for.
    """
    promised = (due_s if due_s > now_s else now_s) + tbt_s
    bound = now_s + smoothness * tbt_s
    return promised if promised < bound else bound


@dataclass(slots=True)
class KeptShare:
    """The share of an objective to plan for, so that at most `allowed` of the steps miss it.

    Predictions do not cover rare delays (another process on the core, a page fault) or their sum. A
    miss lowers the share by `rate`; steps that keep the objective raise it so slowly that one miss
    in 1 / `allowed` steps leaves it unchanged. It starts below one, and takes about seven hundred
    steps without a miss to rise by a tenth (at an `allowed` of 0.0075).

    forgives: a delay that no share would have covered lowers nothing; of misses within `IN_A_ROW`
    steps one counts; below the first share it rises faster after `CALM` steps without a miss.
    One bad second, in which another program took the cores, otherwise halves the prefill of the
    next minutes. And it rises to `MOST_SHARE` only: beyond, steps hardly become more efficient, and
    the first one that is slower than any lately misses the objective of every stream.
    """

    allowed: float
    forgives: bool = False
    rate: float = 0.02
    value: float = INITIAL_SHARE
    least: float = LEAST_SHARE
    _num_since_counted: int = IN_A_ROW  # steps since a miss that counted
    _num_calm: int = 0  # steps since any miss
    _first: float = field(init=False)

    def __post_init__(self) -> None:
        self._first = self.value
        self.least = min(self.least, LEAST_SHARE / INITIAL_SHARE * self.value)

    def note(self, kept: bool, taken: float) -> None:
        """taken: the time between tokens, as a share of what was allowed."""
        self._num_since_counted += 1
        self._num_calm = self._num_calm + 1 if kept else 0
        if kept:
            rise = self.rate * self.allowed
            if self.forgives and self.value < self._first and self._num_calm > CALM:
                rise *= RECOVERY
            most = MOST_SHARE if self.forgives else 1.0
            self.value = min(most, self.value * (1.0 + rise))
        elif not self.forgives or self._counts(taken):
            self._num_since_counted = 0
            self.value = max(self.least, self.value * (1.0 - self.rate))

    def for_queue(self, num_waiting: int) -> float:
        """The share to plan for. What was gained beyond the first one, by missing now and then, is
        for prompts that wait: a lone one ends a little later instead (`forgives`)."""
        if self.forgives and not num_waiting:
            return min(self.value, self._first)
        return self.value

    def _counts(self, taken: float) -> bool:
        return self._num_since_counted > IN_A_ROW and taken * self.least <= self.value


class TimeOutside:
    """The time of an answer beyond its step (scheduling, transport, wake-up), `seconds` at most.

    It stays zero with several stages, whose overlap hides it.
    """

    def __init__(self, cost: OnlineCostModel) -> None:
        self.seconds = 0.0  # the learned quantile of what was measured
        self._recent = RecentQuantile(cost.quantile, max(cost.memory, 1), (0.0,))
        self._is_hidden = cost.profile.num_stages > 1
        self._answered: list[tuple[StepShape, float]] = []  # since the last planning: two at most
        self._planned_at_s: float | None = None  # when that was

    def answered(self, shape: StepShape, duration_s: float) -> None:
        del self._answered[:-1]  # not every policy asks for a budget
        self._answered.append((shape, duration_s))

    def planning(self, engine: EngineView, tbt_s: float) -> tuple[StepShape, float] | None:
        """Call once per planning. Returns the step that alone was answered since the last call, and
        the seconds since then; None: it is unknown when that step began."""
        answered, planned_at_s = self._answered, self._planned_at_s
        self._answered, self._planned_at_s = [], engine.now_s
        # A single one began at the last call, when that before it was answered or nothing ran.
        if len(answered) != 1 or self._is_hidden or not (engine.decoding or engine.prefilling):
            return None
        if planned_at_s is None:  # the budget was changed meanwhile
            return None
        ((shape, duration_s),), gap_s = answered, engine.now_s - planned_at_s
        self._recent.add(min(max(0.0, gap_s - duration_s), OUTSIDE_SHARE * tbt_s))
        self.seconds = self._recent.value
        return shape, gap_s

    @property
    def median_s(self) -> float:
        return self._recent.at(0.5)


class PipelineClock:
    """When each stage will be free, by the predicted times of the steps in flight.

    Stage k starts a micro-batch when it has arrived and its predecessor has left. Call
    `sync` once per planning; `free_s` and `ends` then hold.

    free_s: when each stage has done the steps in flight (absolute; for stage 0 at least now).
    ends: when each step in flight, by its id and oldest first, ends on the last stage.
    """

    def __init__(self, cost: OnlineCostModel) -> None:
        self._cost = cost
        self._known: list[tuple[StepView, list[float], float]] = []
        self._base_s = [0.0] * cost.profile.num_stages
        self.free_s = list(self._base_s)
        self.ends: dict[int, float] = {}

    def sync(self, engine: EngineView) -> None:
        """Drop answered steps, and add those planned since the last call."""
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
        self.ends = {step.plan.step_id: max(frees[-1], now_s) for step, frees, _ in known}

    def _place(self, step: StepView) -> tuple[StepView, list[float], float]:
        profile, shape = self._cost.profile, step.shape
        mix = Mix.of_shape(shape, profile.attention_window)
        stage_s = self.stage_s(mix) + step.plan.adapter_load_s
        before = self._known[-1][1] if self._known else self._base_s
        arrives_s, frees = step.planned_at_s, []
        send_s = profile.send_s(mix.num_tokens)
        for free_s in before:
            end_s = max(arrives_s, free_s) + stage_s
            frees.append(end_s)
            arrives_s = end_s + send_s
        # A prompt that ends in this step decodes in the next.
        alone = StepShape(mix.num_slices, mix.decode_kv_tokens + mix.prefill_kv_tokens)
        return step, frees, self.stage_s(Mix.of_shape(alone, profile.attention_window))

    def stage_s(self, mix: Mix) -> float:
        return self._cost.profile.stage_s(mix) * self._cost.ratio(mix)

    def followers(self, tbt_s: float, saved: Mapping[int, list[float]]) -> Followers:
        """Each step in flight is followed by one of its decodes, after this one, in order.

        saved: when these are due, of streams that may have saved time; others are within tbt_s."""
        followers = []
        for (step, _, alone_s), end_s in zip(self._known, self.ends.values(), strict=True):
            dues_s = saved.get(step.plan.step_id, [])
            if len(dues_s) < step.shape.num_decodes + len(step.shape.prefills):
                dues_s = [*dues_s, end_s + tbt_s]
            followers.append((min(dues_s, default=math.inf), alone_s))
        return followers

    def room_s(self, due_s: float, send_s: float) -> float:
        """Longest stage time of a step planned now whose last stage must end by due_s."""
        n, stages = len(self.free_s), enumerate(self.free_s)
        return min((due_s - send_s * (n - 1 - k) - free_s) / (n - k) for k, free_s in stages)

    def room_before_others_s(self, followers: Followers, send_s: float) -> float:
        """Longest stage time with which these steps, in order after this one, end when due."""
        room_s, alone_sum_s, n = math.inf, 0.0, len(self.free_s)
        for due_s, alone_s in followers:
            alone_sum_s += alone_s
            # After this step at the first stage, and after it at the last.
            first_s = due_s - alone_sum_s - (n - 1) * (alone_s + send_s) - self.free_s[0]
            room_s = min(room_s, first_s, self.room_s(due_s - alone_sum_s, send_s))
        return room_s
