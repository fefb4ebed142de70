"""Settings that follow from others."""

from __future__ import annotations

from dataclasses import replace

from actors.scheduling.config import HAND_OVER_STEP_TOKENS, SchedulerConfig


def test_an_engine_whose_streams_leave_has_short_steps() -> None:
    config = SchedulerConfig(num_blocks=64, max_requests=64)
    found = config.handing_over()
    assert (found.hands_over, found.max_step_tokens) == (True, HAND_OVER_STEP_TOKENS)
    # But for limits that stand in its settings.
    assert replace(config, max_step_tokens=128).handing_over().max_step_tokens == 128
    assert replace(config, max_requests=700).handing_over().max_step_tokens == 700
    fixed = replace(config, budget="fixed", token_budget=2048)
    assert fixed.handing_over().max_step_tokens == 2048
