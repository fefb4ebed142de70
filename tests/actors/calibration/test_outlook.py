"""The figures that a start prints are those that the cost model and the objective imply."""

from __future__ import annotations

from dataclasses import replace

from actors.calibration.outlook import outlook, within_reach
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel

CONFIG = SchedulerConfig(num_blocks=4096, max_requests=64, max_step_tokens=2048, tbt_s=0.05)
LINEAR = OnlineCostModel(CostModel("linear", tokens_s=((1, 0.001), (2048, 2.048))))  # 1 ms a token


def test_an_objective_allows_what_the_cost_model_says() -> None:
    found = outlook(LINEAR, CONFIG)
    assert found is not None
    assert found["num_tokens"] == 50
    # A step of 5 tokens an output (4 of prompts, 1 decode): 1000 tokens a second, 640 a request.
    assert abs(found["chat_qps"] - 1000 / 640) < 0.01


def test_no_more_requests_are_promised_than_the_kv_cache_holds() -> None:
    rates = []
    floor = OnlineCostModel(CostModel("floor", tokens_s=((1, 0.01), (2048, 0.02))))
    for num_requests in (0, 1, 4):
        found = outlook(floor, replace(CONFIG, num_blocks=num_requests * 40))
        assert found is not None
        rates.append(found["chat_qps"])
    assert rates[0] == 0 < rates[1] < rates[2]


def test_the_stages_of_a_pipeline_share_the_requests() -> None:
    """Of 64, each of two stages has 32 in its step at a time, and ends a step every 10 ms."""
    rates = []
    for num_stages in (1, 2):
        flat = CostModel("flat", tokens_s=((1, 0.01), (2048, 0.01)), num_stages=num_stages)
        for num_requests in (64, 1):
            found = outlook(OnlineCostModel(flat), replace(CONFIG, max_requests=num_requests))
            assert found is not None
            rates.append(found["chat_qps"] * 0.01 * 128)
    assert [round(rate, 9) for rate in rates] == [64, 1, 32, 0.5]


def test_a_window_takes_from_no_prompt_what_lies_before_it() -> None:
    free = CostModel("pairs", ((1, 0.001), (2048, 2.048)), prefill_pair_s=1e-3, attention_window=1)
    found = outlook(OnlineCostModel(free), CONFIG)
    plain = outlook(LINEAR, CONFIG)
    assert found is not None
    assert plain is not None
    assert found["chat_qps"] > 0.45 * plain["chat_qps"]


def test_without_an_objective_or_a_cost_model_there_is_none() -> None:
    assert outlook(LINEAR, replace(CONFIG, tbt_s=None)) is None
    assert outlook(None, CONFIG) is None


def test_an_objective_out_of_reach_becomes_five_decodes() -> None:
    slow = CostModel("slow", tokens_s=((1, 0.4), (2048, 40.0)))
    assert within_reach(slow, CONFIG).tbt_s == 5 * 0.4
    assert within_reach(LINEAR.profile, CONFIG) is CONFIG
