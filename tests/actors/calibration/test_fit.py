"""Fitting a cost model to measured steps: least squares without negative costs, jumps of tiles."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.calibration.fit import Measurement, describe, fit, nnls, predict
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepShape

BLANK = CostModel("fitted", ((1, 1.0),))


@given(st.lists(st.floats(0.0, 5.0), min_size=3, max_size=3), st.integers(0, 1000))
def test_nnls_recovers_non_negative_solutions(solution: list[float], seed: int) -> None:
    matrix = np.random.default_rng(seed).uniform(0.1, 1.0, (12, 3)) * (1.0, 1e3, 1e-6)
    found = nnls(matrix, matrix @ (np.array(solution) / (1.0, 1e3, 1e-6)))
    assert found * (1.0, 1e3, 1e-6) == pytest.approx(solution, abs=1e-5)


@given(st.integers(0, 1000))
def test_nnls_is_optimal(seed: int) -> None:
    """At the optimum no allowed direction improves (Karush-Kuhn-Tucker)."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(15, 5)), rng.normal(size=15)
    x = nnls(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert (x >= 0).all()
    assert (gradient >= -1e-7).all()
    assert np.abs(gradient[x > 1e-9]).max(initial=0.0) < 1e-7


def test_tile_jumps_are_fitted_where_they_are() -> None:
    tiled = CostModel("t", ((1, 0.01), (256, 0.012), (257, 0.02), (512, 0.022), (513, 0.03)))
    rng = random.Random(1)
    shapes = [StepShape(prefills=((0, rng.randint(2, 600)),)) for _ in range(400)]
    model, _ = fit([Measurement(s, predict(tiled, s)) for s in shapes], BLANK, tile=256)
    for tokens in (255, 256, 257, 258, 511, 513):
        shape = StepShape(prefills=((0, tokens),))
        assert predict(model, shape) == pytest.approx(predict(tiled, shape), rel=0.08)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        fit([Measurement(StepShape(1, 1), 1.0)] * 5, BLANK)


def test_steps_in_words() -> None:
    assert describe(StepShape(2, 20, ((5, 7),))) == "2 decodes at 10 + 7@5"
    assert describe(StepShape()) == "nothing"
