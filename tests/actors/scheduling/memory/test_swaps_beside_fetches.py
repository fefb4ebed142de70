"""KV that is to be copied to the host stays in blocks that are free already: no fetch may fill them
before the copy. `Driver` compares each fetch with the plans under way."""

from __future__ import annotations

import random

import pytest

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import TierHolds
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.driver import Driver

COSTS = {
    "name": "toy", "tokens_s": [[1, 0.010], [64, 0.042]], "per_request_s": 0.0001,
    "swap_block_s": 0.0001,
}  # fmt: skip
PROMPTS = [tuple((i * 7 + k) % 10 for i in range(24)) for k in range(6)]


@pytest.mark.parametrize("policy", ["sarathi", "mlfq"])
def test_a_fetch_fills_no_block_that_a_plan_has_yet_to_copy(policy: str) -> None:
    num_swaps = num_fetched = 0
    for seed in range(12):
        chance = random.Random(seed)
        config = SchedulerConfig(
            num_blocks=16, block_size=4, max_requests=6, max_model_len=44, token_budget=16,
            tier_ranks=1, tier_shared=True, num_host_blocks=60, swap="always", cost_model=COSTS,
            watermark=0.0, policy=policy, order="priority" if policy == "sarathi" else "auto",
        )  # fmt: skip
        before = Driver(config)
        for number, prompt in enumerate(PROMPTS):
            before.submit(Request(number + 1, prompt, SamplingParams(2), 0.0))
        before.drain()
        driver = Driver(config)
        driver.stages.stores = before.stages.stores
        driver.send(TierHolds(driver.stages.stores.restart()))
        _live(driver, chance)
        num_swaps += driver.core.requests.running.swap.num_swaps
        assert driver.core.tier is not None
        num_fetched += driver.core.tier.num_fetched_blocks
    assert num_swaps > 20
    assert num_fetched > 20


def _live(driver: Driver, chance: random.Random) -> None:
    """Requests of known and of new prompts, until all have ended."""
    number = 0
    for _ in range(300):
        what = chance.random()
        if what < 0.25 and number < 40:
            number += 1
            known = chance.choice(PROMPTS)[: chance.choice([12, 16, 24])]
            fresh = tuple(chance.randrange(10) for _ in range(chance.choice([5, 9, 13])))
            sampling = SamplingParams(chance.choice([4, 18]))
            priority = chance.choice([0, 0, 1, 2, -1])
            prompt = chance.choice([known, fresh])
            driver.submit(Request(number, prompt, sampling, driver.now_s, priority=priority))
        elif what < 0.5 and driver.moves:
            driver.answer_move(chance.randrange(len(driver.moves)))
        elif driver.outstanding:
            driver.answer()
    driver.drain()
    driver.check_everyone_finished()
