"""Experiments on figures that are missed: those that take no minutes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from app.simulate.hardware import networks
from app.simulate.hardware.deployments import load_model, paper_model
from app.simulate.hardware.networks import ETHERNET_LATENCY_S
from app.simulate.paper import published
from app.simulate.paper.published import PublishedRow
from app.simulate.studies import misses
from app.simulate.tables import paper_markdown


def test_the_decode_step_is_what_misses_figure_9() -> None:
    stated, *others = misses.interference_rows()
    assert stated.simulated == pytest.approx(published.INTERFERENCE, rel=0.03)
    alone = [row for row in others if row.quantity == "whole prompt / decode-only"]
    measured = [row for row in others if row.quantity.endswith("measured decode-only")]
    assert abs(alone[0].deviation or 0.0) > 0.5
    assert all(abs(row.deviation or 1.0) < 0.06 for row in measured)


def test_slower_ethernet_slows_tensor_ranks_more_than_stages() -> None:
    assert misses.tp8_over_pp(1e-3) > misses.tp8_over_pp(ETHERNET_LATENCY_S)
    found = list(itertools.islice(misses.ethernet_rows(), 5))
    needed_ms = next(r.simulated for r in found if r.quantity.startswith("one-way latency"))
    assert misses.tp8_over_pp(needed_ms / 1e3) == pytest.approx(2.0, rel=1e-3)
    model = load_model("falcon-180b-a100-tp8")
    assert misses.slower_ethernet(model, ETHERNET_LATENCY_S) == model


def test_a_link_of_half_the_rate_is_that_of_a_deployment_composed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("falcon-180b-a100-tp8", "falcon-180b-a100-tp4-pp2")
    slower = [misses.slower_ethernet(paper_model(name), bytes_per_s=5e9) for name in names]
    monkeypatch.setattr(networks, "ETHERNET_BYTES_PER_S", 5e9)
    for model, composed in zip(slower, map(paper_model, names), strict=True):
        for num_tokens in (1, 32, 128, 512, 2048):
            assert model.linear_s(num_tokens) == pytest.approx(
                composed.linear_s(num_tokens), rel=1e-3
            )
            assert model.send_s(num_tokens) == pytest.approx(
                composed.send_s(num_tokens), rel=1e-3, abs=1e-6
            )


@pytest.mark.heavy
def test_ttft_rises_with_the_load_and_bounds_are_found() -> None:
    few, many = (misses.latency("sarathi", "sharegpt4", qps, seeds=(0,)) for qps in (0.4, 1.0))
    assert few.ttft_p50_s < many.ttft_p50_s
    assert few.tbt_p99_s < 0.2
    assert many.late == 0.0


def test_prompts_alone_take_most_of_the_time_at_table_4s_load() -> None:
    for dataset, busy in (("sharegpt4", 0.5), ("arxiv", 0.85)):
        row = next(iter(misses.ablation_rows((dataset,))))
        assert row.simulated == pytest.approx(busy, abs=0.05)


@pytest.mark.heavy
def test_wider_batches_meet_more_chunks_in_figure_13a() -> None:
    few, many = (misses.script_ratio(1e10, most_requests, 300.0) for most_requests in (32, 128))
    assert 0.5 < few < many < 2.0
    assert misses.script_ratio(5e9, 128, 300.0) > many


@pytest.mark.heavy
def test_the_artifacts_arrivals_come_faster() -> None:
    found = {row.setting: row.simulated for row in misses.chance_rows(2) if "TTFT" in row.quantity}
    for dataset in published.DATASETS:
        poisson, own = (
            next(s for where, s in found.items() if where.startswith(dataset) and name in where)
            for name in ("Poisson", "artifact")
        )
        assert poisson < own


def test_the_committed_experiments_are_those_of_today() -> None:
    """The quick ones are run again; the table is made of the rows."""
    results = Path(misses.__file__).parents[1] / "results"
    committed = [
        PublishedRow.from_dict(row)
        for row in json.loads((results / "misses.json").read_text("utf-8"))["rows"]
    ]
    assert (results / "misses.md").read_text("utf-8") == paper_markdown(committed)
    fresh = [*misses.interference_rows(), *itertools.islice(misses.ethernet_rows(), 6)]
    for row, old in zip(fresh, committed, strict=False):
        assert (row.setting, row.quantity) == (old.setting, old.quantity)
        assert row.simulated == pytest.approx(old.simulated, rel=1e-6)
