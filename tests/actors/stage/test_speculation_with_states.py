"""The same bytes with and without drafts of models whose layers keep a state: a slice with a wrong
draft is computed again from the state before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Request, SamplingParams
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import Execute as Run
from tests.actors.stage.mini_planner import make_chain
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.test_speculation import BASE, LENGTH, NUM_BLOCKS, serve

Folder = Callable[..., Path]
PLAIN = replace(BASE, num_saved_states=8, swap="never")
# Each further token of a step is cheap, so that drafts pay also where some are wrong.
COSTS = {"name": "toy", "tokens_s": [[1, 0.010], [64, 0.011]], "per_request_s": 0.0}
DRAFTED = replace(PLAIN, drafter="lookup", cost_model=COSTS)


def redone(plans: Sequence[StepPlan]) -> list[tuple[int, int]]:
    """Of each decode that computed known tokens again: how many, and how many drafts it had."""
    found, computed = [], dict[int, int]()
    for plan in plans:
        drafts = dict(plan.drafts)
        for start in plan.started:
            computed.pop(start.request_id, None)
        for request_id, start, length, samples in plan.slices:
            num_drafts = len(drafts.get(request_id, ()))
            if start < computed.get(request_id, 0):
                assert samples
                found.append((length - num_drafts - 1, num_drafts))
            computed[request_id] = start + length
    return found


def check(
    plain: SchedulerConfig, drafted: SchedulerConfig, execute: Callable[[], Run],
    requests: Sequence[Request] | None = None,
) -> list[StepPlan]:  # fmt: skip
    """Equal answers, of drafts that are right and of others. Returns the plans."""
    expected, _, _ = serve(plain, execute(), requests=requests)
    found, core, plans = serve(drafted, execute(), expected, requests)
    assert found == expected
    assert 0 < core.outcomes.num_accepted_drafts < core.speculation.num_drafts
    assert redone(plans), "no draft was wrong behind a right one"
    return plans


FAMILIES = (
    "qwen3-next", "qwen3-5", "qwen3-5-moe", "lfm2", "lfm2-moe", "granite-4", "nemotron-h",
    "nemotron-3", "bamba", "falcon-h1",
)  # fmt: skip


@pytest.mark.parametrize("variant", FAMILIES)
def test_equal_bytes_of_every_family(tiny_model: Folder, variant: str) -> None:
    skip_unless_available("cpu")
    folder = tiny_model(variant)
    plans = check(PLAIN, DRAFTED, lambda: make_chain(folder, 1, NUM_BLOCKS, backend="cpu"))
    assert any(num_redone and num_drafts for num_redone, num_drafts in redone(plans))


CHANGES: dict[str, dict[str, object]] = {
    "no lookahead": {"lookahead": False},
    "no cost model": {"cost_model": None},
    "small KV": {"num_blocks": 40},
    "small KV, no cache": {
        "num_blocks": 40, "prefix_cache": False, "num_saved_states": 0, "watermark": 0.0,
    },
    "small chunks": {"token_budget": 15},
    "small buffers": {"token_budget": 15, "max_requests": 8, "max_step_tokens": 23},
    "vllm": {"policy": "vllm"},
    "mlfq": {"policy": "mlfq"},
    "two stages": {"num_stages": 2},
    "two stages, small KV": {"num_stages": 2, "num_blocks": 40},
    "three stages, uniform": {"num_stages": 3, "micro_batches": "uniform"},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_equal_bytes_under_any_schedule(tiny_model: Folder, name: str) -> None:
    skip_unless_available("cpu")
    config = replace(DRAFTED, **CHANGES[name])  # type: ignore[arg-type]
    num_stages, folder = config.num_stages, tiny_model("qwen3-5")
    plans = check(
        replace(PLAIN, num_stages=num_stages),
        config,
        lambda: make_chain(folder, num_stages, NUM_BLOCKS, backend="cpu"),
    )
    started = [start.request_id for plan in plans for start in plan.started]
    if config.num_blocks < NUM_BLOCKS:
        assert len(started) > len(set(started)), "no request was preempted"


@pytest.mark.parametrize("num_stages", [1, 2])
def test_equal_bytes_beside_a_long_prefill(tiny_model: Folder, num_stages: int) -> None:
    skip_unless_available("cpu")
    folder = tiny_model("lfm2")
    sampling = SamplingParams(2 * LENGTH, temperature=1.0)
    requests = [
        Request(i, tuple(p), replace(sampling, seed=i), 0.0)
        for i, p in enumerate(make_prompts((3, 9, 17, 30)))
    ]
    requests.append(Request(200, tuple(make_prompts((200,))[0]), sampling, 0.0))
    chunks = {"chunks": "dynamic", "high": 32, "low": 32}
    plans = check(
        replace(PLAIN, num_stages=num_stages, policy_options=chunks),
        replace(DRAFTED, num_stages=num_stages, policy_options=chunks),
        lambda: make_chain(folder, num_stages, NUM_BLOCKS, backend="cpu"),
        requests,
    )
    beside = [p for p in plans if p.drafts and any(i == 200 for i, *_ in p.slices)]
    assert redone(beside)


@pytest.mark.parametrize(("variant", "num_stages"), [("qwen3-5", 1), ("granite-4", 2)])
def test_equal_bytes_on_two_ranks(
    ranks: RankPool, tiny_model: Folder, variant: str, num_stages: int
) -> None:
    skip_unless_available("cpu")
    folder = tiny_model(variant)

    def execute() -> Run:
        ranks.make(folder, num_stages, NUM_BLOCKS, backend="cpu")
        return ranks.execute

    plain, drafted = (replace(c, num_stages=num_stages) for c in (PLAIN, DRAFTED))
    check(plain, drafted, execute)


def test_a_step_repeated_gives_the_same(tiny_model: Folder) -> None:
    skip_unless_available("cpu")
    folder = tiny_model("granite-4")

    def execute() -> Run:
        run = make_chain(folder, 1, NUM_BLOCKS, backend="cpu")

        def twice(plan: StepPlan) -> StepResult:
            first = run(plan)
            assert run(plan) == first
            return first

        return twice

    check(PLAIN, DRAFTED, execute)


@pytest.mark.parametrize("mended", [False, True])
def test_a_model_without_states_drafts_for_one_with_states(
    tiny_model: Folder, mended: bool
) -> None:
    """Another family is hardly ever right; mended: what it offers, two times of three."""
    skip_unless_available("cpu")
    folder = tiny_model("qwen3-5")
    options = {"backend": "cpu", "draft_model_path": str(tiny_model("llama")), "max_drafts": 4}
    expected, _, _ = serve(PLAIN, make_chain(folder, 1, NUM_BLOCKS, backend="cpu"))
    run, known = make_chain(folder, 1, NUM_BLOCKS, **options), Counter[int]()

    def execute(plan: StepPlan) -> StepResult:
        result = run(plan)
        known.update(request_id for request_id, _ in result.tokens)
        known.update({request_id: len(tokens) for request_id, tokens in result.extra_tokens})
        if not mended:
            return result
        offered = []
        for request_id, tokens in result.drafts_offered:
            first = known[request_id]
            right = expected[request_id].tokens[first : first + len(tokens)]
            offered.append((request_id, tuple(right) if plan.step_id % 3 else tokens))
        return replace(result, drafts_offered=tuple(offered))

    config = replace(PLAIN, drafter="model", draft_model="small", max_drafts=4)
    found, core, plans = serve(config, execute)
    assert found == expected
    accepted = core.outcomes.num_accepted_drafts / core.speculation.num_drafts
    assert 0.3 < accepted < 1.0 if mended else accepted < 0.1
    assert redone(plans)


def test_stages_lost_and_steps_failed_between(tiny_model: Folder) -> None:
    """What is known is computed again, from its beginning, by the same stages or by new ones."""
    skip_unless_available("cpu")
    folder = tiny_model("nemotron-h")

    def make() -> Run:
        return make_chain(folder, 1, NUM_BLOCKS, backend="cpu")

    expected, _, _ = serve(PLAIN, make())
    faults = {9: None, 14: make, 31: None, 52: make}
    found, core, plans = serve(DRAFTED, make(), expected, faults=faults)
    assert found == expected
    assert len([p for p in plans if p.started]) > len(expected)
    assert core.outcomes.num_accepted_drafts > 0
    assert redone(plans)
