"""Where the work runs: which kinds and divisions are searched, and what the advice says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.simulate.hardware.interconnect import INTERCONNECTS
from app.simulate.run import ways_search
from app.simulate.run.capacity import FoundCapacity, Probe
from app.simulate.run.config_search import Candidate, CandidateResult
from app.simulate.run.deployment import Deployment, Division
from app.simulate.run.record import RunRecord, Summary, summarize
from app.simulate.run.ways_search import (
    TOLERANCE,
    Layout,
    LayoutResult,
    Question,
    advice,
    best_layout,
    warning,
)
from app.simulate.workload.specs import TrafficSpec

KIND = Candidate("mistral-7b-a100", "", 1, 1)
DIVISION = Division("split", 1, INTERCONNECTS["nvlink"], 1e5)
WAYS = ("colocated", "split", "flexible")
QUESTION = Question(TrafficSpec("fixed:1000,100", num_requests=200), 0.1, 4, WAYS, DIVISION)
QUESTION_OF_TWO = replace(QUESTION, ways=("colocated", "split"))
SUMMARY = summarize(RunRecord(0))


def verdict(ranks: int, qps: float, budget: str = "adaptive") -> CandidateResult:
    kind = replace(KIND, tensor_ranks=ranks, budget=budget)
    return CandidateResult(kind, qps, 1, ranks, 0.05, 1.0, "P99 TBT", "" if qps else "misses")


def layout(way: str, qps: float, num_prefill: int = 0, e2e_s: float = 1.0) -> LayoutResult:
    figures = replace(SUMMARY, e2e_p50=e2e_s) if qps else None
    return LayoutResult(Layout(KIND, way, 4, num_prefill), qps, qps / 4, "P99 TBT", figures, {})


def truth_of(monkeypatch: pytest.MonkeyPatch, *truth: float) -> list[int]:
    """Let capacities be known, by engines for prompts; returns the divisions that are probed."""
    probed: list[int] = []

    def probe(
        deployment: Deployment, _: object, qps: float, *__: object, **___: object
    ) -> tuple[Probe, Summary]:
        number = deployment.division.num_prefill if deployment.division else 0
        probed.append(number)
        return Probe(qps, qps <= truth[number], 0.0, 0.0, 0.0, False), SUMMARY

    def search(deployment: Deployment, *_: object, **__: object) -> FoundCapacity:
        number = deployment.division.num_prefill if deployment.division else 0
        return FoundCapacity(truth[number], "P99 TBT", (), SUMMARY)

    monkeypatch.setattr(ways_search, "probe_load", probe)
    monkeypatch.setattr(ways_search, "search_capacity", search)
    return probed


def test_divisions_are_tried_while_they_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = truth_of(monkeypatch, 4.0, 3.0, 3.5, 3.4)
    found = best_layout(verdict(1, 1.0), "flexible", QUESTION)
    assert found.layout.label == "flexible 2+2"
    assert found.tried == {1: 3.0, 2: 3.5, 3: None}
    assert probed == [2, 3]
    assert best_layout(verdict(1, 1.0), "colocated", QUESTION).qps == 4.0
    assert probed == [2, 3], "colocated engines have no divisions"


def test_split_engines_begin_in_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    truth_of(monkeypatch, 4.0, 3.0, 3.0, 3.0 * (1.0 + TOLERANCE / 2))
    found = best_layout(verdict(1, 1.0), "split", QUESTION)
    begun = next(iter(found.tried))
    assert found.layout.num_prefill == begun, "what is within the tolerance is no better"


def test_ahead_by_more_than_chance_is_advised() -> None:
    told = advice([layout("split", 4.8, 3), layout("colocated", 4.0)], QUESTION_OF_TWO)
    assert told == (
        "Choose split 3+1 of TP1 PP1 adaptive: under a P99 TBT of 100 ms, "
        "split 3+1 holds 1.20 of colocated."
    )


def test_within_chance_colocated_is_simpler() -> None:
    found = [layout("flexible", 4.16, 1), layout("colocated", 4.0), layout("split", 3.0, 2)]
    assert advice(found, QUESTION) == (
        "Choose colocated 4 of TP1 PP1 adaptive, which is simpler: under a P99 TBT of 100 ms, "
        "split 2+2 holds 0.75 of colocated and flexible 1+3 holds 1.04 of colocated, which says "
        "nothing."
    )


def test_where_colocated_engines_hold_nothing() -> None:
    assert "colocated engines hold no load" in advice(
        [layout("split", 1.0, 2), layout("colocated", 0.0)], QUESTION_OF_TWO
    )
    nothing = [layout("split", 0.0, 2), layout("colocated", 0.0)]
    assert advice(nothing, QUESTION_OF_TWO) == "Nothing holds a load under a P99 TBT of 100 ms."
    assert not warning(nothing, 100)


def test_short_runs_are_called_so() -> None:
    assert not warning([layout("colocated", 4.0)], 40)
    assert "for 2.5 times" in warning([layout("colocated", 4.0, e2e_s=4.0)], 40)
