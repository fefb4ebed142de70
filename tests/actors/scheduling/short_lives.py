"""Small configurations and requests: lives short enough to follow by eye."""

from __future__ import annotations

from typing import Any

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.driver import Driver


def config(**changes: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_requests": 8,
        "max_model_len": 64,
        "max_step_tokens": 64,
        "token_budget": 16,
        "lookahead": False,
        "prefix_cache": False,
    }
    return SchedulerConfig(**(settings | changes))


def request(number: int, prompt: int = 4, output: int = 4, **more: Any) -> Request:
    tokens = more.pop("tokens", None) or tuple((number + i) % 7 for i in range(prompt))
    sampling = SamplingParams(output, **more.pop("sampling", {}))
    more.setdefault("arrival_s", float(number))
    return Request(number, tokens, sampling, output=more.pop("done", ()), **more)


def slices(driver: Driver, step: int) -> list[tuple[int, int, int, bool]]:
    return [tuple(part) for part in driver.plans[step].named_slices]
