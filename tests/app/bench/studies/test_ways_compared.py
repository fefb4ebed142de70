"""What is told of given figures of live and simulated ways, and what is simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.fleet.snapshot import Role
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepShape
from app.bench.load.client import Job, Trace
from app.bench.report import MeasurementError
from app.bench.studies.ways_compared import (
    FIGURES,
    Machine,
    deployment_of,
    live_figures,
    orders,
    simulated_figures,
)
from app.simulate.hardware.interconnect import Interconnect
from app.simulate.hardware.live_log import LiveStep
from app.simulate.run.simulation import scheduler_config

MODEL = CostModel("m", ((1, 0.010), (32, 0.012), (1024, 0.4)), kv_tokens=60_000, max_model_len=4096)


def step(seconds: float, shape: StepShape) -> LiveStep:
    return LiveStep(shape, seconds, 0.0, 0.0, seconds, seconds)


# A machine that is exactly as its model says, but for twice the time of decodes in a split.
STEPS = [step(0.010, StepShape(1, 100, ())), step(0.4, StepShape(0, 0, ((0, 1024),)))]
SLOWER = [replace(STEPS[0], seconds=0.020), STEPS[1]]


def machine() -> Machine:
    config = scheduler_config(MODEL, budget="adaptive", tbt_s=0.1)
    config = replace(config, prefix_cache=True, tier_ranks=1, tier_shared=True)
    steps = {"colocated": STEPS, "split": SLOWER, "flexible": STEPS}
    return Machine(config, MODEL, steps, Interconnect("measured", 1e9, 0.003), 20_000.0)


def by_way(colocated: float, split: float) -> dict[str, dict[str, float]]:
    return {
        way: dict.fromkeys(FIGURES, value)
        for way, value in (("colocated", colocated), ("split", split))
    }


@pytest.mark.parametrize(
    ("live", "simulated", "ttft", "goodput", "verdict"),
    [
        ((1.0, 2.0), (3.0, 9.0), ("colocated", "colocated"), ("split", "split"), "same"),
        ((1.0, 2.0), (9.0, 3.0), ("colocated", "split"), ("split", "colocated"), "opposite"),
        ((1.0, 1.05), (2.0, 2.1), ("even", "even"), ("even", "even"), "same"),
        ((1.0, 1.05), (9.0, 3.0), ("even", "split"), ("even", "colocated"), "near"),
        ((0.0, 0.0), (0.0, 0.0), ("even", "even"), ("even", "even"), "same"),
    ],
)
def test_orders(
    live: tuple[float, float],
    simulated: tuple[float, float],
    ttft: tuple[str, str],
    goodput: tuple[str, str],
    verdict: str,
) -> None:
    found = orders(by_way(*live), by_way(*simulated))
    assert (found["ttft_p50_ms"]["live"], found["ttft_p50_ms"]["simulated"]) == ttft
    assert (found["goodput_qps"]["live"], found["goodput_qps"]["simulated"]) == goodput
    assert {row["verdict"] for row in found.values()} == {verdict}


def test_live_figures_are_means_of_rounds() -> None:
    def served(ttft_s: float) -> list[Trace]:
        return [Trace(Job(0.0, 8, 2), 0.0, [ttft_s, ttft_s + 0.05], 2)]

    found = live_figures([served(0.1), served(0.3)], 100.0, 200.0)
    assert found["ttft_p50_ms"] == pytest.approx(200.0)
    assert found["goodput_qps"] == pytest.approx((1 / 0.15 + 0.0) / 2)
    with pytest.raises(MeasurementError, match="away"):
        live_figures([[Trace(Job(0.0, 8, 2), error="away")]], 100.0, 200.0)


def test_engines_are_simulated_as_they_are_live() -> None:
    """One request of 160 tokens: computed in 62 ms, its KV fetched, the rest in steps."""
    jobs = [Job(0.0, 160, 3)]
    colocated = simulated_figures(jobs, deployment_of("colocated", machine()), 2000.0)
    split = simulated_figures(jobs, deployment_of("split", machine()), 2000.0)
    assert "num_moved" not in colocated
    assert split["num_moved"] == 1.0
    assert colocated["ttft_p50_ms"] == pytest.approx(split["ttft_p50_ms"], rel=0.02)
    assert colocated["tbt_p50_ms"] == pytest.approx(10.0, rel=0.05)
    # Two gaps: the pause (3 ms, the last 64 tokens in 1.3 ms, a step) and a decode.
    assert split["tbt_p50_ms"] == pytest.approx((24.3 + 20.0) / 2, rel=0.01)


def test_engines_of_all_roles_have_the_live_settings() -> None:
    deployment = deployment_of("split", machine())
    assert deployment.num_replicas == 2
    division = deployment.division
    assert division is not None
    assert division.ahead, "KV moves while its prompt is computed"
    for role in (Role.PREFILL, Role.DECODE):
        config = division.config_of(role, deployment.config)
        assert (config.budget, config.tbt_s, config.tier_ranks) == ("adaptive", 0.1, 0)
        assert config.hands_over is (role is Role.PREFILL)
