"""Steps as the scheduler sends them: repeats, restarts, copies, log-probabilities, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import SamplingParams
from actors.stage.runner import StageRunner
from kernels.token_counts import TokenCounts
from tests import tiny_models
from tests.actors.stage.greedy_reference import (
    GREEDY,
    expected,
    make_prompts,
    skip_unless_available,
)
from tests.actors.stage.mini_planner import MiniPlanner, chain, make_chain, make_runner

PROMPT = tuple(make_prompts((21,))[0])
BLOCKS = tuple(range(3, 19))


def start(request_id: int = 1, sampling: SamplingParams = GREEDY, **more: object) -> RequestStart:
    given = {"tokens": PROMPT, "num_prompt_tokens": len(PROMPT), "block_ids": BLOCKS, **more}
    return RequestStart(request_id, sampling=sampling, **given)  # type: ignore[arg-type]


def run(runner: StageRunner, plan: StepPlan) -> StepResult:
    result = runner.execute(plan, None)
    assert isinstance(result, StepResult)
    return result


def continue_greedily(runner: StageRunner, position: int, count: int, step: int = 100) -> list[int]:
    """Decode `count` tokens of request 1, whose token at `position` is known to the stage."""
    tokens = []
    for i in range(count):
        result = run(runner, StepPlan(step + i, (Slice(1, position + i, 1, True),)))
        tokens.append(result.tokens[0][1])
    return tokens


def reference(count: int, prompt: Sequence[int] = PROMPT, variant: str = "llama") -> list[int]:
    model = tiny_models.build(variant)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return ids[0, len(prompt) :].tolist()


def test_a_step_may_be_repeated(tiny_model: Callable[..., Path]) -> None:
    """Every step three times, block growth included: the same tokens as once."""

    def repeat(plan: StepPlan) -> StepResult:
        first, *again = (execute(plan) for _ in range(3))
        assert all(other == first for other in again)
        return first

    execute = make_chain(tiny_model("llama"), 1, 40)
    planner = MiniPlanner(repeat, num_blocks=40)
    assert planner.run(make_prompts(), GREEDY) == expected("llama")
    assert planner.num_preemptions > 0


def test_a_repeated_step_with_swaps(tiny_model: Callable[..., Path]) -> None:
    """The first attempt overwrites the blocks it swapped out; the second must not swap again."""
    runner = make_runner(tiny_model("llama"), 26, 64)
    planner = MiniPlanner(
        lambda plan: [run(runner, plan) for _ in range(2)][-1], num_blocks=26, num_host_blocks=64
    )
    assert planner.run(make_prompts(), GREEDY) == expected("llama")
    assert planner.num_preemptions > 2


def test_tokens_known_before_any_plan_tells(tiny_model: Callable[..., Path]) -> None:
    """One stage keeps what it samples: decode slices need no feeding."""
    runner = make_runner(tiny_model("llama"))
    first = run(runner, StepPlan(0, (Slice(1, 0, 21, True),), started=(start(),)))
    assert [first.tokens[0][1], *continue_greedily(runner, 21, 9)] == reference(10)


def test_replay_behind_delivered_output(tiny_model: Callable[..., Path]) -> None:
    """A new stage is given prompt and output so far, and goes on as the old one would have."""
    want = reference(12)
    runner = make_runner(tiny_model("llama"))
    replayed = start(tokens=PROMPT + tuple(want[:5]))
    chunks = (Slice(1, 0, 16, False), Slice(1, 16, 10, True))
    run(runner, StepPlan(0, chunks[:1], started=(replayed,)))
    sixth = run(runner, StepPlan(1, chunks[1:])).tokens[0][1]
    assert [sixth, *continue_greedily(runner, 26, 6)] == want[5:]


def test_a_released_request_is_unknown_and_may_start_anew(tiny_model: Callable[..., Path]) -> None:
    runner = make_runner(tiny_model("llama"))
    run(runner, StepPlan(0, (Slice(1, 0, 21, True),), started=(start(),)))
    run(runner, StepPlan(1, (), released=(1,)))
    with pytest.raises(KeyError, match="request 1 is not known"):
        run(runner, StepPlan(2, (Slice(1, 21, 1, True),)))
    again = run(runner, StepPlan(3, (Slice(1, 0, 21, True),), started=(start(),)))
    assert again.tokens[0][1] == reference(1)[0]


@pytest.mark.parametrize("variant", ["llama", "falcon-alibi-12"])
def test_shared_prefix_and_copies(tiny_model: Callable[..., Path], variant: str) -> None:
    """A second request starts on the first one's blocks; the half-filled one is its own copy."""
    want = reference(10, variant=variant)
    runner = make_runner(tiny_model(variant))  # 21 tokens fill 5 blocks of 4 and begin a sixth
    run(runner, StepPlan(0, (Slice(1, 0, 21, True),), started=(start(),)))
    twin = start(2, block_ids=(*BLOCKS[:5], 50, 51, 52))
    plan = StepPlan(1, (Slice(1, 21, 1, True), Slice(2, 20, 1, True)), copies=((BLOCKS[5], 50),),
                    started=(twin,))  # fmt: skip
    assert run(runner, plan).tokens == ((1, want[1]), (2, want[0]))
    for i in range(1, 8):
        plan = StepPlan(1 + i, (Slice(1, 21 + i, 1, True), Slice(2, 20 + i, 1, True)))
        assert run(runner, plan).tokens == ((1, want[1 + i]), (2, want[i]))


