"""How much work a request is, by the cost model."""

from __future__ import annotations

import pytest

from actors.scheduling.cost.model import CostModel
from app.simulate.run.deployment import divided_memory
from app.simulate.run.simulation import scheduler_config
from app.simulate.run.work import Work
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import generate


def test_work_of_a_request_by_hand() -> None:
    work = Work(prompt_s=3.0, output_s=1.0)
    assert work.qps(0, 4) == 1.0
    assert [work.qps(n, 4) for n in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert work.divisions(4) == [3, 2, 1]


def test_work_is_what_full_steps_take() -> None:
    model = CostModel("m", ((1, 0.010), (128, 0.010), (2048, 0.200)), kv_tokens=1_000_000)
    work = Work.of(model, generate(poisson(1.0), fixed_lengths(1024, 32), 10))
    assert work.prompt_s == pytest.approx(0.1)  # half of a step of 2048 tokens
    assert work.output_s == pytest.approx(32 * 0.010 / 128)  # its share of 32 steps of 128


def test_states_take_at_most_half_of_memory() -> None:
    """So that few streams run beside each other, however short."""
    model = CostModel(
        "m", ((1, 0.010), (128, 0.010), (2048, 0.200)), kv_tokens=10_000, state_tokens=500
    )
    assert divided_memory(model, 128) == (10, 5000)
    work = Work.of(model, generate(poisson(1.0), fixed_lengths(16, 32), 10))
    assert work.output_s == pytest.approx(32 * 0.010 / 10)


def test_an_engine_has_no_more_kv_than_its_requests_can_use() -> None:
    """As `EngineConfig.cache_sizes` caps it, or a prefix cache would hold what no engine holds."""
    model = CostModel("roomy", tokens_s=((1, 0.01),), kv_tokens=10**6, max_model_len=1000)
    assert scheduler_config(model, max_requests=8).num_blocks == 8 * 63 + 1
    assert scheduler_config(model, max_requests=8, max_model_len=160).num_blocks == 8 * 10 + 1
    assert scheduler_config(model, max_requests=1000).num_blocks == 10**6 // 16
