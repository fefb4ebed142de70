"""Settings that follow from others."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig


def test_of_an_engine_whose_streams_leave_the_last_chunk_is_short() -> None:
    config = SchedulerConfig(num_blocks=64, max_requests=64)
    found = config.handing_over()
    assert found.hands_over
    assert found.max_step_tokens == config.max_step_tokens
    assert (found.last_chunk, found.most_saved) == (64, 16)