def test_released_first_then_started(tiny_model: Callable[..., Path]) -> None:
    """More lives than rows, one after another, and one id used again in the same plan."""
    runner = make_runner(tiny_model("llama"), max_requests=1)
    want = reference(1)[0]
    for step in range(5):
        plan = StepPlan(step, (Slice(1, 0, 21, True),), released=(1,), started=(start(),))
        assert run(runner, plan).tokens == ((1, want),)


def test_more_requests_than_promised(tiny_model: Callable[..., Path]) -> None:
    runner = make_runner(tiny_model("llama"), max_requests=2, num_blocks=256)
    planner = MiniPlanner(chain([runner]), chunk=64, budget=256)
    assert planner.run(make_prompts(), GREEDY) == expected("llama")


def test_step_without_slices(tiny_model: Callable[..., Path]) -> None:
    first = make_runner(tiny_model("llama"), num_stages=2, stage=0)
    last = make_runner(tiny_model("llama"), num_stages=2, stage=1)
    hidden = first.execute(StepPlan(0, ()), None)
    assert isinstance(hidden, torch.Tensor)
    assert hidden.shape == (0, 64)
    assert last.execute(StepPlan(0, ()), hidden) == StepResult(0, ())


def test_hidden_states_are_not_touched(tiny_model: Callable[..., Path]) -> None:
    """They may lie in a channel's read-only buffer, and a repeated step needs them again."""
    first = make_runner(tiny_model("llama"), num_stages=2, stage=0)
    last = make_runner(tiny_model("llama"), num_stages=2, stage=1)
    plan = StepPlan(0, (Slice(1, 0, 21, True),), started=(start(),))
    hidden = first.execute(plan, None)
    assert isinstance(hidden, torch.Tensor)
    before = hidden.clone()
    results = [last.execute(plan, hidden) for _ in range(2)]
    assert results[0] == results[1]
    assert torch.equal(hidden, before)
    with pytest.raises(ValueError, match="21 rows of hidden states expected, 20 given"):
        last.execute(replace(plan, step_id=1), hidden[:20])


