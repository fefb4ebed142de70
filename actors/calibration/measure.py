"""Measure steps on a pipeline without requests, and fit its cost model.

A few dozen kinds of steps are each run three times at the same positions: the first run warms the
memory, and the faster of the others counts, because other programs only add time. A long step is
run twice, because noise is a small part of it. A first pass covers sizes up to steps longer than
any objective; a second fills in between until time is up. Beyond, the model extends the last slope.
Steps that took longer than the fit predicts are run again, because other processes may have
disturbed them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from actors.calibration.cache import Reach
from actors.calibration.fit import FitReport, Measurement, fit, predict
from actors.calibration.probe import StepNotFinite
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import RequestStart, Slice, SliceRow, StepPlan, StepResult, StepShape
from actors.scheduling.request import SamplingParams

Execute = Callable[[StepPlan], Awaitable[StepResult]]

LEAST_S, MOST_S = 3.0, 16.0  # bounds of the time for measuring
STEPS_OF_TIME = 400  # within the bounds: the time of this many single decodes
LONGEST_STEP_S, LONGEST_IN_DECODES = 0.25, 8.0  # longest step: the larger of time and decodes
LONG_STEP_S = 0.04
ENOUGH = 24  # kinds of steps, if time allows
LEAST = 12  # fewer do not determine the coefficients
CHECKED, CHECK_ROUNDS = 5, 4  # to check a known model, one kind of step in 5 is run, up to 4 times
FIRST_ID = 1 << 48  # above all request ids of engines
SLOW = 1.08  # times the fit's prediction: such a kind of step is run again
ROUNDS, LONGER = 3, 1.5  # rounds of repeats, and the total time limit over that of the first pass
# A known model is rejected if steps take `TRUSTED` times what it predicts, or if it predicts
# `TOO_SLOW` times what one of them takes, as it was then measured beside other work.
TRUSTED, TOO_SLOW = 1.6, 1.35


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Capacity of the engine. max_step_tokens: of one step; kv_tokens: of the KV cache."""

    max_step_tokens: int
    max_requests: int
    max_model_len: int
    kv_tokens: int
    block_size: int = 16
    vocab_size: int = 256


@dataclass(frozen=True, slots=True)
class Calibration:
    model: CostModel
    seconds: float
    num_shapes: int


