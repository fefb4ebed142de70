"""The paper's rule for objectives: so many times a decode step that no prefill disturbs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.plan import StepShape

DECODE_STEPS: Mapping[str, float] = {"strict": 5.0, "relaxed": 25.0}
STREAMS, CONTEXT = 32, 4096  # of the decode step, as far as the engine takes them


def by_rule(config: SchedulerConfig, cost: StepTimePredictor | None) -> SchedulerConfig:
    """`config` with an objective in seconds in place of `tbt_rule`.

    Raises ConfigError where there is no cost model to say how long a decode step takes.
    """
    if config.tbt_rule is None:
        return config
    if cost is None:
        raise ConfigError("tbt_rule", "needs a cost model, and nothing could be measured")
    streams = min(STREAMS, config.max_requests)
    room = config.num_blocks * config.block_size // streams
    context = max(1, min(CONTEXT, config.max_model_len, room))
    step_s = cost.latency_s(StepShape(streams, streams * context))
    return replace(config, tbt_rule=None, tbt_s=DECODE_STEPS[config.tbt_rule] * step_s)
