"""Which kinds of engines are worth dividing by roles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.simulate.run import kinds
from app.simulate.run.config_search import Candidate, CandidateResult, candidates
from app.simulate.run.kinds import KEPT, fitting, judge_kinds, kinds_for
from app.simulate.run.ways_search import pairs
from tests.app.simulate.run.test_ways_search import QUESTION, verdict


def test_kinds_far_below_the_best_are_left_out() -> None:
    found = [verdict(1, 1.0), verdict(1, 1.1, "fixed"), verdict(2, 1.6), verdict(4, 4.2)]
    assert kinds_for([*found, verdict(8, 0.0)], 8) == [found[1], found[3]]
    assert kinds_for([verdict(1, 1.0), verdict(4, 8.0)], 4) == [verdict(4, 8.0), verdict(1, 1.0)]
    with pytest.raises(ValueError, match="misses"):
        kinds_for([verdict(1, 0.0)], 4)


def test_engines_take_all_gpus() -> None:
    assert {c.num_devices for c in fitting(candidates("yi-34b/a100"), 6)} == {1, 2}
    with pytest.raises(ValueError, match="--gpus 3: engines have 2 GPUs"):
        fitting(candidates("yi-34b-a100-tp2"), 3)
    with pytest.raises(ValueError, match="one engine"):
        fitting(candidates("yi-34b-a100-tp2"), 2, QUESTION.ways)
    assert len(pairs([verdict(4, 1.0), verdict(1, 1.0)], QUESTION)) == 4


def test_kinds_are_judged_by_what_the_likeliest_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other degrees must hold a share of it, other budgets more than the first one."""
    asked: list[tuple[str, float]] = []

    def judge(candidate: Candidate, *rest: object) -> CandidateResult:
        least_qps = rest[-1]
        assert isinstance(least_qps, float)
        asked.append((candidate.label, least_qps))
        found = verdict(candidate.tensor_ranks, 1.0 * candidate.num_devices)
        return replace(found, candidate=candidate) if candidate.tensor_ranks < 4 else verdict(4, 0)

    monkeypatch.setattr(kinds, "judge", judge)
    question = replace(QUESTION, num_gpus=8)
    options = [c for c in candidates("yi-34b/a100") if c.num_stages == 1 and c.num_devices < 8]
    judge_kinds(options, question)
    (first, least_qps), *others = asked[:3]
    assert least_qps == 0.0
    assert first.startswith(("TP1", "TP2", "TP4"))
    assert all(qps >= KEPT * (1 if name.startswith("TP1") else 2) for name, qps in others)
    assert {name for name, _ in asked[:3]} == {f"TP{n} PP1 sarathi adaptive" for n in (1, 2, 4)}
    assert len(asked) > 3
    assert all("fixed" in name and qps > 1.0 for name, qps in asked[3:])
