"""The same bytes with and without drafts: the real core on real stages, all kinds of sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.events import (
    Emit,
    Event,
    Execute,
    PipelineLost,
    StepDone,
    StepFailed,
    Submit,
)
from actors.scheduling.plan import StepPlan, TokenLogprobs
from actors.scheduling.request import FinishReason, Request, SamplingParams
from actors.scheduling.validation import validate
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import Execute as Run
from tests.actors.stage.mini_planner import make_chain
from tests.actors.stage.rank_pool import RankPool
from tests.tiny_models import EOS_TOKEN_ID

NUM_BLOCKS, LENGTH = 256, 20
BASE = SchedulerConfig(num_blocks=NUM_BLOCKS, block_size=4, max_model_len=256, token_budget=64)

KINDS = (
    SamplingParams(LENGTH),
    SamplingParams(LENGTH, temperature=0.7, seed=11, logprobs=2),
    SamplingParams(LENGTH, temperature=1.5, seed=12, top_k=20),
    SamplingParams(LENGTH, temperature=1.0, seed=13, top_p=0.8, logprobs=0),
    SamplingParams(LENGTH, temperature=0.9, seed=14, min_p=0.05, min_tokens=9,
                   stop_token_ids=(EOS_TOKEN_ID, *range(0, 200, 3))),
    SamplingParams(LENGTH, repetition_penalty=1.4, presence_penalty=0.5, logprobs=3),
    SamplingParams(LENGTH, temperature=0.8, seed=15, frequency_penalty=1.0, prompt_logprobs=1),
    SamplingParams(LENGTH - 7, temperature=0.3, seed=16, logit_bias=((7, 4.0), (9, -100.0))),
    SamplingParams(1),
)  # fmt: skip


def make_requests() -> list[Request]:
    """Every kind of sampling, prompts that repeat themselves, and three answers to one prompt."""
    prompts = [p * 2 for p in make_prompts((1, 2, 5, 9, 13, 16, 21, 30, 33))]
    found = [
        Request(i, tuple(p), s, 0.0) for i, (p, s) in enumerate(zip(prompts, KINDS, strict=True))
    ]
    for seed in range(3):
        sampling = SamplingParams(LENGTH, temperature=0.6, seed=seed)
        prompt = tuple(prompts[4])
        found.append(Request(100 + seed, prompt, sampling, 0.0, group="n"))
    return found


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: tuple[TokenLogprobs | None, ...] = ()
    reason: FinishReason | None = None


class Known:
    """Drafts the right answer, but for every `wrong`-th token."""

    acceptance_rate = 0.95
    rest = 0

    def __init__(self, answer: Answer, wrong: int) -> None:
        self._tokens, self._wrong, self._known = answer.tokens, wrong, 0

    def follow(self, output: list[int]) -> bool:
        self._known = len(output)
        return True

    def draft(self, most: int) -> tuple[int, ...]:
        first = self._known
        tokens = self._tokens[first : first + most]
        return tuple((t + 1) % 256 if (first + k) % self._wrong == 0 else t
                     for k, t in enumerate(tokens))  # fmt: skip


def serve(
    config: SchedulerConfig,
    execute: Run,
    known: dict[int, Answer] | None = None,
    requests: Sequence[Request] | None = None,
    faults: Mapping[int, Callable[[], Run] | None] | None = None,
) -> tuple[dict[int, Answer], Core, list[StepPlan]]:
    """The answers of a core on these stages; `known` gives some requests drafts of other rates.
    faults: by step, what makes the stages that take the place of lost ones, or None: it failed."""
    core = build_core(config)
    requests = make_requests() if requests is None else requests
    answers = {request.request_id: Answer() for request in requests}
    waiting, plans = deque[StepPlan](), list[StepPlan]()

    def send(event: Event) -> None:
        for instruction in core.handle(event, 0.0):
            if isinstance(instruction, Execute):
                waiting.append(instruction.plan)
                plans.append(instruction.plan)
            elif isinstance(instruction, Emit):
                for output in instruction.outputs:
                    answer = answers[output.request_id]
                    assert output.index == len(answer.tokens)
                    answer.tokens += output.tokens
                    answer.logprobs += output.logprobs
                    answer.prompt = answer.prompt or output.prompt_logprobs
                    answer.reason = output.finish_reason
        validate(core)

    for request in requests:
        send(Submit(request))
        state = core.requests.by_id.get(request.request_id)
        if known is not None and state is not None and request.request_id % 4:
            answer = known[request.request_id]
            state.drafter = Known(answer, 2 + request.request_id % 5)  # type: ignore[assignment]
    faults = faults or {}
    while waiting:
        plan = waiting.popleft()
        if plan.step_id not in faults:
            send(StepDone(execute(plan)))
        elif (make := faults[plan.step_id]) is None:
            execute(plan)
            send(StepFailed(plan.step_id, "its answer is lost"))
        else:
            waiting.clear()
            execute = make()
            send(PipelineLost())
    assert core.is_idle
    blocks = core.requests.running.block_manager
    assert blocks.num_free == config.num_blocks, "a block leaked"
    return answers, core, plans


def check(execute: Callable[[], Run], exact: bool = True, **changes: object) -> None:
    """With drafts as without; in bits where the backend rounds alike in every batch."""
    plain, _, _ = serve(replace(BASE, num_stages=changes.get("num_stages", 1)), execute())  # type: ignore[arg-type]
    config = replace(BASE, drafter="lookup", **changes)  # type: ignore[arg-type]
    drafted, core, plans = serve(config, execute(), plain)
    if exact:
        assert drafted == plain
    else:
        assert {i: (a.tokens, a.reason) for i, a in drafted.items()} == {
            i: (a.tokens, a.reason) for i, a in plain.items()
        }
    assert 0 < core.outcomes.num_accepted_drafts < core.speculation.num_drafts
    with_and_without = [p for p in plans if p.drafts and len(p.drafts) < len(p.slices)]
    assert with_and_without, "no step held requests with drafts and without"


CHANGES: dict[str, dict[str, object]] = {
    "default": {},
    "no lookahead": {"lookahead": False},
    "small KV": {"num_blocks": 40},
    "small KV, no cache": {"num_blocks": 40, "prefix_cache": False, "watermark": 0.0},
    "small chunks": {"token_budget": 15},
    "few drafts": {"max_drafts": 1},
    "orca": {"policy": "orca"},
    "vllm": {"policy": "vllm"},
    "mlfq": {"policy": "mlfq"},
    "two stages": {"num_stages": 2},
    "two stages, small KV": {"num_stages": 2, "num_blocks": 40},
}


@pytest.mark.parametrize("name", CHANGES)
def test_equal_bytes_on_the_cpu_library(tiny_model: Callable[..., Path], name: str) -> None:
    skip_unless_available("cpu")
    changes = CHANGES[name]
    num_stages = changes.get("num_stages", 1)

    def execute() -> Run:
        folder = tiny_model("llama")
        return make_chain(folder, num_stages, NUM_BLOCKS, backend="cpu")  # type: ignore[arg-type]

    check(execute, **changes)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_equal_bytes_beside_a_long_prefill(
    tiny_model: Callable[..., Path], num_stages: int
) -> None:
    """Chunks of a prompt that takes many steps, and drafts of the others in the same steps."""
    skip_unless_available("cpu")
    long = Request(200, tuple(make_prompts((200,))[0]), SamplingParams(LENGTH), 0.0)
    requests = [*make_requests(), long]
    chunks = {"chunks": "dynamic", "high": 32, "low": 32}
    answers, beside = [], 0
    for drafter in ("none", "lookup"):
        run = make_chain(tiny_model("llama"), num_stages, NUM_BLOCKS, backend="cpu")
        config = replace(BASE, num_stages=num_stages, drafter=drafter, policy_options=chunks)
        known = answers[0] if answers else None
        found, _, plans = serve(config, run, known, requests)
        answers.append(found)
        beside = sum(bool(p.drafts) and any(i == 200 for i, *_ in p.slices) for p in plans)
    assert answers[0] == answers[1]
    assert beside > 3


@pytest.mark.parametrize("name", ["default", "two stages, small KV"])
def test_equal_tokens_on_torch(tiny_model: Callable[..., Path], name: str) -> None:
    changes = CHANGES[name]
    num_stages = changes.get("num_stages", 1)
    check(
        lambda: make_chain(tiny_model("qwen3"), num_stages, NUM_BLOCKS),  # type: ignore[arg-type]
        exact=False,
        **changes,
    )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_equal_tokens_on_two_ranks(
    ranks: RankPool, tiny_model: Callable[..., Path], num_stages: int
) -> None:
    def execute() -> Run:
        ranks.make(tiny_model("llama"), num_stages, NUM_BLOCKS, backend="cpu")
        return ranks.execute

    skip_unless_available("cpu")
    check(execute, num_stages=num_stages)


def test_a_step_repeated_gives_the_same(tiny_model: Callable[..., Path]) -> None:
    """A step with drafts may be executed again: its first answer has overwritten wrong drafts."""
    skip_unless_available("cpu")
    once = make_chain(tiny_model("llama"), 1, NUM_BLOCKS, backend="cpu")
    plain, _, _ = serve(BASE, once)
    run = make_chain(tiny_model("llama"), 1, NUM_BLOCKS, backend="cpu")

    def twice(plan: StepPlan) -> object:
        first = run(plan)
        assert run(plan) == first
        return first

    drafted, core, _ = serve(replace(BASE, drafter="lookup"), twice, plain)  # type: ignore[arg-type]
    assert drafted == plain
    assert core.outcomes.num_accepted_drafts > 0
