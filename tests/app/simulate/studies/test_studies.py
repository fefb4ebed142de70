"""The studies run in small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.simulate.studies import moving as moving_study
from app.simulate.studies import rebalance as rebalance_study
from app.simulate.studies import routing as routing_study
from app.simulate.studies import scaling as scaling_study

pytestmark = pytest.mark.heavy


def test_requests_leave_an_engine_of_a_fleet_that_grows() -> None:
    case = replace(rebalance_study.CASES[2], num_engines=2, seconds=60.0)
    before, after = (rebalance_study.run(case, moves, (0,)) for moves in (False, True))
    assert (before.num_moves, after.num_requests) == (0, before.num_requests)
    assert after.num_moves > 0
    assert after.missed < before.missed
    assert rebalance_study.row(case, False, (0,)).startswith("| conversations | 1 to 4 | no | ")


def test_streams_that_take_their_kv_along_pause_for_less() -> None:
    rows = [
        moving_study.run_one("mistral-7b-a100", "sharegpt4", "drain", link, 0, warm_s=20.0)
        for link in ("", "nvlink")
    ]
    again, moved = rows
    assert again.num_streams > 0 == again.gigabytes
    assert moved.pause_max_s < 0.5 * again.pause_max_s
    assert moved.recomputed_tokens < 0.05 * again.recomputed_tokens
    assert "| mistral-7b-a100 | sharegpt4 | drain | again |" in moving_study.as_markdown(rows)
    traffic = moving_study.dealt_out(
        moving_study.generate(moving_study.poisson(1.0), moving_study.parse_lengths("arxiv"), 41, 0)
    )
    outputs = traffic.output_tokens
    assert len(outputs) == 40
    assert outputs[0::4].min() >= max(outputs[k::4].max() for k in (1, 2, 3))


def test_studies_run_small() -> None:
    rows = [
        routing_study.run_one(trace, 1.0, "slack", 2, 60.0, 0) for trace in routing_study.TRACES
    ]
    assert all(0.0 <= row.missed <= 1.0 and row.num_requests > 10 for row in rows)
    assert "slack" in routing_study.as_markdown(rows)
    points = [scaling_study.point_at("sharegpt4", qps, 40, 0) for qps in (0.2, 1.0)]
    scaling = scaling_study.build_scaling("slack")
    hours, kept, history = scaling_study.run_day(points, scaling, 10, 1.0, 0)
    assert 24.0 < hours < 240.0
    assert kept > 0.5
    assert max(history) <= 10
