"""Quotes against what happened: said over happened, and whether those told to come again got in."""

from __future__ import annotations

from typing import Any

import pytest

from app.bench.load.client import Job, Trace
from app.bench.load.quote import Asked, Attempt, quote_figures
from app.bench.report import MeasurementError


def attempt(said_ms: float | None, happened_ms: float | None, now: bool = True) -> Attempt:
    """happened_ms None: refused."""
    trace = Trace(Job(0.0, 10, 2), sent_s=5.0, num_tokens=2)
    if happened_ms is None:
        trace.error = "429: overloaded"
    else:
        trace.event_times_s = [5.0 + happened_ms / 1000, 9.0]
    predicted = None if said_ms is None else {"ttft_ms": said_ms, "ttft_bound_ms": 1.2 * said_ms}
    said: dict[str, Any] = {"predicted": predicted, "can_serve_now": now, "retry_after_s": 1.0}
    return Attempt(said, 0.003, trace)


def test_said_is_held_against_what_happened() -> None:
    late, never = attempt(500, None, now=False), attempt(500, None, now=False)
    found = [
        Asked([attempt(100, 100)]),
        Asked([attempt(100, 200)]),  # half of what happened, and beyond the objective
        Asked([late, attempt(110, 100)]),
        Asked([never, never, attempt(90, 100)]),
        Asked([never, never, never]),
    ]
    figures = quote_figures(found, ttft_ms=150.0)
    assert (figures["num_quotes"], figures["num_refused"], figures["num_failed"]) == (10, 3, 0)
    assert figures["ttft_ratio_p50"] == pytest.approx(0.95, abs=0.06)
    assert figures["ttft_near_share"] == 3 / 4
    assert figures["kept_bound_share"] == 3 / 4
    assert figures["kept_share"] == 3 / 4
    assert figures["yes_kept_share"] == 1 / 2
    assert figures["no_true_share"] == 1.0
    assert (figures["retry_true_share"], figures["retry_near_share"]) == (1 / 3, 2 / 3)


def test_without_a_first_token_nothing_is_measured() -> None:
    with pytest.raises(MeasurementError, match="429"):
        quote_figures([Asked([attempt(100, None)])], None)
