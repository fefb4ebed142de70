"""Rows of states: a step that is repeated reads what it read, and requests do not mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import SamplingParams
from actors.stage.runner import StageRunner
from tests.actors.stage.greedy_reference import (
    GREEDY,
    expected,
    make_prompts,
    skip_unless_available,
)
from tests.actors.stage.mini_planner import MiniPlanner, chain, make_chain, make_runner


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_steps_that_are_executed_twice(tiny_model: Callable[..., Path], backend: str) -> None:
    runner = make_runner(tiny_model("qwen3-5"), 26, backend=backend)

    def twice(plan: StepPlan, hidden_TH: torch.Tensor | None) -> object:
        first = runner.execute(plan, hidden_TH)
        second = runner.execute(plan, hidden_TH)
        assert first == second
        return second

    planner = MiniPlanner(lambda plan: twice(plan, None), num_blocks=26, chunk=5)  # type: ignore[arg-type, return-value]
    assert planner.run(make_prompts(), GREEDY) == expected("qwen3-5")
    assert planner.num_preemptions > 0


def test_a_stage_without_attention_needs_no_blocks(tiny_model: Callable[..., Path]) -> None:
    runners = [make_runner(tiny_model("qwen3-5"), num_stages=3, stage=s) for s in range(3)]
    assert [runner.info.kv_block_bytes > 0 for runner in runners] == [False, False, True]
    assert [runner.info.state_bytes > 0 for runner in runners] == [True, True, False]
    answers = MiniPlanner(chain(runners), chunk=16, feeds=True).run(make_prompts(), GREEDY)
    assert answers == expected("qwen3-5")


def test_memory_of_a_request(tiny_model: Callable[..., Path]) -> None:
    """Three rows, in two layers: a convolution's last 3 inputs of 2 * 16 + 48 channels, and 4
    matrices of 8 x 12."""
    info = make_runner(tiny_model("qwen3-5")).info
    assert info.state_bytes == 3 * 2 * (3 * 80 + 4 * 8 * 12) * 4


def test_more_requests_than_states(tiny_model: Callable[..., Path]) -> None:
    runner = make_runner(tiny_model("lfm2"))
    runner.allocate(64, num_requests=1)
    starts = [RequestStart(i, (1, 2, 3), 3, (i,), SamplingParams(max_tokens=4)) for i in range(2)]
    one, two = (tuple(Slice(i, 0, 3, True) for i in range(n)) for n in (1, 2))
    assert step(runner, 0, starts[:1], one)
    with pytest.raises(ValueError, match="2 requests; 1 have states"):
        step(runner, 1, starts, two)


def step(
    runner: StageRunner, step_id: int, starts: list[RequestStart], slices: tuple[Slice, ...]
) -> StepResult:
    result = runner.execute(StepPlan(step_id, slices, started=tuple(starts)), None)
    assert isinstance(result, StepResult)
    return result


def test_a_step_that_was_dropped_changes_no_other(tiny_model: Callable[..., Path]) -> None:
    """As one launched ahead, where the plan that follows is another."""
    runner = make_runner(tiny_model("qwen3-5"))
    answers = []
    for drops in (False, True):
        start = RequestStart(0, (1, 2, 3), 3, (1, 2), SamplingParams(max_tokens=9))
        step(runner, 10 * drops, [start], (Slice(0, 0, 3, True),))
        if drops:
            step(runner, 10 * drops + 1, [], (Slice(0, 3, 1, True),))
        answers.append([step(runner, 10 * drops + 2, [], (Slice(0, 3, 1, True),)).tokens])
    assert answers[0] == answers[1]


def test_memory_that_was_measured_with_states_is_there_for_fewer(
    tiny_model: Callable[..., Path],
) -> None:
    class Memory:
        def peak_bytes(self, work: Callable[[], object]) -> int:
            work()
            return 1000

        def free_bytes(self) -> tuple[int, int]:
            return 1 << 20, 1 << 24

        def held_bytes(self) -> int:
            return 1 << 22

    runner = make_runner(tiny_model("qwen3-5"), max_requests=2, max_step_tokens=32)
    states = 2 * runner.info.state_bytes
    room = runner.profile(Memory(), None)
    assert room == ((1 << 20) - 1000 + states, 1 << 24, (1 << 22) + 1000 - states)
    runner.allocate(26, num_requests=2)
    answers = MiniPlanner(chain([runner]), num_blocks=26).run(make_prompts((3,)), GREEDY)
    assert answers == expected("qwen3-5", (3,))


@pytest.mark.parametrize("variant", ["qwen3-5", "lfm2", "granite-4"])
def test_a_token_has_the_same_bits_in_any_batch(
    tiny_model: Callable[..., Path], variant: str
) -> None:
    """Alone with its prompt in one chunk, and beside others in several."""
    skip_unless_available("cpu")
    prompts, sampling = make_prompts((5, 17, 40)), SamplingParams(max_tokens=6, logprobs=0)

    def logprobs(group: list[list[int]], chunk: int) -> list[list[float]]:
        execute = make_chain(tiny_model(variant), backend="cpu", dtype="bfloat16")
        planner = MiniPlanner(execute, chunk=chunk)
        planner.run(group, sampling)
        found: list[list[float]] = [[] for _ in group]
        for result in planner.results:
            for request_id, entry in result.logprobs:
                found[request_id].append(entry.logprob)
        return found

    alone = [logprobs([prompt], 64)[0] for prompt in prompts]
    assert {len(each) for each in alone} == {6}
    for chunk in (3, 64):
        assert logprobs(prompts, chunk) == alone
