"""The adaptive budget, simulated: it keeps its objective."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from actors.scheduling.build import build_core
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Submit
from actors.scheduling.request import Objective, Request, SamplingParams
from app.simulate.hardware.step_ratios import StepRatios
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import Replica
from app.simulate.run.simulation import Deployment, SimulatedRun, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import Workload, generate
from tests.actors.scheduling.budgets.tiled_model import TILED

pytestmark = pytest.mark.heavy


def run(workload: Workload, model: CostModel = TILED, **settings: object) -> SimulatedRun:
    """Simulate with an objective of 50 ms unless told otherwise."""
    jitter = float(str(settings.pop("jitter", 0.0)))
    settings.setdefault("tbt_s", 0.05)
    config = scheduler_config(model, max_requests=32, **settings)  # type: ignore[arg-type]
    return simulate(workload, Deployment(config, model, jitter=jitter))


def chat(qps: float, num_requests: int = 150, prompt: int = 900, output: int = 60) -> Workload:
    return generate(poisson(qps), fixed_lengths(prompt, output), num_requests)


@pytest.mark.parametrize("qps", [1.0, 3.0, 6.0, 9.0])
def test_adaptive_keeps_every_gap_at_every_load(qps: float) -> None:
    result = run(chat(qps), budget="adaptive")
    assert np.array(result.record.gaps_s).max() <= 0.05


@pytest.mark.parametrize("tbt_s", [0.02, 0.1, 0.3])
def test_and_for_every_objective_without_tuning(tbt_s: float) -> None:
    result = run(chat(6.0), budget="adaptive", tbt_s=tbt_s)
    assert np.array(result.record.gaps_s).max() <= tbt_s


def test_a_fixed_budget_breaks_where_the_adaptive_one_holds() -> None:
    """Long documents behind chat: the same budget costs more at long contexts."""
    steep = CostModel.from_dict({**TILED.to_dict(), "prefill_pair_s": 4e-8})
    documents = generate(poisson(1.0), fixed_lengths(3500, 60), 40)
    fixed = run(documents, steep, budget="fixed", token_budget=320)
    adaptive = run(documents, steep, budget="adaptive")
    assert np.quantile(fixed.record.gaps_s, 0.99) > 0.05
    assert max(adaptive.record.gaps_s) <= 0.05


def test_noise_is_learned_so_that_p99_holds() -> None:
    result = run(chat(5.0, 400), budget="adaptive", jitter=0.08)
    assert np.quantile(result.record.gaps_s, 0.99) <= 0.05 * 1.02


@pytest.mark.parametrize(("deployment_s", "own_s"), [(0.05, None), (0.4, 0.05)])
def test_hiccups_that_no_prediction_knows_do_not_break_p99(
    deployment_s: float, own_s: float | None
) -> None:
    """One step in thirty takes so much longer that the bound takes it for an interruption."""
    chance = random.Random(5)
    pool = [
        (chance.uniform(0.01, 0.06), 1.9 if chance.random() < 1 / 30 else 1.0) for _ in range(900)
    ]
    hiccups = StepRatios([(0.01, 1.0)], pool)
    config = scheduler_config(TILED, budget="adaptive", max_requests=32, tbt_s=deployment_s)
    deployment = Deployment(config, TILED, ratios=hiccups)
    result = simulate(chat(5.0, 600), deployment, objective=Objective(tbt_s=own_s))
    gaps = np.array(result.record.gaps_s)
    assert np.quantile(gaps[len(gaps) // 3 :], 0.99) <= 0.05


def test_a_slower_machine_than_profiled_is_learned() -> None:
    slow = CostModel.from_dict(
        {
            **TILED.to_dict(),
            "tokens_s": [[n, 1.3 * s] for n, s in TILED.tokens_s],
        }
    )
    config = scheduler_config(TILED, budget="adaptive", max_requests=32, tbt_s=0.05)
    result = simulate(chat(4.0, 300), Deployment(config, slow, believed=TILED))
    gaps = np.array(result.record.gaps_s)
    assert np.quantile(gaps[len(gaps) // 2 :], 0.99) <= 0.05


def test_what_a_bad_moment_taught_starves_no_prompt() -> None:
    """Bounds of six times the prediction leave no room for prefill, and no step would ever show
    that they are wrong."""
    slow, far_slower = math.log(2.0), math.log(6.0)
    mixed = tuple((2 * 16 + size, slow, far_slower) for size in range(7))
    taught = CostModel.from_dict({**TILED.to_dict(), "learnt": mixed})
    config = scheduler_config(TILED, budget="adaptive", max_requests=32, tbt_s=0.05)
    fresh = simulate(chat(1.0), Deployment(config, TILED)).summary()
    misled = simulate(chat(1.0), Deployment(config, TILED, believed=taught)).summary()
    assert misled.tbt_max <= 0.05
    assert misled.ttft_p99 < 2.0 * fresh.ttft_p99


def test_two_stages_keep_it_too() -> None:
    staged = CostModel.from_dict(
        {**TILED.to_dict(), "num_stages": 2, "transfer_s": ((1, 0.001), (2048, 0.004))}
    )
    for qps in (2.0, 6.0):
        result = run(chat(qps), staged, budget="adaptive", tbt_s=0.12)
        assert max(result.record.gaps_s) <= 0.12


def test_objectives_of_requests_mix_in_one_batch() -> None:
    """The strictest decode of a batch sets its pace, and only while it runs."""
    config = scheduler_config(TILED, budget="adaptive", max_requests=32, tbt_s=0.4)
    record = RunRecord(3)
    core = build_core(config, cost_model=OnlineCostModel(TILED))
    replica = Replica(core, TILED, record)
    objectives = (Objective(), Objective(tbt_s=0.03), Objective())
    for index, (arrival_s, prompt, output) in enumerate(
        ((0.0, 10, 60), (0.001, 10, 30), (0.2, 4000, 4))
    ):
        request = Request(
            index, (0,) * prompt, SamplingParams(output, min_tokens=output), arrival_s,
            objective=objectives[index],
        )  # fmt: skip
        while replica.next_s <= arrival_s:
            replica.advance()
        replica.num_live += 1
        replica.submit(Submit(request), arrival_s)
    while replica.next_s < float("inf"):
        replica.advance()
    assert record.max_gap_s[1] <= 0.03
    assert 0.03 < record.max_gap_s[0] <= 0.4


def test_smoothness_spends_what_early_tokens_banked() -> None:
    longest = {}
    for smoothness in (1.0, 3.0):
        config = scheduler_config(
            TILED, budget="adaptive", max_requests=32, tbt_s=0.05,
            budget_options={"smoothness": smoothness},
        )  # fmt: skip
        result = simulate(chat(4.0), Deployment(config, TILED))
        longest[smoothness] = max(result.record.gaps_s)
    assert longest[1.0] <= 0.05 < longest[3.0] <= 0.15


def test_what_passes_between_the_stages_and_the_core_is_learned() -> None:
    """Answers come 8 ms late: nothing in the stages' times says so, yet every gap holds."""
    config = scheduler_config(TILED, budget="adaptive", max_requests=32, tbt_s=0.05)
    for lookahead in (False, True):
        config = dataclasses.replace(config, lookahead=lookahead)
        late = Deployment(config, TILED, host_s=0.008)
        gaps = np.array(simulate(chat(4.0, 200), late).record.gaps_s)
        assert np.quantile(gaps, 0.99) <= 0.05


