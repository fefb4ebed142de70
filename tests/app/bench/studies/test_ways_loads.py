"""The loads under which ways are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.bench.studies.ways_capacity import Case
from app.bench.studies.ways_loads import DATASETS, OBJECTIVES, requests_at, work_of
from app.simulate.paper.published import DATASETS as PAPER
from app.simulate.paper.published import DEPLOYMENTS


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d.model)
@pytest.mark.parametrize("dataset", PAPER)
def test_prompts_are_most_of_the_work_of_documents(deployment: Any, dataset: str) -> None:
    work = work_of(deployment.model, dataset)
    assert (work.prompt_s > 2.5 * work.output_s) == (dataset == "arxiv")


def test_objectives_are_apart() -> None:
    found = [Case(DEPLOYMENTS[0], "arxiv", slo, 4, 100, 0).tbt_s for slo in OBJECTIVES]
    assert found == pytest.approx([0.04, 0.1, 0.5])


def test_the_tight_one_has_two_steps_of_faster_pipelines_too() -> None:
    found = [Case(d, "arxiv", "tight", 4, 100, 0).tbt_s for d in DEPLOYMENTS]
    assert found == pytest.approx([0.04, 0.08, 0.252, 0.202], abs=0.001)


@pytest.mark.parametrize("dataset", DATASETS)
def test_requests_are_the_same_at_every_rate(dataset: str) -> None:
    slow, fast = (requests_at(qps, dataset, 300, 0) for qps in (1.0, 4.0))
    assert len(slow) == len(fast) == 300
    mean = [float(w.prompt_tokens.mean()) for w in (slow, fast)]
    assert mean[0] == pytest.approx(mean[1], rel=0.25), "turns of other conversations are left out"
    assert fast.at_rate(4.0).qps == pytest.approx(4.0)


def test_conversations_repeat_themselves_and_users_think_as_long_at_every_rate() -> None:
    for qps in (0.5, 8.0):
        load = requests_at(qps, "conversations", 600, 0)
        turns = [np.flatnonzero(load.sessions == session) for session in range(40)]
        pauses = np.concatenate([np.diff(load.arrival_s[turn]) for turn in turns])
        assert pauses.mean() == pytest.approx(20.0, rel=0.25)
        for turn in turns:
            told = load.prompt_tokens[turn] + load.output_tokens[turn]
            assert load.shared_tokens[turn][1:].tolist() == told[:-1].tolist()
            assert not len(turn) or load.shared_tokens[turn[0]] == 0


def test_both_datasets_are_in_the_mixed_one() -> None:
    prompts = requests_at(1.0, "mixed", 2000, 0).prompt_tokens
    medians = [np.median(requests_at(1.0, name, 2000, 0).prompt_tokens) for name in PAPER]
    assert medians[0] * 1.2 < np.median(prompts) < medians[1] * 0.8
