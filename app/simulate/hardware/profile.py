"""Measure step times over tokens x context x decodes x chunk, on whatever runs the steps.

The live engine, a bare model runner or a simulator is one callable, `step(shape) -> seconds` of the
slowest stage. The grid is small on purpose: every cost is close to linear between its knots, so
a few hundred steps (minutes, not hours) fix the coefficients and leave a fifth to check them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from actors.calibration.fit import FitReport, Measurement, fit
from actors.calibration.measure import EngineLimits
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepShape

StepRunner = Callable[[StepShape], float]


def grid(limits: EngineLimits, *, seed: int = 0, num_mixed: int = 120) -> list[StepShape]:
    """Steps to measure, in a random order (so that drift of the machine is not a trend).

    Decodes alone by batch and context, chunks alone by size and context, and random mixes, which
    are what the engine will mostly run.
    """
    rng = random.Random(seed)
    shapes: list[StepShape] = []
    batches = _doubling(1, limits.max_requests)
    # Attention is linear in the context: a few points carry it.
    contexts = [c for c in (16, 512, 2048, 8192) if c <= limits.max_model_len - 1]
    shapes += [
        StepShape(batch, batch * context)
        for batch in batches
        for context in contexts
        if batch * context <= limits.kv_tokens
    ]
    longest = min(limits.max_step_tokens, limits.max_model_len)
    chunks = sorted({*_doubling(2, longest), *(3 * n // 2 for n in _doubling(2, longest // 2))})
    shapes += [
        StepShape(prefills=((start, chunk),))
        for chunk in chunks
        for start in (0, *contexts)
        if start + chunk <= min(limits.max_model_len, limits.kv_tokens)
    ]
    shapes += _mixes(limits, rng, num_mixed)
    rng.shuffle(shapes)
    return shapes


def _mixes(limits: EngineLimits, rng: random.Random, count: int) -> Iterator[StepShape]:
    """Hybrid batches: decodes at scattered contexts and one to three chunks."""
    made = 0
    while made < count:
        decodes = int(rng.triangular(0, limits.max_requests, 0.2 * limits.max_requests))
        room = min(limits.max_step_tokens, limits.max_model_len) - decodes
        if room < 4:
            continue
        mean = rng.uniform(0.02, 0.6) * limits.max_model_len
        context = sum(
            max(1, min(int(rng.expovariate(1.0 / mean)), limits.max_model_len - 1))
            for _ in range(decodes)
        )
        prefills: list[tuple[int, int]] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            chunk = int(2 ** rng.uniform(1.5, 12.5))
            chunk = max(2, min(chunk, room))
            start = int(rng.choice((0.0, rng.random() ** 2)) * (limits.max_model_len - chunk))
            prefills.append((start, chunk))
            room -= chunk
            if room < 4:
                break
        held = context + sum(s + n for s, n in prefills)
        if held > limits.kv_tokens or len(prefills) + decodes > limits.max_requests:
            continue
        made += 1
        yield StepShape(decodes, context, tuple(prefills))


def _doubling(first: int, last: int) -> list[int]:
    values = []
    n = first
    while n < last:
        values.append(n)
        n *= 2
    return [*values, last]


def measure(
    step: StepRunner,
    shapes: Sequence[StepShape],
    *,
    repeats: int = 3,
    warm_up: int = 3,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Measurement]:
    """Run every shape `repeats` times and keep the fastest of each, in seconds.

    Other programs only ever add time, so the fastest is nearest to what the step itself costs; what
    they add is learned on line. The first `warm_up` steps are thrown away.
    Repeats of a shape are spread over the whole run, so that a slow minute does not own a corner
    of the grid.
    """
    for shape in list(shapes)[:warm_up]:
        step(shape)
    fastest = [math.inf] * len(shapes)
    total = repeats * len(shapes)
    for number in range(total):
        index = number % len(shapes)
        fastest[index] = min(fastest[index], step(shapes[index]))
        if on_progress is not None:
            on_progress(number + 1, total)
    return [Measurement(s, seconds) for s, seconds in zip(shapes, fastest, strict=True)]


def profile(
    step: StepRunner,
    limits: EngineLimits,
    base: CostModel,
    *,
    tile: int = 1,
    repeats: int = 3,
    num_mixed: int = 120,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[CostModel, FitReport, list[Measurement]]:
    """Measure, fit, and report the error on held-out steps.

    base: carries what is not measured (name, stages, window, KV capacity, swap time).
    """
    shapes = grid(limits, seed=seed, num_mixed=num_mixed)
    measurements = measure(step, shapes, repeats=repeats, on_progress=on_progress)
    model, report = fit(measurements, base, tile=tile, seed=seed)
    return model, report, measurements


# ---- files ----------------------------------------------------------------------------


def write_measurements(measurements: Sequence[Measurement], path: str | Path) -> None:
    """One row per measured step: num_decodes, decode_context_tokens, starts, chunks, seconds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shapes = [m.shape for m in measurements]
    table = pa.table(
        {
            "num_decodes": [s.num_decodes for s in shapes],
            "decode_context_tokens": [s.decode_context_tokens for s in shapes],
            "prefill_starts": [[start for start, _ in s.prefills] for s in shapes],
            "prefill_tokens": [[n for _, n in s.prefills] for s in shapes],
            "seconds": [m.seconds for m in measurements],
        }
    )
    pq.write_table(table, path)
