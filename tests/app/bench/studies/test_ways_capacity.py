"""Where a search starts, which divisions it tries, and what of earlier rows it uses."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from app.bench.studies import ways_capacity
from app.bench.studies.ways_capacity import (
    TOLERANCE,
    Best,
    Case,
    Found,
    Place,
    best_division,
    search,
    study,
)
from app.bench.studies.ways_ledger import Ledger
from app.simulate.paper.published import DEPLOYMENTS
from app.simulate.run.capacity import Probe
from app.simulate.run.deployment import Deployment
from app.simulate.run.record import RunRecord, summarize

CASE = Case(DEPLOYMENTS[0], "arxiv", "strict", 4, 100, 0)
HERE = Place("colocated", 0, "")


@dataclass(frozen=True, slots=True)
class Known(Case):
    """A case whose capacities are known, by engines for prompts."""

    truth: tuple[float, ...] = ()

    def probe(self, deployment: Deployment, qps: float) -> tuple[Probe, Any]:
        assert deployment.division is not None
        passed = qps <= self.truth[deployment.division.num_prefill]
        PROBED.append((deployment.division.num_prefill, qps))
        return Probe(qps, passed, 0.0, 0.0 if passed else 9.0, 0.0, False), SUMMARY


PROBED: list[tuple[int, float]] = []
SUMMARY = summarize(RunRecord(0))


@pytest.fixture(autouse=True)
def _nothing_probed() -> None:
    PROBED.clear()


def known(*truth: float) -> Known:
    return Known(CASE.deployment, "arxiv", "strict", 4, 100, 0, truth)


@pytest.mark.parametrize("guess_qps", [0.3, 0.99, 1.0, 5.0])
def test_a_capacity_is_found_within_the_tolerance_from_any_guess(guess_qps: float) -> None:
    case = known(1.0)
    found = case.capacity(HERE, guess_qps, Ledger())
    assert found.qps <= 1.0 < found.qps * (1.0 + TOLERANCE)
    assert found.limit == "scheduling delay"


def test_a_near_guess_takes_few_loads() -> None:
    case = known(1.0)
    case.capacity(HERE, 0.97, Ledger())
    assert len(PROBED) == 3


@pytest.mark.parametrize("truth", [1.0, 1.03, 0.97])
def test_two_loads_are_enough_near_the_capacity_of_an_earlier_run(
    tmp_path: Path, truth: float
) -> None:
    report = tmp_path / "report.json"
    place = {"deployment": CASE.deployment.model, "dataset": "arxiv", "slo": "strict"}
    row = {**place, "way": "colocated", "interconnect": "", "capacity_qps": 1.0}
    report.write_text(json.dumps({"rows": [row]}))
    found = search(known(truth), "colocated", "", Ledger(None, [report])).found
    assert found.qps <= truth < found.qps * (1.0 + TOLERANCE)
    assert len(PROBED) == 2


def test_no_load_is_simulated_twice() -> None:
    case, ledger = known(1.0), Ledger()
    found = case.capacity(HERE, 0.7, ledger)
    num_probed = len(PROBED)
    assert case.capacity(HERE, 0.7, ledger) == found
    assert len(PROBED) == num_probed == len(ledger.loads)


def test_a_division_is_searched_only_if_it_passes_more_than_the_best() -> None:
    best = best_division(known(0.0, 0.5, 1.0, 1.02), "split", "nvlink", (2, 1, 3), 0.9, Ledger())
    assert best.num_prefill == 2
    assert best.tried == {2: best.found.qps, 1: None, 3: None}
    assert [n for n, _ in PROBED].count(1) == [n for n, _ in PROBED].count(3) == 1
    other = best_division(known(0.0, 0.5, 1.0, 1.5), "split", "nvlink", (2, 1, 3), 0.9, Ledger())
    assert other.num_prefill == 3
    assert other.tried == {2: best.found.qps, 1: None, 3: other.found.qps}


def test_the_first_division_is_the_one_in_balance() -> None:
    work = CASE.work
    best = search(known(0.0, 4.0, 4.0, 4.0), "split", "nvlink", Ledger())
    assert PROBED[0] == (3, work.qps(3, 4))  # documents: three of four engines read
    assert best.num_prefill == 3


def test_a_search_starts_from_another_objectives_row() -> None:
    ledger = Ledger()
    ledger.rows = {
        CASE.key("split", "ethernet", "relaxed"): {"prefill_engines": 1, "capacity_qps": 3.3},
        CASE.key("colocated", ""): {"prefill_engines": 0, "capacity_qps": 4.0},
    }
    search(known(0.0, 4.0, 0.0, 0.0), "split", "ethernet", ledger)
    assert PROBED[0] == (1, 3.3)
    PROBED.clear()
    search(known(0.0, 4.0, 0.0, 0.0), "flexible", "ethernet", ledger)
    assert PROBED[0] == (1, 4.0)


def test_only_rows_that_are_not_known_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def found(case: Case, way: str, link: str, ledger: Ledger) -> Best:
        searched.append(way)
        return Best(1, Found(0.0, "none", None), {1: 0.0})

    monkeypatch.setattr(ways_capacity, "search", found)
    ledger = Ledger()
    ledger.rows[CASE.key("colocated", "")] = {"way": "colocated", "capacity_qps": 0.0}
    shown = list(study(CASE, ("split", "flexible"), ("nvlink",), ledger))
    assert searched == ["split", "flexible"]
    assert [row["way"] for row in shown] == ["colocated", "split", "flexible"]
    assert list(study(CASE, ("split", "flexible"), ("nvlink",), ledger)) == shown
    assert searched == ["split", "flexible"]
    assert replace(CASE, seed=1).key("colocated", "") not in ledger.rows
