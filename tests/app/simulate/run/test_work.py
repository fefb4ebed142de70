"""How much work a request is, by the cost model."""

from __future__ import annotations

import pytest

from actors.scheduling.cost.model import CostModel
from app.simulate.run.deployment import divided_memory
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