def test_errors_of_the_scheduler_are_named(tiny_model: Callable[..., Path]) -> None:
    runner = make_runner(tiny_model("llama"))
    with pytest.raises(ValueError, match="request 7 has 300 tokens; the stage has room for 256"):
        run(runner, StepPlan(0, (), started=(start(7, tokens=(1,) * 300),)))
    with pytest.raises(ValueError, match="request 7 has 65 blocks; 64 fit a row"):
        run(runner, StepPlan(1, (), started=(start(7, block_ids=tuple(range(65))),)))
    run(runner, StepPlan(2, (), started=(start(),)))
    message = "request 1 has 16 blocks of 4 tokens; its slice reaches position 65"
    past = StepPlan(3, (Slice(2, 0, 21, True), Slice(1, 60, 5, True)), started=(start(2),))
    with pytest.raises(ValueError, match=message):
        run(runner, past)
    # A step fails before the table is extended: the blocks that it brought are missing.
    run(runner, StepPlan(5, (Slice(1, 63, 1, True),)))
    following, long = (Slice(1, 64, 1, True),), start(7, tokens=(1,) * 300)
    with pytest.raises(ValueError, match="request 7 has 300 tokens"):
        run(runner, StepPlan(6, following, started=(long,), new_blocks=((1, (20,)),)))
    with pytest.raises(ValueError, match=message):
        run(runner, StepPlan(7, following))
    loaded = StageRunner(runner.spec)
    with pytest.raises(RuntimeError, match="allocate the KV cache"):
        run(loaded, StepPlan(0, ()))


def test_min_tokens_and_logit_bias(tiny_model: Callable[..., Path]) -> None:
    """A stop token made irresistible comes at once, or first after min_tokens."""
    eager = replace(GREEDY, logit_bias=((tiny_models.EOS_TOKEN_ID, 100.0),))
    execute = make_chain(tiny_model("llama"))
    assert MiniPlanner(execute).run(make_prompts(), eager) == [[256]] * 7
    patient = replace(eager, min_tokens=5)
    outputs = MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts(), patient)
    assert all(len(output) == 6 and output.index(256) == 5 for output in outputs)


def test_repetition_penalty_equals_transformers(tiny_model: Callable[..., Path]) -> None:
    model = tiny_models.build("llama")
    prompt = make_prompts((40,))[0]
    ids = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        repetition_penalty=1.8,
    )
    penalized = replace(GREEDY, repetition_penalty=1.8)
    outputs = MiniPlanner(make_chain(tiny_model("llama"))).run([prompt], penalized)
    assert outputs == [ids[0, 40:].tolist()]
    assert outputs != MiniPlanner(make_chain(tiny_model("llama"))).run([prompt], GREEDY)


