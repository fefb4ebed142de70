"""Fit a cost model to measured steps by non-negative least squares.

Every coefficient is a time, so none may be negative; this constraint keeps a fit on noisy steps
plausible. Rows are weighted by 1 / time, so a 5 ms decode step counts as much as a 500 ms prefill.
On a busy machine some steps take up to twice as long as others; such rows are weighted down, then
left out (`_robust`). A share of the measurements is held out from the fit, to report its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepShape

Floats = NDArray[np.float64]

HUBER, DISTURBED, ROUNDS = 0.05, 1.25, 16  # see `_robust`
_TOLERANCE = 1e-10  # of a gradient that counts as zero, of the largest
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kind of step and the seconds its slowest stage took (fastest of repeats)."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class FitReport:
    """Prediction errors on held-out measurements."""

    num_fitted: int
    num_held_out: int
    median_error: float  # of |predicted / measured - 1|
    p95_error: float
    max_error: float
    worst: tuple[tuple[str, float, float], ...]  # (step, measured s, predicted s)

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_fitted": self.num_fitted,
            "num_held_out": self.num_held_out,
            "median_error": self.median_error,
            "p95_error": self.p95_error,
            "max_error": self.max_error,
            "worst": [list(w) for w in self.worst],
        }


def nnls(matrix: Floats, target: Floats) -> Floats:
    """min ||matrix x - target|| with x >= 0, by the active-set method of Lawson and Hanson.

    matrix: (rows, columns); target: (rows,). Columns are scaled to unit length internally, because
    terms differ widely in size (a second, a nanosecond per pair).
    """
    rows, columns = matrix.shape
    if target.shape != (rows,):
        raise ValueError(f"target has shape {target.shape}, expected ({rows},)")
    norms = np.linalg.norm(matrix, axis=0)
    used = norms > 0
    scaled = np.where(used, matrix / np.where(used, norms, 1.0), 0.0)
    gram, moment = scaled.T @ scaled, scaled.T @ target
    solution = np.zeros(columns)
    passive = np.zeros(columns, bool)
    for _ in range(10 * columns + 10):
        gradient = moment - gram @ solution
        candidates = (
            ~passive & used & (gradient > _TOLERANCE * max(1.0, float(np.abs(moment).max())))
        )
        if not candidates.any():
            break
        passive[int(np.argmax(np.where(candidates, gradient, -np.inf)))] = True
        while True:
            trial = np.zeros(columns)
            index = np.flatnonzero(passive)
            trial[index] = np.linalg.lstsq(gram[np.ix_(index, index)], moment[index], rcond=None)[0]
            if (trial[index] > 0).all():
                solution = trial
                break
            falling = index[trial[index] <= 0]
            steps = solution[falling] / (solution[falling] - trial[falling])
            solution = solution + float(steps.min()) * (trial - solution)
            passive &= solution > 1e-15
            solution[~passive] = 0.0
            if not passive.any():
                break
    return np.where(used, solution / np.where(used, norms, 1.0), 0.0)


def token_knots(max_tokens: int, tile: int = 1) -> list[int]:
    """Token counts between which step time is taken as linear: powers of two and tile edges.

    More knots would fit noise, and budgets would stop at spurious jumps. Fewer would miss what the
    first tokens of a step add where they read experts of their own.
    """
    knots = {max_tokens}
    n = 1
    while n < max_tokens:
        knots.add(n)
        n *= 2
    if tile > 1:
        for edge in range(tile, min(max_tokens, 8 * tile), tile):
            knots.update((edge, edge + 1))
    return sorted(k for k in knots if k <= max_tokens)


def _met(knots: Sequence[int], mixes: Sequence[Mix]) -> list[int]:
    """The upper knots of intervals with measured steps; the others have no data to fit."""
    met = [knots[0]]
    for knot in knots[1:]:
        if any(met[-1] < mix.num_tokens <= knot for mix in mixes):
            met.append(knot)
    return met


def _design(mixes: Sequence[Mix], knots: Sequence[int], squares: bool) -> Floats:
    """One row per step: a floor, a rise per knot interval, then the attention terms."""
    rows = []
    for mix in mixes:
        tokens = mix.num_tokens
        rises = [
            min(max(tokens - low, 0), high - low) / (high - low) for low, high in pairwise(knots)
        ]
        if tokens > knots[-1] and rises:
            rises[-1] += (tokens - knots[-1]) / (knots[-1] - knots[-2])
        rows.append(
            [
                *(1.0, *rises, mix.num_slices),
                *(mix.num_decodes, mix.decode_kv_tokens),
                *(mix.num_prefills, mix.prefill_kv_tokens),
                *(mix.prefill_pairs, mix.prefill_squares if squares else 0.0),
            ]
        )
    return np.array(rows, np.float64)


def _robust(matrix: Floats) -> Floats:
    """nnls of `matrix` x = 1 that is robust against a minority of disturbed rows.

    Huber's loss first: errors beyond `HUBER` count linearly. Then rows that took more than
    `DISTURBED` times their prediction are left out, because other programs only add time.
    """
    weights = np.ones(len(matrix))
    for number in range(ROUNDS):
        root = np.sqrt(weights)
        solution = nnls(matrix * root[:, None], root)
        fitted = matrix @ solution  # predicted / measured
        if number < ROUNDS // 2:
            weights = np.minimum(1.0, HUBER / np.maximum(np.abs(fitted - 1.0), 1e-12))
        else:
            weights = np.where(fitted * DISTURBED < 1.0, 0.0, 1.0)
    return solution


def fit(
    measurements: Sequence[Measurement],
    base: CostModel,
    *,
    held_out: float = 0.2,
    tile: int = 1,
    seed: int = 0,
    squares: bool = True,
    least: int = 20,
) -> tuple[CostModel, FitReport]:
    """Fit every coefficient of `base`; its name, stages, window and so on are kept.

    squares: also fit a time per squared chunk, which few steps cannot tell from a time per token.

    Raises ValueError with fewer than `least` measurements, too few to fit.
    """
    if len(measurements) < least:
        raise ValueError(f"need at least {least} measured steps, got {len(measurements)}")
    order = np.random.default_rng(seed).permutation(len(measurements))
    num_held = max(3, round(held_out * len(measurements)))
    held = [measurements[i] for i in order[:num_held]]
    fitted = [measurements[i] for i in order[num_held:]]

    window = base.attention_window
    mixes = [Mix.of_shape(m.shape, window) for m in fitted]
    knots = _met(token_knots(max(m.num_tokens for m in mixes), tile), mixes)
    seconds = np.array([m.seconds for m in fitted])
    solution = _robust(_design(mixes, knots, squares) / seconds[:, None])

    heights = np.cumsum(solution[: len(knots)])
    slices, decode, decode_kv, chunk, chunk_kv, pair, square = solution[len(knots) :].tolist()
    model = replace(
        base,
        overhead_s=0.0,
        tokens_s=tuple(zip(knots, heights.tolist(), strict=True)),
        per_request_s=slices,
        decode_slice_s=decode,
        decode_kv_s=decode_kv,
        prefill_slice_s=chunk,
        prefill_kv_s=chunk_kv,
        prefill_pair_s=pair,
        prefill_square_s=square,
        last_stage_s=(),
        tile_tokens=tile,
    )
    model = replace(model, ratio_quantiles=error_quantiles(model, held))
    return model, report(model, held, len(fitted))


def error_quantiles(
    model: CostModel, held: Sequence[Measurement]
) -> tuple[tuple[float, float], ...]:
    """Quantiles of measured / predicted."""
    ratios = np.array([m.seconds / predict(model, m.shape) for m in held])
    return tuple((q, float(np.quantile(ratios, q))) for q in QUANTILES)


def predict(model: CostModel, shape: StepShape) -> float:
    """Seconds of the slowest stage, by the cost model alone."""
    return model.stage_s(Mix.of_shape(shape, model.attention_window))


def report(model: CostModel, held: Sequence[Measurement], num_fitted: int) -> FitReport:
    """Errors of `model` on held-out measurements."""
    rows = [(m, predict(model, m.shape)) for m in held]
    errors = np.array([abs(p / m.seconds - 1.0) for m, p in rows])
    worst = sorted(zip(errors.tolist(), rows, strict=True), key=lambda r: -r[0])[:5]
    return FitReport(
        num_fitted=num_fitted,
        num_held_out=len(held),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
        max_error=float(errors.max()),
        worst=tuple((describe(m.shape), m.seconds, p) for _, (m, p) in worst),
    )


def describe(shape: StepShape) -> str:
    """A step in words, for reports: "32 decodes at 1024 + 512@2048"."""
    parts = []
    if shape.num_decodes:
        parts.append(
            f"{shape.num_decodes} decodes at {shape.decode_context_tokens // shape.num_decodes}"
        )
    parts += [f"{n}@{start}" for start, n in shape.prefills]
    return " + ".join(parts) or "nothing"
