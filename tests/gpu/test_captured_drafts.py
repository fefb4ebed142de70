"""Steps with drafts in CUDA graphs: a slice with drafts is a short chunk that draws in all rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Grammar, Request, SamplingParams
from actors.stage.runner import StageRunner
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import Execute, chain, make_runner
from tests.actors.stage.test_speculation import BASE, Answer, serve
from tests.gpu.captures import EagerCapture

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels; see test_gpu_stage"
)
LENGTH = 7
SPEC = {"max_requests": 4, "graph_tokens": 32, "max_model_len": 64}
CONFIG = replace(BASE, max_requests=4, max_model_len=64, token_budget=16)
KINDS = (
    SamplingParams(LENGTH),
    SamplingParams(LENGTH, temperature=0.8, seed=3, top_p=0.9, logprobs=2),
    SamplingParams(LENGTH, temperature=1.2, seed=5, presence_penalty=1.5),
    SamplingParams(LENGTH, repetition_penalty=1.4, logprobs=1, prompt_logprobs=0),
)


def requests() -> list[Request]:
    prompts = make_prompts((3, 5, 9, 6))
    return [
        Request(i + 1, tuple(p), s, 0.0)
        for i, (p, s) in enumerate(zip(prompts, KINDS, strict=True))
    ]


def captured(folder: Path, **spec: object) -> tuple[StageRunner, EagerCapture]:
    runner, capture = make_runner(folder, backend="triton", **{**SPEC, **spec}), EagerCapture()
    runner.capture(capture)
    return runner, capture


def noting(execute: Execute, results: list[tuple[StepPlan, StepResult]]) -> Execute:
    def noted(plan: StepPlan) -> StepResult:
        results.append((plan, execute(plan)))
        return results[-1][1]

    return noted


def check_equal(answers: dict[int, Answer], wanted: dict[int, Answer]) -> None:
    for request_id, answer in wanted.items():
        given = answers[request_id]
        assert (given.tokens, given.reason) == (answer.tokens, answer.reason)
        for ours, theirs in zip(given.logprobs, answer.logprobs, strict=True):
            assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_answers_are_those_without_drafts(
    tiny_model: Callable[..., Path], num_stages: int
) -> None:
    """For every kind of sampling, drafts right and wrong; every step is one replay."""
    config, folder = replace(CONFIG, num_stages=num_stages), tiny_model("llama")
    plain, _, _ = serve(CONFIG, chain([make_runner(folder, **SPEC)]), requests=requests())
    stages = [captured(folder, num_stages=num_stages, stage=s) for s in range(num_stages)]
    execute = chain([runner for runner, _ in stages])
    drafted = replace(config, drafter="lookup", max_drafts=3)
    answers, core, plans = serve(drafted, execute, plain, requests())
    check_equal(answers, plain)
    assert 0 < core.outcomes.num_accepted_drafts < core.speculation.num_drafts
    assert any(len(plan.drafts) < len(plan.slices) for plan in plans if plan.drafts)
    num_steps = sum(bool(plan.slices) for plan in plans)
    assert [capture.num_replays for _, capture in stages] == [num_steps] * num_stages


def test_what_a_grammar_forces_is_drafted(tiny_model: Callable[..., Path]) -> None:
    """A captured step offers it, and the next one is captured too."""
    grammar = Grammar("regex", r"[a-c]123456[a-c]123456")
    sampling = SamplingParams(16, temperature=1.0, seed=4, grammar=grammar)
    todo = [Request(1, tuple(make_prompts((5,))[0]), sampling, 0.0)]
    folder = tiny_model("llama")
    plain, _, _ = serve(CONFIG, chain([make_runner(folder, **SPEC)]), requests=todo)
    runner, capture = captured(folder)
    results: list[tuple[StepPlan, StepResult]] = []
    drafted = replace(CONFIG, drafter="lookup", max_drafts=4)
    answers, core, plans = serve(drafted, noting(chain([runner]), results), requests=todo)
    check_equal(answers, plain)
    assert any(result.drafts_offered for _, result in results)
    assert core.outcomes.num_accepted_drafts > 4
    assert capture.num_replays == sum(bool(plan.slices) for plan in plans)