@pytest.mark.parametrize(("num_stages", "qps", "longer"), [(1, 20, 1), (1, 0.2, 0), (2, 20, 0)])
def test_in_a_queue_one_stage_takes_longer_steps(num_stages: int, qps: float, longer: int) -> None:
    """A loose objective leaves room for steps that gain little."""
    model = dataclasses.replace(TILED, num_stages=num_stages)
    longest_s = [
        max(run(chat(qps, 60), model, budget="adaptive", tbt_s=2.0, budget_options=o).record.gaps_s)
        for o in ({"ease": 0.1}, {"ease": 0.95})
    ]
    assert (longest_s[1] > 1.2 * longest_s[0]) == longer


def test_without_an_objective_steps_beside_decodes_are_those_worth_their_time() -> None:
    """A prompt of 2000 tokens fits the buffers, and would make running streams wait for it all."""
    workload = generate(poisson(2.0), fixed_lengths(2000, 200), 20)
    result = run(workload, budget="adaptive", tbt_s=None)
    longest_s = max(result.record.gaps_s)
    assert TILED.linear_s(128) < longest_s < TILED.linear_s(2000) / 2


def test_a_profile_that_is_wrong_of_long_steps_does_not_keep_them_short() -> None:
    """A neighbor disturbed their measurement: they take half of what the profile says."""
    knots = ((1, 0.002), (64, 0.010), (256, 0.024), (2048, 0.180))
    truth = CostModel("truth", knots, kv_tokens=64_000)
    wrong = dataclasses.replace(truth, tokens_s=(*knots[:2], (256, 0.048), (2048, 0.4)))
    workload = generate(poisson(100.0), fixed_lengths(300, 55), 800)

    def seconds(told: CostModel, budget: str) -> float:
        config = scheduler_config(told, budget=budget, tbt_s=0.5, max_requests=32)
        run = simulate(workload, Deployment(config, truth, believed=told))
        return max(run.record.finished_s)

    assert seconds(wrong, "auto") < 1.1 * seconds(truth, "auto")
    assert seconds(wrong, "adaptive") > 1.2 * seconds(truth, "adaptive")
