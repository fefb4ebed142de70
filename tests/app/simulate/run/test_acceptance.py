"""Simulated drafts are right with the probability asked for, and every token is there once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.fleet.roles import WAYS
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.interconnect import parse_interconnect
from app.simulate.run.acceptance import Acceptance, ModeledDrafter
from app.simulate.run.deployment import Division
from app.simulate.run.simulation import Deployment, SimulatedRun, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths, uniform_lengths
from app.simulate.workload.requests import generate

# A decode step is free up to 32 tokens.
MODEL = CostModel(
    "m", ((1, 0.010), (32, 0.010), (2048, 0.200)), decode_kv_s=1e-8, prefill_kv_s=1e-8,
    kv_tokens=60_000, max_model_len=4096,
)  # fmt: skip
BASE = scheduler_config(MODEL, budget="adaptive", tbt_s=0.1, drafter="auto")


def run(acceptance: float | None, qps: float = 0.5, prompt: int = 64) -> SimulatedRun:
    traffic = generate(poisson(qps), fixed_lengths(prompt, 200), 60, seed=2)
    return simulate(traffic, Deployment(BASE, MODEL, acceptance=acceptance))


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.7, 1.0])
def test_drafts_are_right_with_the_probability(probability: float) -> None:
    acceptance = Acceptance(probability)
    right = [acceptance.is_right(i, p) for i in range(100) for p in range(100)]
    assert sum(right) / len(right) == pytest.approx(probability, abs=0.015)
    again = [Acceptance(probability, seed=1).is_right(i, p) for i in range(9) for p in range(9)]
    assert probability in (0.0, 1.0) or again != [right[100 * i + p] for i in range(9)
                                                  for p in range(9)]  # fmt: skip


def test_accepted_are_those_before_the_first_wrong_one() -> None:
    acceptance = Acceptance(0.6)
    for position in range(50):
        count = acceptance.num_right(3, position, 8)
        assert all(acceptance.is_right(3, position + k) for k in range(count))
        assert count == 8 or not acceptance.is_right(3, position + count)


def test_the_drafter_learns_the_acceptance() -> None:
    drafter = ModeledDrafter(Acceptance(0.9), 1, 10)
    drafter.follow([0] * 50)
    drafter.follow([0] * 200)
    assert 0.7 < drafter.acceptance_rate < 1.0
    assert len(drafter.draft(5)) == 5


@pytest.mark.heavy
def test_the_better_the_drafts_the_faster_the_streams() -> None:
    runs = [run(None), run(0.0), run(0.5), run(0.8), run(1.0)]
    for one in runs:
        assert one.record.num_output_tokens == one.workload.output_tokens.tolist()
    none, wrong, *others = [one.summary().e2e_p50 for one in runs]
    assert wrong == pytest.approx(none, rel=0.05)
    assert none > others[0] > others[1] > others[2]
    # At 0.8, a step is expected to give 4.3 tokens with eight drafts; those unlikely to be reached
    # are not made.
    assert 2.8 < none / others[1] < 4.3
    assert 6.0 < none / others[2] < 9.0


def test_first_tokens_come_no_later_under_a_load_of_prompts() -> None:
    """Steps hold chunks all the time, and drafts beside them: streams end earlier and leave."""
    plain, drafted = run(None, 8.0, 1500).summary(), run(0.8, 8.0, 1500).summary()
    assert drafted.ttft_p50 <= plain.ttft_p50
    assert drafted.ttft_p99 <= plain.ttft_p99
    assert drafted.tbt_p99 <= 0.1
    assert drafted.output_tokens_per_s > 1.1 * plain.output_tokens_per_s


@pytest.mark.heavy
def test_equal_runs_are_equal() -> None:
    assert run(0.6).summary() == run(0.6).summary()


@pytest.mark.parametrize("stages", [1, 2])
def test_tokens_survive_engines_that_die_and_roles(stages: int) -> None:
    model = replace(MODEL, num_stages=stages)
    config = scheduler_config(model, token_budget=256, tbt_s=0.1, drafter="lookup")
    traffic = generate(poisson(10.0), uniform_lengths(50, 600, 4.0), 100, seed=1)
    deployment = Deployment(
        config, model, num_replicas=3, routing="slack", failures=((3.0, 1),), acceptance=0.7
    )
    way = next(way for way in WAYS if way != "colocated")
    division = Division(way, 1, parse_interconnect("nvlink"), 1000)
    for each in (deployment, replace(deployment, failures=(), division=division)):
        done = simulate(traffic, each)
        assert done.record.num_output_tokens == traffic.output_tokens.tolist()


def test_an_acceptance_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="acceptance has no effect with the drafter 'none'"):
        Deployment(replace(BASE, drafter="none"), MODEL, acceptance=0.5)
    with pytest.raises(ValueError, match=r"acceptance: a probability, not 1\.5"):
        Deployment(BASE, MODEL, acceptance=1.5)
