"""Two tensor-parallel ranks launch captured steps ahead: each by itself, with the tokens of one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.events import Submit
from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import Grammar, Request, SamplingParams
from actors.stage.cuda.run_ahead import Following
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import make_runner
from tests.actors.stage.rank_pool import RankPool, RanksFailed
from tests.gpu import rank_watch
from tests.gpu.ahead_engine import LENGTHS, Engine, requests
from tests.gpu.two_layers import expected

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels; see test_gpu_stage"
)
TOKENS = 5
SIZES = {"max_requests": 4, "max_model_len": 64}
SPEC = {"backend": "triton", "graph_tokens": 16, **SIZES}
GREEDY = SamplingParams(TOKENS)


class Ranks:
    """As the engine drives them: a plan that is there is sent before its predecessor's answer."""

    def __init__(
        self, pool: RankPool, late: Callable[[int], Container[int]] = lambda step_id: ()
    ) -> None:
        """late: ranks that a step's successor reaches only after they have ended the step."""
        self._pool, self._late = pool, late
        self._sent = -1

    def execute(
        self, plan: StepPlan, hidden_TH: None, following: Following | None = None
    ) -> StepResult:
        if self._sent != plan.step_id:
            self._pool.send_plan(plan)
        upcoming = None if following is None else following(0.0)
        self._pool.send_plan(upcoming, self._late(plan.step_id))
        self._sent = -1 if upcoming is None else upcoming.step_id
        return self._pool.next_result()


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool(processes: RankPool, tiny_model: Callable[..., Path]) -> RankPool:
    processes.make(tiny_model("llama"), capture=True, **SPEC)
    return processes


def watched(pool: RankPool, engine: Engine, todo: list[Request]) -> list[rank_watch.Seen]:
    """What each rank did to answer these."""
    pool.call(rank_watch.watch)
    engine.answer(todo)
    seen: list[rank_watch.Seen] = pool.call(rank_watch.seen)
    assert seen[0].collectives == seen[1].collectives
    return seen


def greedy(number: int) -> list[int]:
    return expected("llama", LENGTHS)[number][:TOKENS]


def check_that_all_is_well(pool: RankPool) -> None:
    """What failed has left nothing behind."""
    engine = Engine(Ranks(pool))
    assert engine.answer(requests([SamplingParams(2)] * 3)) == [greedy(i)[:2] for i in range(3)]


def test_tokens_of_transformers(pool: RankPool) -> None:
    """Every rank launches steps ahead and waits once a step, for its tokens."""
    engine = Engine(Ranks(pool))
    for seen in watched(pool, engine, requests([GREEDY] * 3)):
        assert len(seen.ahead) >= TOKENS - 1
        assert seen.num_waits == engine.num_steps
        assert not seen.reads
        assert {name for name, *_ in seen.collectives} == {"all_reduce", "gather_all"}
    assert [engine.outputs[i] for i in range(3)] == [greedy(i) for i in range(3)]


def test_all_kinds_of_sampling_in_one_batch(
    pool: RankPool, tiny_model: Callable[..., Path]
) -> None:
    """Rows that need whole logits hold none back. Draws are those of one rank of plain torch, which
    waits."""
    kinds = [
        GREEDY,
        SamplingParams(TOKENS, temperature=1.1, seed=4),
        SamplingParams(TOKENS, temperature=0.9, seed=5, top_k=9, top_p=0.8, logprobs=2),
        SamplingParams(TOKENS, temperature=0.8, seed=6, presence_penalty=1.0, min_p=0.05),
        SamplingParams(
            TOKENS, temperature=1.0, seed=7, grammar=Grammar("regex", r"[a-c]{2}\d{9}"), logprobs=1
        ),
    ]
    prompts = make_prompts((LENGTHS[0], 3, 5, 2, 4))
    todo = [
        Request(i, tuple(p), s, 0.0) for i, (p, s) in enumerate(zip(prompts, kinds, strict=True))
    ]
    waiting = Engine(make_runner(tiny_model("llama"), **SIZES), lookahead=False)
    waiting.answer(todo)
    ahead = Engine(Ranks(pool))
    for seen in watched(pool, ahead, todo):
        assert len(seen.ahead) >= TOKENS
        assert seen.num_waits == ahead.num_steps
        assert seen.reads <= {"kernels.triton.logits"}  # of a grammar's mask, on the host
        assert sum(name == "broadcast" for name, *_ in seen.collectives) >= TOKENS
    assert ahead.outputs == waiting.outputs
    assert ahead.outputs[0] == greedy(0)
    assert ahead.logprobs.keys() == waiting.logprobs.keys() == {2, 4}
    for request_id, entries in waiting.logprobs.items():
        for ours, theirs in zip(ahead.logprobs[request_id], entries, strict=True):
            assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]


