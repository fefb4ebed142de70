"""Quotes, simulated: they say what admission does, come true, and change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.scheduling.build import build_core
from actors.scheduling.events import Event, Submit
from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Request, SamplingParams
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import Replica
from app.simulate.run.simulation import Deployment, SimulatedRun, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import generate
from tests.app.simulate.run.test_predictive_admission import MODEL

SETTINGS: dict[str, Any] = {"tbt_s": 0.06, "ttft_s": 2.0, "max_requests": 64}


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


@pytest.mark.heavy
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
