"""From samples of kernels to figures."""

from __future__ import annotations

import pytest

from app.bench.ceilings import Ceilings
from app.bench.kernels.linear import MODELS, own_cases, whole_model
from app.bench.kernels.timing import KernelCase, figures_of, low_quantile, measure_cases

CEILINGS = Ceilings(bandwidth_gb_s=10.0, peak_gflop_s=100.0)


def case(layer: str, num_bytes: float, samples_s: list[float], per_model: int = 1) -> KernelCase:
    labels = {"layer": layer, "weights": "bf16", "num_rows": 1}
    return KernelCase(labels, num_bytes, 0.0, list, per_model, samples_s)


def test_a_figure_is_a_low_quantile_against_its_limit() -> None:
    samples_s = [0.002 + 0.001 * n for n in range(20)]  # two of twenty lie below the quantile
    assert low_quantile(samples_s) == 0.004
    figures = figures_of(case("qkv", 2e7, samples_s), CEILINGS)
    assert figures.time_us == pytest.approx(4000.0)
    assert figures.gb_s == pytest.approx(5.0)
    assert figures.ratio == pytest.approx(2.0)


def test_a_whole_step_counts_each_layer_as_often_as_it_runs() -> None:
    cases = [case("qkv", 1e7, [0.001], per_model=30), case("lm_head", 4e7, [0.010])]
    [figures] = whole_model(cases, CEILINGS)
    assert figures.labels == {"layer": "all", "weights": "bf16", "num_rows": 1}
    assert figures.time_us == pytest.approx(1e6 * (30 * 0.001 + 0.010))
    assert figures.gb_s == pytest.approx((30 * 1e7 + 4e7) / 0.040 / 1e9)


def test_kernels_and_ceilings_are_sampled_in_turns() -> None:
    cases = own_cases(MODELS["135m"][1], "int8", [1, 3])
    ceilings = measure_cases(cases, rounds=1)
    assert ceilings.bandwidth_gb_s > 0
    assert ceilings.peak_gflop_s > 0
    assert all(len(c.samples_s) > 100 for c in cases), "a weight each, more than a cache holds"
    assert cases[1].flops == 2 * 3 * 576 * 576