def test_a_plan_that_comes_late_to_one_rank(pool: RankPool) -> None:
    """That rank ends its step first and launches later, but the same."""
    kinds = [GREEDY, SamplingParams(TOKENS, top_k=5), GREEDY]  # the second is drawn after the graph
    engine = Engine(Ranks(pool, late=lambda step_id: ((), (1,), (0,))[step_id % 3]))
    first, second = watched(pool, engine, requests(kinds))
    assert [engine.outputs[i] for i in range(3)] == [greedy(i) for i in range(3)]
    assert set(first.ahead) - set(second.ahead)
    assert set(second.ahead) - set(first.ahead)


def test_steps_with_drafts_come_between(pool: RankPool) -> None:
    """They are launched ahead; what follows one waits until its drafts are compared."""
    prompt, answer = make_prompts(LENGTHS)[2], expected("llama", LENGTHS)[2]
    n, wrong = len(prompt), (answer[3] + 1) % 250
    start = RequestStart(7, tuple(prompt), n, tuple(range(6)), SamplingParams(8))
    plans = [
        StepPlan(0, (Slice(7, 0, n, True),), started=(start,)),
        StepPlan(1, (Slice(7, n, 1, True),)),
        StepPlan(2, (Slice(7, n + 1, 3, True),), drafts=((7, (answer[2], wrong)),)),
        StepPlan(3, (Slice(7, n + 3, 1, True),)),
        StepPlan(4, (Slice(7, n + 4, 1, True),)),
        StepPlan(5, (), released=(7,)),
    ]
    ranks, tokens = Ranks(pool), list[int]()
    pool.call(rank_watch.watch)
    for plan, upcoming in itertools.pairwise([*plans, None]):
        assert plan is not None
        result = ranks.execute(plan, None, lambda wait_s, upcoming=upcoming: upcoming)  # type: ignore[misc]
        tokens += [token for _, token in result.tokens]
        tokens += [token for _, extra in result.extra_tokens for token in extra]
    assert tokens == answer[:6]
    assert [seen.ahead for seen in pool.call(rank_watch.seen)] == [[1, 2, 4]] * 2


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_logits_of_one_rank_that_are_not_finite_end_their_requests(
    pool: RankPool, rank: int
) -> None:
    engine = Engine(Ranks(pool))
    pool.call(rank_watch.overflow, rank, True)
    assert engine.answer(requests([GREEDY] * 3)) == [[]] * 3
    pool.call(rank_watch.overflow, rank, False)
    check_that_all_is_well(pool)


def test_a_draw_that_fails_on_rank_0_keeps_no_rank_waiting(pool: RankPool) -> None:
    engine = Engine(Ranks(pool))
    pool.call(rank_watch.refuse_masks, True)
    with pytest.raises(RanksFailed, match="no mask today") as failed:
        engine.answer(requests([SamplingParams(TOKENS, presence_penalty=1.0), GREEDY, GREEDY]))
    assert len(failed.value.failures) == 2
    finish_failing(pool, engine)
    pool.call(rank_watch.refuse_masks, False)
    check_that_all_is_well(pool)


def finish_failing(pool: RankPool, engine: Engine) -> None:
    """Read the answer to the step that was sent with the one that failed, if there is one."""
    if engine.plans:
        pool.send_plan(None)
        with pytest.raises(RanksFailed):
            pool.next_result()


def test_a_step_launched_ahead_cannot_be_dropped(pool: RankPool) -> None:
    """Another rank may not have launched it, and the group would wait for ever."""
    engine = Engine(Ranks(pool))
    for request in requests([GREEDY] * 3):
        engine.send(Submit(request))
    first, second = engine.plans
    other = replace(second, step_id=99)
    failures = pool.call(rank_watch.execute_another, first, second, other)
    assert failures == ["step 99 came after step 1 had been launched ahead of it"] * 2
    check_that_all_is_well(pool)
