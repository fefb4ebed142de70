"""What an engine's settings become once its stages are loaded."""

from __future__ import annotations

from dataclasses import replace

from actors.engine.config import EngineConfig
from actors.scheduling.config import SchedulerConfig
from actors.stage.spec import StageSpec


def test_drafts_of_the_default_end_with_a_backend_that_rounds_by_batch() -> None:
    """As where the CPU library does not load and `auto` takes torch."""
    scheduler = SchedulerConfig(num_blocks=1, drafter="auto", max_drafts=4)
    asked = EngineConfig(StageSpec("somewhere"), scheduler)
    default = replace(asked, drafts_if_exact=True)
    assert default.scheduler_on("cpu") == scheduler
    for backend in ("torch", "triton", "flash_attn"):
        plain = default.scheduler_on(backend)
        plain.check()
        assert plain == replace(scheduler, drafter="none", max_drafts=None)
        assert asked.scheduler_on(backend) == scheduler
