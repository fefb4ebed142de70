"""Measure the steps of a pipeline that serves no request yet, and fit its cost model.

A few dozen kinds of steps, each run three times at the same positions: the first run touches the
memory, the faster of the others counts, as other programs only ever add time (a long step is run
twice: its noise is a small part of it). A first pass spans the sizes up to steps far longer than
any objective could allow, the next fill in between until time is up; the model extends the last
slope. Steps that took longer than the rest explains are run again: while an engine starts, its
neighbours start too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from actors.calibration.fit import FitReport, Measurement, fit, predict
from actors.calibration.probe import StepNotFinite
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult, StepShape
from actors.scheduling.request import SamplingParams

Execute = Callable[[StepPlan], Awaitable[StepResult]]

LEAST_S, MOST_S = 3.0, 16.0  # bounds of the time that measuring may take
STEPS_OF_TIME = 400  # between them: so many decodes of one request
LONGEST_STEP_S, LONGEST_IN_DECODES = 0.25, 8.0  # the larger: a slow engine's objective is longer
LONG_STEP_S = 0.04
ENOUGH = 24  # kinds of steps, where there is time
LEAST = 12  # fewer fix no coefficients
CHECKED = 5  # of a known cost model, one kind of step in so many is run again
FIRST_ID = 1 << 48  # request ids that no engine reaches
SLOW = 1.08  # times what the fit says: such a kind of step is run again
ROUNDS, LONGER = 3, 1.5  # of running them again, and the time until then over the time before
TRUSTED = 1.6  # a known cost model whose steps take more, or less by as much, is of another machine


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can hold. max_step_tokens bounds a step; kv_tokens everything cached."""

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
    """Kinds of steps, ever larger: decodes, a chunk, both; early and deep in a context.

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


async def calibrate(
    execute: Execute,
    limits: EngineLimits,
    base: CostModel,
    clock: Callable[[], float],
) -> Calibration:
    """Measure and fit; `base` carries what is not measured (name, stages, window, KV capacity).

    execute: runs a plan and returns its answer, whose stage times tell how long it took.
    Raises ValueError where too few steps could be measured.
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
    model, _ = _fit(measured, base)
    until_s = begin_s + min(MOST_S, LONGER * (limit_s or LEAST_S))
    for number in range(ROUNDS):
        # A start that disturbs most of them leaves none that stands out: short ones cost little.
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
    """Measure again what took longer than `model` says, or less than short_s, while time is left;
    whether any of it was faster now."""
    was_faster = False
    for i, (shape, seconds) in enumerate([(m.shape, m.seconds) for m in measured]):
        is_slow = seconds > SLOW * predict(model, shape)
        if not (is_slow or seconds < short_s) or left_s() < 3 * seconds:
            continue
        again_s = await runner.time(shape)
        if again_s < seconds:
            measured[i] = Measurement(shape, again_s)
            was_faster = True
    return was_faster


def _expected_s(shape: StepShape, measured: list[Measurement]) -> float:
    """At most what a step takes, as time grows no faster than tokens (0.0 before any was run)."""
    sizes = [(m.seconds, max(1.0, shape.num_tokens / m.shape.num_tokens)) for m in measured]
    return min((seconds * growth for seconds, growth in sizes if seconds), default=0.0)


async def check(
    execute: Execute, limits: EngineLimits, known: CostModel, clock: Callable[[], float]
) -> Calibration | None:
    """Hold a known cost model against a few steps; None where it does not fit this machine."""
    begin_s, runner = clock(), _Runner(execute, limits)
    few = [shape for shape in shapes(limits) if fits(shape, limits)]
    ratios: list[float] = []
    for shape in few[: 4 * CHECKED : CHECKED]:
        with suppress(StepNotFinite):
            ratios.append(await runner.time(shape) / predict(known, shape))
    await runner.leave()
    ratios.sort()
    if ratios and not 1 / TRUSTED < ratios[len(ratios) // 2] < TRUSTED:
        return None
    return Calibration(known, clock() - begin_s, len(ratios))


class _Runner:
    """Runs steps of any shape on empty stages. Their KV is what memory holds: it costs the same."""

    def __init__(self, execute: Execute, limits: EngineLimits) -> None:
        self._execute = execute
        self._limits = limits
        self._step_ids = count()
        self._ids = count(FIRST_ID)
        self._known: tuple[int, ...] = ()  # requests that the stages know

    async def time(self, shape: StepShape) -> float:
        """Seconds of the slowest stage, behind a first run; of a short step the faster of two."""
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
        """The stages forget the last requests."""
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
        slices: tuple[Slice, ...],
        released: tuple[int, ...] = (),
        started: tuple[RequestStart, ...] = (),
    ) -> float:
        plan = StepPlan(next(self._step_ids), slices, released=released, started=started)
        answer = await self._execute(plan)
        return max([end_s - begin_s for begin_s, end_s in answer.stage_times_s])
