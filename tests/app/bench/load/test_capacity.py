"""`legato capacity` over a server that is a function of the load."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from app.bench.load.capacity import (
    CapacityObjective,
    CapacitySearch,
    measure_capacity,
    search_capacity,
)
from app.bench.load.figures import LoadFigures, load_figures
from app.bench.report import MeasurementError
from app.cli.main import app as cli
from tests.app.bench.load.traces import steady, trace

OBJECTIVE = CapacityObjective(tbt_ms=100.0, ttft_p50_ms=1000.0)


def served(qps: float) -> LoadFigures:
    """TBT grows with the load: 100 ms at 5 requests per second."""
    return steady(qps, ttft_s=0.1, tbt_s=0.02 * qps)


@pytest.mark.parametrize("guess_qps", [0.3, 5.0, 40.0])
def test_the_edge_is_found_from_anywhere(guess_qps: float) -> None:
    search = CapacitySearch(guess_qps, 0.05)
    qps, probes = measure_capacity(served, OBJECTIVE, search, probe_s=40.0)
    assert 5.0 / 1.06 <= qps <= 5.0
    assert max(p.tbt_p99_ms for p in probes if OBJECTIVE.passed(p)) == pytest.approx(20 * qps)
    assert search.done
    assert search.num_left == 0


def test_prompts_that_wait_end_the_search_too() -> None:
    def slow_to_start(qps: float) -> LoadFigures:
        return steady(qps, ttft_s=0.25 * qps, tbt_s=0.01)

    qps, _ = measure_capacity(slow_to_start, OBJECTIVE, CapacitySearch(1.0, 0.05), 40.0)
    assert 4.0 / 1.06 <= qps <= 4.0


def test_a_failed_request_fails_a_load() -> None:
    def sheds(qps: float) -> LoadFigures:
        refused = [trace(1.0, error="429: full")] if qps > 3.0 else []
        return load_figures([trace(0.0, 0.1, 0.15), *refused])

    qps, _ = measure_capacity(sheds, OBJECTIVE, CapacitySearch(1.0, 0.05), 40.0)
    assert 3.0 / 1.06 <= qps <= 3.0


def test_a_server_that_answers_nothing_is_no_capacity_of_zero() -> None:
    def broken(qps: float) -> LoadFigures:
        return load_figures([trace(0.0, error="500: broken")])

    with pytest.raises(MeasurementError, match="500: broken"):
        measure_capacity(broken, OBJECTIVE, CapacitySearch(4.0, 0.05), 40.0)


def test_answers_of_one_token_have_no_tbt_to_judge() -> None:
    result = CliRunner().invoke(cli, ["capacity", "--lengths", "512x1"])
    assert result.exit_code == 2
    assert "512x1" in result.output


def test_a_load_that_never_passes_is_a_capacity_of_zero() -> None:
    assert search_capacity(CapacitySearch(1.0, 0.05), lambda _: False) == 0.0


def test_the_search_knows_how_far_it_is() -> None:
    search = CapacitySearch(4.0, 0.05)
    assert search.num_left is None
    search.judge(True)
    assert (search.qps, search.num_left) == (6.0, None)
    search.judge(False)
    assert (search.low_qps, search.high_qps, search.qps) == (4.0, 6.0, 5.0)
    promised = search.num_left
    assert promised is not None
    count = 0
    while not search.done:
        search.judge(search.qps <= 5.2)
        count += 1
    assert count <= promised <= count + 1


def test_it_is_bracketed_in_strides() -> None:
    tried: list[float] = []

    def passes(qps: float) -> bool:
        tried.append(qps)
        return qps < 8.0

    search_capacity(CapacitySearch(4.0, 0.2), passes)
    assert tried[:3] == [4.0, 6.0, 9.0]
    assert math.isclose(tried[3], 7.5)
