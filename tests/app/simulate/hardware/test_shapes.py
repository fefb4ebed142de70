"""Dimensions of models: weights by operator group, experts that a step touches."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from app.simulate.hardware import shapes
from app.simulate.hardware.shapes import MODELS, Experts, ModelShape, experts_touched

MIXTURE = replace(MODELS["mistral-7b"], experts=Experts(8, 2, 14336, 32))


def test_experts_that_a_step_touches() -> None:
    assert experts_touched(8, 2, 1) == pytest.approx(2)
    assert experts_touched(8, 2, 2) == pytest.approx(2 + 2 * (1 - 2 / 8))
    assert experts_touched(8, 8, 3) == 8
    assert experts_touched(32, 8, 1000) == pytest.approx(32)
    assert doctest.testmod(shapes).failed == 0


def test_weights_of_a_mixture() -> None:
    """Mixtral 8x7B: 46.7 billion parameters, of which a token passes 12.9 billion."""
    assert MIXTURE.weight_bytes / 2 == pytest.approx(46.7e9, rel=0.002)
    one = sum(MIXTURE.mlp(14336).values())
    passed = MIXTURE.weight_bytes / 2 - 32 * 6 * one
    assert passed == pytest.approx(12.9e9, rel=0.002)


def test_layers_with_and_without_experts_and_shared_experts() -> None:
    hidden, inner, width, shared = 64, 512, 32, 96
    experts = Experts(16, 4, width, 3, shared)
    shape = ModelShape("it", 4, hidden, inner, 4, 2, 16, 100, "", experts=experts)
    attention = hidden * (4 + 2 * 2) * 16 + 4 * 16 * hidden
    plain = attention + 3 * hidden * inner
    mixed = attention + 3 * hidden * (shared + 16 * width) + hidden * 16
    assert shape.weight_bytes == 2 * (plain + 3 * mixed + 2 * 100 * hidden)
