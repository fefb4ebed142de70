"""Capacity that a cost model predicts, for the log of an engine's start."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.interfaces import StepTimePredictor

logger = logging.getLogger("legato.calibration")

CHAT_PROMPT, CHAT_OUTPUT = 512, 128  # tokens of a chat request
STREAMS = 16
ROOM, STRICT = 1.25, 5.0  # see `within_reach`


def within_reach(model: CostModel, config: SchedulerConfig) -> SchedulerConfig:
    """`config`, its objective replaced if a single decode could not keep it with room to spare.

    With less than a quarter of a decode to spare, no prompt could be prefilled beside a stream. The
    replacement is the paper's strict objective: five decodes.
    """
    least_s = model.latency_s(Mix(1, CHAT_PROMPT))
    if config.tbt_s is None or config.tbt_s >= ROOM * least_s:
        return config
    logger.warning(
        "slo.tbt_ms: a lone decode takes %.1f ms, so %.1f takes the place of %.1f",
        1e3 * least_s, 1e3 * STRICT * least_s, 1e3 * config.tbt_s,
    )  # fmt: skip
    return replace(config, tbt_s=STRICT * least_s)


def outlook(cost: StepTimePredictor | None, config: SchedulerConfig) -> dict[str, float] | None:
    """Capacity under the objective of `config`; None without an objective or a cost model.

    num_tokens: of an iteration beside `STREAMS` decodes. chat_qps: requests per second that keep
    every iteration within the objective and have room in the KV cache, all stages busy.
    """
    if config.tbt_s is None or not isinstance(cost, OnlineCostModel):
        return None
    model = cost.profile
    limit_s = model.stage_share_s(config.tbt_s, config.max_step_tokens)
    streams = min(STREAMS, config.max_requests)
    beside = Mix(streams, streams * CHAT_PROMPT)
    most = config.max_step_tokens - streams
    num_tokens = streams + model.largest_chunk(beside, 0, most, limit_s)
    chat_qps = _chat_qps(model, config, limit_s)
    return {"tbt_s": config.tbt_s, "num_tokens": num_tokens, "chat_qps": chat_qps}


def _chat_qps(model: CostModel, config: SchedulerConfig, limit_s: float) -> float:
    """In the steady state requests start as fast as they end: a step of d decodes prefills
    d * prompt / output tokens. Each stage has a step at a time, and a request is in one of them."""
    best = 0.0
    room = config.num_blocks * config.block_size // (CHAT_PROMPT + CHAT_OUTPUT)
    each = min(config.max_requests, room) / model.num_stages  # requests of a step
    for num_decodes in range(1, math.ceil(each) + 1):
        mix = Mix(num_decodes, num_decodes * (CHAT_PROMPT + CHAT_OUTPUT // 2))
        num_tokens = max(2, num_decodes * CHAT_PROMPT // CHAT_OUTPUT)
        mix.add(0, num_tokens, model.attention_window)
        step_s = model.stage_s(mix)
        if step_s > limit_s:
            break
        best = max(best, min(num_decodes, each) / CHAT_OUTPUT / step_s)
    return best
