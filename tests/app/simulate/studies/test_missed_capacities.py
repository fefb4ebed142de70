"""Capacities over Orca with one assumption changed."""

from __future__ import annotations

import pytest

from app.simulate.hardware.deployments import load_model
from app.simulate.paper import published
from app.simulate.paper.costs import whole_prompts
from app.simulate.studies import missed_capacities
from app.simulate.workload.specs import parse_lengths


def test_prefill_attention_is_scaled_to_the_measurement() -> None:
    model = load_model("yi-34b-a100-tp2")
    assert 0.5 < missed_capacities.attention_factor() < 1.0
    assert model.latency_s(whole_prompts(model, 16384)) * 1e3 > published.PREFILL_MS[16384]


@pytest.mark.heavy
def test_stalls_cost_orca_its_capacity() -> None:
    mistral = published.DEPLOYMENTS[0]
    model = load_model(mistral.model)
    found = missed_capacities.over_orca(mistral, model, parse_lengths("fixed:2000,50"), 4.0, 60)
    assert 0.0 < found.orca < found.sarathi