def shapes(limits: EngineLimits) -> Iterator[StepShape]:
    """Kinds of steps by increasing size: decodes, a chunk, both; early and deep in a context.

    Sizes are powers of four, then the powers of two between them.
    """
    deep = min(2048, limits.max_model_len // 2)
    exponents = range(limits.max_step_tokens.bit_length())
    for size in [1 << e for first in (0, 1) for e in exponents[first::2]]:
        decodes = min(size, limits.max_requests)
        if size == decodes or decodes > size // 2:
            for context in (32, deep):
                yield StepShape(decodes, decodes * context)
        if size >= 2:
            yield StepShape(prefills=((0, size),))
            yield StepShape(prefills=((deep, size),))
        if size >= 16:
            few = max(1, min(decodes, size) // 2)
            yield StepShape(few, few * 256, ((0, size - few),))
            yield StepShape(few, few * deep, ((deep // 2, size - few),))


def fits(shape: StepShape, limits: EngineLimits) -> bool:
    """Whether the engine could run such a step."""
    if shape.num_decodes + len(shape.prefills) > limits.max_requests:
        return False
    ends = [start + num_tokens for start, num_tokens in shape.prefills]
    if shape.num_decodes:
        ends += [shape.decode_context_tokens // shape.num_decodes] * shape.num_decodes
    num_blocks = sum(-(-(end + 1) // limits.block_size) for end in ends)
    return (
        max(ends) < limits.max_model_len
        and num_blocks * limits.block_size <= limits.kv_tokens
        and shape.num_tokens <= limits.max_step_tokens
    )


def reach_of(limits: EngineLimits) -> Reach:
    """How far the steps that a calibration measures reach: the KV cache bounds them, too."""
    measured = [shape for shape in shapes(limits) if fits(shape, limits)]
    return Reach(
        max((shape.num_tokens for shape in measured), default=0),
        max((shape.decode_context_tokens for shape in measured), default=0),
    )


async def calibrate(
    execute: Execute,
    limits: EngineLimits,
    base: CostModel,
    clock: Callable[[], float],
) -> Calibration:
    """Measure and fit. base: the parts not measured (name, stages, window, KV capacity).

    execute: runs a plan and returns its answer with stage times.
    Raises ValueError if too few steps could be measured.
    """
    begin_s = clock()
    runner = _Runner(execute, limits)
    limit_s, longest_s = None, LONGEST_STEP_S
    measured: list[Measurement] = []
    for shape in shapes(limits):
        expected_s = _expected_s(shape, measured)
        if not fits(shape, limits) or expected_s > longest_s:
            continue
        spent_s = clock() - begin_s + 3 * expected_s
        if spent_s > MOST_S or (len(measured) >= ENOUGH and limit_s and spent_s > limit_s):
            break
        try:
            measured.append(Measurement(shape, await runner.time(shape)))
        except StepNotFinite:
            continue
        if limit_s is None:
            decode_s = measured[0].seconds
            limit_s = min(MOST_S, max(LEAST_S, STEPS_OF_TIME * decode_s))
            longest_s = max(LONGEST_STEP_S, LONGEST_IN_DECODES * decode_s)
    if len(measured) < LEAST:
        await runner.leave()  # the engine runs without a cost model
    model, _ = _fit(measured, base)
    until_s = begin_s + min(MOST_S, LONGER * (limit_s or LEAST_S))
    for number in range(ROUNDS):
        # If most steps were disturbed, none stands out; so the first round repeats all short ones.
        short_s = LONG_STEP_S if number == 0 else 0.0
        if not await _run_slow_again(runner, measured, model, short_s, lambda: until_s - clock()):
            break
        model, _ = _fit(measured, base)
    await runner.leave()
    return Calibration(model, clock() - begin_s, len(measured))


def _fit(measured: list[Measurement], base: CostModel) -> tuple[CostModel, FitReport]:
    return fit(measured, base, held_out=0.15, squares=False, least=LEAST)


async def _run_slow_again(
    runner: _Runner,
    measured: list[Measurement],
    model: CostModel,
    short_s: float,
    left_s: Callable[[], float],
) -> bool:
    """Repeat steps slower than `model` predicts or shorter than short_s, while time is left;
    returns whether any was faster."""
    was_faster = False
    for i, (shape, seconds) in enumerate([(m.shape, m.seconds) for m in measured]):
        is_slow = seconds > SLOW * predict(model, shape)
        if not (is_slow or seconds < short_s) or left_s() < 3 * seconds:
            continue
        try:
            again_s = await runner.time(shape)
        except StepNotFinite:  # other token ids may overflow where the first did not
            continue
        if again_s < seconds:
            measured[i] = Measurement(shape, again_s)
            was_faster = True
    return was_faster


def _expected_s(shape: StepShape, measured: list[Measurement]) -> float:
    """Upper bound of a step's time: time grows no faster than tokens. 0.0 before the first step."""
    sizes = [(m.seconds, max(1.0, shape.num_tokens / m.shape.num_tokens)) for m in measured]
    return min((seconds * growth for seconds, growth in sizes if seconds), default=0.0)


async def check(
    execute: Execute, limits: EngineLimits, known: CostModel, clock: Callable[[], float]
) -> Calibration | None:
    """Check a known cost model with a few steps; None if it does not fit this machine.

    Slow steps are run again, because other processes may disturb them for a while; none makes steps
    fast."""
    begin_s, runner = clock(), _Runner(execute, limits)
    few = [shape for shape in shapes(limits) if fits(shape, limits)][: 4 * CHECKED : CHECKED]
    fastest: dict[StepShape, float] = {}
    ratio = least = 1.0
    for _ in range(CHECK_ROUNDS):
        for shape in few:
            with suppress(StepNotFinite):
                seconds = await runner.time(shape)
                fastest[shape] = min(seconds, fastest.get(shape, seconds))
        ratios = sorted(seconds / predict(known, shape) for shape, seconds in fastest.items())
        ratio, least = (ratios[len(ratios) // 2], ratios[0]) if ratios else (1.0, 1.0)
        if ratio < TRUSTED:
            break
    await runner.leave()
    if ratio >= TRUSTED or least <= 1 / TOO_SLOW:
        return None
    return Calibration(known, clock() - begin_s, len(fastest))


class _Runner:
    """Runs steps of any shape on empty stages. Uninitialized KV costs the same as real KV."""

    def __init__(self, execute: Execute, limits: EngineLimits) -> None:
        self._execute = execute
        self._limits = limits
        self._step_ids = count()
        self._ids = count(FIRST_ID)
        self._known: tuple[int, ...] = ()  # requests that the stages know

    async def time(self, shape: StepShape) -> float:
        """Seconds of the slowest stage after a warm-up run; the faster of two for a short step."""
        context = shape.decode_context_tokens // max(1, shape.num_decodes)
        parts = [(context - 1, 1)] * shape.num_decodes + list(shape.prefills)
        started = tuple(self._enter(parts))
        slices = tuple(
            Slice(start.request_id, begin, num_tokens, True)
            for start, (begin, num_tokens) in zip(started, parts, strict=True)
        )
        before, self._known = self._known, tuple(start.request_id for start in started)
        await self._run(slices, before, started)
        seconds = await self._run(slices)
        return seconds if seconds > LONG_STEP_S else min(seconds, await self._run(slices))

    async def leave(self) -> None:
        """Release the last requests on the stages."""
        await self._run((), self._known)

    def _enter(self, parts: list[tuple[int, int]]) -> Iterator[RequestStart]:
        first_block = 0
        for begin, num_tokens in parts:
            end, request_id = begin + num_tokens, next(self._ids)
            last_block = first_block - (-(end + 1) // self._limits.block_size)
            tokens = tuple((7 * i + request_id) % self._limits.vocab_size for i in range(end))
            blocks = tuple(range(first_block, last_block))
            first_block = last_block
            yield RequestStart(request_id, tokens, end, blocks, SamplingParams(1 << 20))

    async def _run(
        self,
        slices: tuple[SliceRow, ...],
        released: tuple[int, ...] = (),
        started: tuple[RequestStart, ...] = (),
    ) -> float:
        plan = StepPlan(next(self._step_ids), slices, released=released, started=started)
        answer = await self._execute(plan)
        return max([end_s - begin_s for begin_s, end_s in answer.stage_times_s])
