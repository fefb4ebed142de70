"""The cost model of a starting engine: loaded from the cache and checked, or measured.

The first start times a few dozen kinds of steps for 3 to 16 seconds, and caches the fitted model by
model, settings and machine. Later starts check it, and measure again if it is off by too much.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from actors.calibration.cache import CostModelFile
from actors.calibration.measure import (
    Calibration,
    EngineLimits,
    Execute,
    calibrate,
    check,
    reach_of,
)
from actors.calibration.outlook import within_reach
from actors.engine.config import EngineConfig
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.interfaces import StepTimePredictor
from actors.stage.spec import StageInfo

logger = logging.getLogger("legato.calibration")


async def calibrate_at_start(
    config: EngineConfig, scheduler: SchedulerConfig, info: StageInfo, execute: Execute
) -> Calibration | None:
    """None if too little could be measured: the engine then runs without a cost model."""
    limits = EngineLimits(
        max_step_tokens=scheduler.max_step_tokens,
        max_requests=scheduler.max_requests,
        max_model_len=scheduler.max_model_len,
        kv_tokens=scheduler.num_blocks * scheduler.block_size,
        block_size=scheduler.block_size,
        vocab_size=min(info.vocab_size, 256),
    )
    file = CostModelFile.of(config.stage, info)
    memory = _memory_of(scheduler, info)
    known = file.load() if config.is_rebuild else file.load(reach_of(limits))
    if known is not None:
        known = replace(known, **memory)  # that of the engine which measured it may differ
    if known is not None and config.is_rebuild:
        return Calibration(known, 0.0, 0)
    if known is not None:
        checked = await check(execute, limits, known, time.monotonic)
        if checked is not None:
            logger.info("cost model of %s, checked in %.1f s", file.path, checked.seconds)
            return checked
        logger.warning("%s does not fit this machine: measuring anew", file.path)
    base = CostModel(
        file.path.stem,
        tokens_s=((1, 1.0),),
        num_stages=config.stage.num_stages,
        tensor_ranks=config.stage.tensor_ranks,
        attention_window=info.attention_window,
        **memory,
        source="measured at start",
    )
    try:
        measured = await calibrate(execute, limits, base, time.monotonic)
    except ValueError as error:
        logger.warning("no cost model: %s", error)
        return None
    file.save(measured.model, reach_of(limits))
    logger.info("%d kinds of step measured in %.1f s", measured.num_shapes, measured.seconds)
    return measured


def _memory_of(scheduler: SchedulerConfig, info: StageInfo) -> dict[str, Any]:
    """What a cost model tells of the engine's memory: `cache.MEMORY`."""
    kv_tokens, state_tokens, num_states = scheduler.num_blocks * scheduler.block_size, 0, 0
    keeps_states = scheduler.num_saved_states is not None  # else they are a draft model's alone
    if keeps_states and info.kv_block_bytes:
        state_tokens = -(-info.state_bytes * scheduler.block_size // info.kv_block_bytes)
        num_states = scheduler.request_slots or scheduler.max_requests
    return {
        "kv_tokens": kv_tokens + num_states * state_tokens,
        "state_tokens": state_tokens,
        "num_states": num_states,
        "max_model_len": scheduler.max_model_len,
    }


def with_model(
    config: EngineConfig, scheduler: SchedulerConfig, model: CostModel
) -> SchedulerConfig:
    """`scheduler` with this cost model. A first start replaces an objective out of reach; later
    ones keep the one that was followed, or set live, before the scheduler was lost."""
    scheduler = replace(scheduler, cost_model=model.to_dict())
    return scheduler if config.keeps_objective else within_reach(model, scheduler)


def keep_learnt(config: EngineConfig, info: StageInfo, cost: StepTimePredictor | None) -> None:
    """Save the corrections learned while serving, for the next start."""
    if isinstance(cost, OnlineCostModel):
        CostModelFile.of(config.stage, info).save_learnt(cost.learnt())
