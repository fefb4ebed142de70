"""A batch beside a live load: what is left, and what counts as answered."""

from __future__ import annotations

import json

import pytest

from actors.transport.messages import IterationRecord
from app.bench.load.batch import Round, batch_lines, busy_seconds, in_both, medians, rate_of
from app.bench.load.client import Job, Trace
from app.bench.report import MeasurementError
from app.telemetry.engines import FrontEngines
from app.telemetry.live import Telemetry
from app.telemetry.prometheus import render
from tests.app.bench.load.traces import steady
from tests.app.telemetry.test_engines import Said


def test_what_is_left_is_the_time_without_steps() -> None:
    live = steady(1.0, 0.1, 0.02)
    found = Round(live, live, busy_share=0.25, alone_qps=8.0, beside_qps=4.5)
    assert found.to_dict()["batch_left_qps"] == 6.0
    assert found.to_dict()["of_what_is_left"] == 0.75


def test_the_live_load_is_compared_by_the_same_requests() -> None:
    """Either part may have sent fewer."""
    jobs = [Job(0.1 * number, 5, 1 + number) for number in range(6)]
    traces = [Trace(job) for job in jobs]
    for alone, beside in ((traces, traces[:4]), (traces[:4], traces)):
        same = in_both(alone, beside)
        assert [[trace.job for trace in part] for part in same] == [jobs[:4], jobs[:4]]


def test_the_ratio_is_that_of_the_rounds_and_the_noise_that_of_the_live_load_alone() -> None:
    slow, fast = steady(1.0, 0.1, 0.04), steady(1.0, 0.1, 0.02)
    rounds = [Round(a, b, 0.5, 4.0, 2.0) for a, b in ((fast, slow), (slow, slow), (slow, fast))]
    found = medians(rounds)
    assert found["tbt_p99_ratio"] == pytest.approx(1.0)
    assert found["tbt_p99_noise"] == pytest.approx(2.0)
    assert found["of_what_is_left"] == 1.0


def test_lines_are_requests_of_the_jobs() -> None:
    jobs = [Job(0.0, 5, 3), Job(1.0, 7, 2)]
    lines = [json.loads(line) for line in batch_lines(jobs, "m", seed=1).splitlines()]
    assert [line["custom_id"] for line in lines] == ["0", "1"]
    assert [len(line["body"]["prompt"]) for line in lines] == [5, 7]
    assert [line["body"]["max_tokens"] for line in lines] == [3, 2]
    assert batch_lines(jobs, "m") != batch_lines(jobs, "m")  # nothing is cached from a part before


def test_busy_time_is_the_sum_of_the_histogram() -> None:
    text = (
        "# HELP legato_iteration_seconds Busy\n"
        'legato_iteration_seconds_bucket{le="0.1",model_name="m"} 3.0\n'
        'legato_iteration_seconds_sum{model_name="m"} 12.5\n'
    )
    assert busy_seconds(text) == 12.5
    with pytest.raises(MeasurementError, match="legato_iteration_seconds_sum"):
        busy_seconds("vllm_iteration 3\n")


def test_stages_and_engines_that_are_busy_at_once_are_refused() -> None:
    """By the series that the telemetry of such servers has."""
    alone, pipeline, front = (Telemetry("m") for _ in range(3))
    for telemetry, stages_s in ((alone, [(0.0, 0.1)]), (pipeline, [(0.0, 0.1), (0.2, 0.3)])):
        for n in range(2):
            own = tuple((begin_s + n, end_s + n) for begin_s, end_s in stages_s)
            record = IterationRecord(n, n, n + 0.3, None, 8, 0, 8, own, 8, 0, 0, 9, 0, 0, 64)
            telemetry.on_iterations([record])
    front.show_engines(FrontEngines([Said("a"), Said("b")]))
    assert busy_seconds(render([alone.metrics_now()]).decode()) == pytest.approx(0.2)
    for telemetry, several in ((pipeline, "one stage"), (front, "one engine")):
        with pytest.raises(MeasurementError, match=several):
            busy_seconds(render([telemetry.metrics_now()]).decode())
    with pytest.raises(MeasurementError, match="another replica"):
        busy_seconds(render([alone.metrics_now()], replica="m#1").decode())


def test_a_batch_counts_if_it_was_answered_whole() -> None:
    assert rate_of({"num_done": 10, "num_failed": 0, "seconds": 4.0}) == 2.5
    with pytest.raises(MeasurementError, match="not answered whole"):
        rate_of({"num_done": 9, "num_failed": 1, "seconds": 4.0})
