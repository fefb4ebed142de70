"""Capacities over Orca under the artifact's rules."""

from __future__ import annotations

import pytest

from app.simulate.paper import published
from app.simulate.paper.costs import decodes
from app.simulate.studies import artifact_rules as rules


def test_memory_limits_orca_with_documents_on_one_stage() -> None:
    mistral, yi = (d.model for d in published.DEPLOYMENTS[:2])
    places = {
        (d.model, dataset): rules.orca_places(d, dataset)
        for d in published.DEPLOYMENTS
        for dataset in published.DATASETS
    }
    assert places[yi, "arxiv"] < places[mistral, "arxiv"] < 16
    capped = {key for key, n in places.items() if n < (16 if key[0][0] in "my" else 8)}
    assert capped == {(yi, "arxiv"), (mistral, "arxiv")}


def test_chunks_take_what_was_measured() -> None:
    pairs, kv = rules.measured_prefill()
    assert pairs < 1.0 < kv


def test_measured_overheads_give_the_papers_decode_step_on_two_stages_only() -> None:
    for d in published.DEPLOYMENTS:
        model = rules.all_rules(d, "sharegpt4").model
        step_s = model.latency_s(decodes(model, 32, 4096))
        if model.num_stages > 1:
            assert step_s == pytest.approx(d.strict_s / 5, rel=0.1)
        slow = rules.with_own_overheads(rules.all_rules(d, "sharegpt4")).model
        assert (slow == model) is (model.num_stages > 1)


def test_each_rule_is_changed_alone() -> None:
    for d, dataset, count in (
        (published.DEPLOYMENTS[0], "arxiv", 6),
        (published.DEPLOYMENTS[2], "sharegpt4", 5),
    ):
        found = [case for _, case in rules.cases(d, dataset)]
        assert len(found) == len(set(found)) == count
        assert rules.all_rules(d, dataset) not in found
