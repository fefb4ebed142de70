"""A quote says what admission would do, keeps its word, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.scheduling.build import build_core
from actors.scheduling.core import Core
from actors.scheduling.events import Event, Refuse, Submit
from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Objective, Request, SamplingParams
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import Replica
from app.simulate.run.simulation import Deployment, SimulatedRun, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import generate
from tests.actors.scheduling.admission.test_predictive import MODEL

SETTINGS: dict[str, Any] = {"tbt_s": 0.06, "ttft_s": 2.0, "max_requests": 64}
USUAL = QuoteRequest(800, 60)


def core_of(**changes: Any) -> Core:
    return build_core(scheduler_config(MODEL, **{"budget": "adaptive", **SETTINGS, **changes}))


def run(qps: float, quotes: dict[int, Quote] | None, **changes: Any) -> SimulatedRun:
    """Prompts of 800 and outputs of 60; a quote before every arrival, kept in `quotes`."""
    config = scheduler_config(MODEL, **{"budget": "adaptive", **SETTINGS, **changes})

    def submit(replica: Replica, event: Event, now_s: float) -> None:
        if quotes is not None and isinstance(event, Submit):
            request = event.request
            asked = QuoteRequest(len(request.prompt), 60)
            quotes[request.request_id] = replica.core.quote(asked, now_s)
        plainly(replica, event, now_s)

    plainly = Replica.submit
    workload = generate(poisson(qps), fixed_lengths(800, 60), int(30 * qps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "submit", submit)
        return simulate(workload, Deployment(config, MODEL, jitter=0.05))


def test_asking_changes_nothing() -> None:
    quotes: dict[int, Quote] = {}
    asked, unasked = (run(30.0, q, admission="predictive") for q in (quotes, None))
    assert len(quotes) == len(asked.workload)
    for column in ("first_token_s", "finished_s", "refused_s", "retry_after_s"):
        left, right = getattr(asked.record, column), getattr(unasked.record, column)
        np.testing.assert_array_equal(left, right)


def test_it_says_what_admission_does() -> None:
    """What admission learns as the request comes, the quote before it does not know yet."""
    quotes: dict[int, Quote] = {}
    record = run(30.0, quotes, admission="predictive").record
    refused = [not np.isnan(at_s) for at_s in record.refused_s]
    assert 0.2 < np.mean(refused) < 0.9
    said = [quote.can_serve_now is False for quote in quotes.values()]
    assert np.mean(np.array(said) == np.array(refused)) > 0.98
    told = [
        (quote.retry_after_s, record.retry_after_s[name])
        for name, quote in quotes.items()
        if quote.retry_after_s is not None and refused[name]
    ]
    assert np.quantile([abs(a / b - 1.0) for a, b in told], 0.9) < 0.05


@pytest.mark.parametrize("budget", ["adaptive", "fixed"])
@pytest.mark.parametrize(("qps", "admission"), [(3.0, "all"), (7.0, "all"), (30.0, "predictive")])
def test_first_tokens_come_when_said(budget: str, qps: float, admission: str) -> None:
    quotes: dict[int, Quote] = {}
    record = run(qps, quotes, budget=budget, admission=admission).record
    happened = np.array(record.first_token_s) - np.array(record.arrival_s)
    came = ~np.isnan(happened)
    said = np.array([quote.ttft_s for quote in quotes.values()])[came]
    error = np.abs(said / happened[came] - 1.0)
    assert (error <= 0.25).mean() >= 0.9
    assert np.median(error) < 0.15


def test_what_cannot_be_had_is_told_with_what_can() -> None:
    idle = core_of()
    now = idle.quote(USUAL, 0.0)
    assert now.can_serve_now is True
    assert now.message is now.retry_after_s is None
    for objective, param in (((0.001, None), "slo.tbt_ms"), ((None, 0.05), "slo.ttft_ms")):
        never = idle.quote(QuoteRequest(800, 60, Objective(*objective)), 0.0)
        assert (never.can_serve_now, never.retry_after_s, never.param) == (False, None, param)
        assert never.message is not None
        assert "cannot be had" in never.message
    assert now.least_tbt_s is not None
    assert now.least_ttft_s is not None
    objective = Objective(1.001 * now.least_tbt_s, 1.001 * now.least_ttft_s)
    best = idle.quote(QuoteRequest(800, 60, objective), 0.0)
    assert best.can_serve_now is True
    assert idle.quote(QuoteRequest(5000, 60), 0.0).param == "prompt"


def test_a_constant_budget_is_judged_by_its_own_steps() -> None:
    """Steps of 1024 tokens take longer than the objective whatever runs, of 256 they do not."""
    never = core_of(budget="fixed", token_budget=1024).quote(USUAL, 0.0)
    assert (never.can_serve_now, never.param, never.retry_after_s) == (False, "slo.tbt_ms", None)
    assert core_of(budget="fixed", token_budget=256).quote(USUAL, 0.0).can_serve_now is True


def test_streams_that_must_end_first_are_waited_for() -> None:
    """So many decodes already run that one more would make all of them late."""
    slow = replace(MODEL, per_request_s=0.004)
    core = build_core(scheduler_config(slow, tbt_s=0.06, token_budget=16, max_requests=64))
    replica, now_s = Replica(core, slow, RunRecord(12)), 0.0
    for number in range(12):
        replica.submit(Submit(Request(number, (1,) * 8, SamplingParams(60), 0.0)), 0.0)
    while len(core.view.decoding) < 12:
        now_s = replica.advance()
    beside = core.quote(QuoteRequest(8, 60), now_s)
    assert beside.can_serve_now is False
    assert beside.param == "slo.tbt_ms"
    # It is right: as many have ended by then as must.
    assert beside.retry_after_s is not None
    again_s = now_s + 1.1 * beside.retry_after_s  # the pace of so far, half of it with fewer
    while now_s < again_s and len(core.view.decoding):
        now_s = replica.advance()
    assert core.quote(QuoteRequest(8, 60), now_s).can_serve_now is True


def test_without_a_cost_model_nothing_is_predicted() -> None:
    config = replace(scheduler_config(MODEL), cost_model=None, max_queued_requests=1)
    core = build_core(config)
    unknown = core.quote(USUAL, 0.0)
    assert unknown.can_serve_now is None
    assert unknown.ttft_s is unknown.least_ttft_s is None
    assert "cost model" in str(unknown.message)
    # Limits that need no prediction are told all the same.
    for number in range(200):
        told = core.handle(Submit(Request(number, (1,) * 8, SamplingParams(60), 0.0)), 0.0)
        if any(isinstance(instruction, Refuse) for instruction in told):
            break
    full = core.quote(USUAL, 0.0)
    assert full.can_serve_now is False
    assert full.retry_after_s is not None
