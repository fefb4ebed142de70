"""Bubbles of a pipeline: a throttled budget makes fewer of them than a fixed one."""

from __future__ import annotations

import pytest

from app.bench.studies.bubbles import simulate_bubbles


@pytest.mark.parametrize("kv_tokens", [None, 40_000])
def test_throttling_shrinks_the_bubbles_of_a_pipeline(kv_tokens: int | None) -> None:
    """Two stages, the paper's 70B deployment, simulated: `legato bench bubbles` in small."""
    fixed = simulate_bubbles(0.6, kv_tokens, "uniform", "fixed", num_requests=60)
    throttled = simulate_bubbles(0.6, kv_tokens, "uniform", "throttled", num_requests=60)
    assert throttled.bubble_share < 0.8 * fixed.bubble_share
    assert throttled.tbt_p99_s <= fixed.tbt_p99_s
    assert throttled.num_preemptions <= fixed.num_preemptions