def test_penalties_count_a_prompt_once(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later draws of a request count what is new."""
    counted: list[int] = []
    begin = TokenCounts._begin

    def noted(self: TokenCounts, prompt: NDArray[np.int32]) -> None:
        counted.append(len(prompt))
        begin(self, prompt)

    monkeypatch.setattr(TokenCounts, "_begin", noted)
    lengths = (3, 13, 40)
    penalized = replace(GREEDY, repetition_penalty=1.8)
    run = make_chain(tiny_model("llama"))
    MiniPlanner(run).run(make_prompts(lengths), penalized)
    assert sorted(counted) == sorted(lengths)
    MiniPlanner(run).run(make_prompts(lengths), penalized)  # the same ids start again
    assert sorted(counted) == sorted(lengths * 2)


def test_sampled_tokens_do_not_depend_on_the_batch(tiny_model: Callable[..., Path]) -> None:
    """Another chunk size, other neighbors, preemption: the same draws."""
    warm = [
        SamplingParams(max_tokens=20, temperature=1.2, top_k=50, top_p=0.95, seed=s,
                       frequency_penalty=0.4)
        for s in range(7)
    ]  # fmt: skip
    together = MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts(), warm)
    tight = MiniPlanner(make_chain(tiny_model("llama"), 2, 26), num_blocks=26, chunk=5, feeds=True)
    assert tight.run(make_prompts(), warm) == together
    assert tight.num_preemptions > 2
    alone = [
        MiniPlanner(make_chain(tiny_model("llama"))).run([prompt], params)[0]
        for prompt, params in zip(make_prompts(), warm, strict=True)
    ]
    assert alone == together


# What scales logits (granite, gemma2, cohere) moves no greedy token.
@pytest.mark.parametrize(
    ("variant", "chunk"),
    [
        ("llama", 3),
        ("llama", 64),
        ("granite", 64),
        ("gemma2", 64),
        ("cohere", 64),
        ("minicpm3", 64),
    ],
)
def test_logprobs_equal_transformers(
    tiny_model: Callable[..., Path], variant: str, chunk: int
) -> None:
    """Of the prompt and of what is sampled, with ranks and alternatives."""
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    planner = MiniPlanner(make_chain(tiny_model(variant)), chunk=chunk)
    outputs = planner.run(make_prompts(), params)
    model = tiny_models.build(variant)
    for request_id, (prompt, output) in enumerate(zip(make_prompts(), outputs, strict=True)):
        whole = prompt + output
        with torch.no_grad():
            want = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        entries = {}
        for result in planner.results:
            for owner, first, several in result.prompt_logprobs:
                if owner == request_id:
                    entries |= {first + i: entry for i, entry in enumerate(several)}
        assert sorted(entries) == list(range(1, len(prompt)))
        sampled = [e for r in planner.results for owner, e in r.logprobs if owner == request_id]
        entries |= {len(prompt) + i: entry for i, entry in enumerate(sampled)}
        for position in range(1, len(whole)):
            entry, row = entries[position], want[position - 1]
            assert entry.token == whole[position]
            assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-4)
            assert entry.rank == 1 + int((row > row[entry.token]).sum())
            assert len(entry.top) == (2 if position < len(prompt) else 3)
            assert [t for t, _ in entry.top] == row.topk(len(entry.top)).indices.tolist()


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_embeddings_equal_transformers(
    tiny_model: Callable[..., Path], pooling: str, chunk: int, num_stages: int
) -> None:
    execute = make_chain(tiny_model("qwen3"), num_stages)

    def repeat(plan: StepPlan) -> StepResult:
        results = [execute(plan), execute(plan)]
        assert results[0] == results[1]
        return results[0]

    planner = MiniPlanner(repeat, chunk=chunk, feeds=num_stages > 1)
    assert planner.run(make_prompts(), GREEDY, pooling) == [[]] * 7
    pooled = dict(entry for result in planner.results for entry in result.pooled)
    model = tiny_models.build("qwen3")
    for request_id, prompt in enumerate(make_prompts()):
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
        want = hidden.mean(0) if pooling == "mean" else hidden[-1]
        assert torch.tensor(pooled[request_id]).allclose(want, atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_do_not_depend_on_chunks(tiny_model: Callable[..., Path], pooling: str) -> None:
    skip_unless_available("cpu")
    execute = make_chain(tiny_model("qwen3"), backend="cpu")
    found = []
    for chunk in (5, 64):
        planner = MiniPlanner(execute, chunk=chunk)
        planner.run(make_prompts(), GREEDY, pooling)
        found.append(dict(entry for result in planner.results for entry in result.pooled))
    assert found[0] == found[1]


def test_mean_of_a_cached_prefix_is_refused(tiny_model: Callable[..., Path]) -> None:
    runner = make_runner(tiny_model("llama"))
    plan = StepPlan(0, (Slice(1, 8, 13, False),), started=(start(pooling="mean"),))
    with pytest.raises(ValueError, match="needs its tokens from the first on"):
        run(runner, plan)


@pytest.mark.parametrize(("backend", "left"), [("cpu", 1), ("torch", 2)])
def test_a_backend_with_threads_of_its_own_has_no_others_beside_it(
    tiny_model: Callable[..., Path], backend: str, left: int
) -> None:
    """Once loaded: torch's threads spin after every operation that it spreads over them."""
    skip_unless_available(backend)
    before = torch.get_num_threads()
    try:
        make_runner(tiny_model("llama"), backend=backend, num_threads=2)
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)
