"""What the benchmarks read from the times a caller saw."""

from __future__ import annotations

import math

import pytest

from app.bench.load.client import Job, Trace
from app.bench.load.figures import load_figures, rate_together
from app.bench.report import MeasurementError
from tests.app.bench.load.traces import trace


def test_figures_of_a_run_written_by_hand() -> None:
    figures = load_figures(
        [trace(0.0, 0.5, 1.0, 1.25), trace(1.0, 1.25, 1.5), trace(2.0, 3.0)], tbt_ms=300.0
    )
    assert figures.num_requests == 3
    assert figures.num_failed == 0
    assert figures.qps_offered == 1.0  # two intervals in two seconds
    assert figures.span_s == 3.0
    assert figures.output_tokens_per_s == 6 / 3.0
    assert figures.ttft_p50_ms == 500.0
    assert figures.tbt_max_ms == 500.0
    assert figures.tbt_p50_ms == 250.0
    assert figures.num_stalls == 1
    assert figures.goodput_qps == pytest.approx(2 / 3.0)  # the first broke its objective


def test_a_request_that_ends_early_or_with_an_error_has_failed() -> None:
    short = Trace(Job(0.0, 8, 5), event_times_s=[0.5], num_tokens=1, has_ended=True)
    figures = load_figures([short, trace(0.0, error="429: full"), trace(0.0, 0.5, 1.0)])
    assert figures.num_failed == 2
    hint = "does the server honor ignore_eos and include_usage?"
    assert figures.first_error == f"1 of 5 tokens: {hint}"
    figures.check_measured()
    cut = Trace(Job(0.0, 8, 5), event_times_s=[0.5], num_tokens=0)
    assert load_figures([cut]).first_error == "the stream broke off after 1 events"


def test_a_run_without_an_answer_is_no_measurement() -> None:
    figures = load_figures([trace(0.0, error="404: no model 'nope'")] * 2)
    assert math.isnan(figures.ttft_p50_ms)
    with pytest.raises(MeasurementError, match=r"none of 2 requests.*no model 'nope'"):
        figures.check_measured()


def traces(*times_s: list[float]) -> list[Trace]:
    return [trace(0.0, *times) for times in times_s]


def test_only_the_time_in_which_all_decode_counts() -> None:
    rate = rate_together(traces([0.0, 0.5, 1.0], [0.5, 0.75, 1.0, 1.5]))
    assert rate == pytest.approx(3 / 0.5)  # 1.0 of the first; 0.75 and 1.0 of the second


def test_an_event_of_several_tokens_counts_as_several() -> None:
    one, two = traces([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
    one.num_tokens, two.num_tokens = 3, 12
    assert rate_together([one, two]) == pytest.approx((2 + 8) / 2.0)


@pytest.mark.parametrize("second", [[0.3, 0.4], [0.2], []])
def test_streams_that_never_decode_together_have_no_rate(second: list[float]) -> None:
    assert rate_together(traces([0.1, 0.2], second)) is None
