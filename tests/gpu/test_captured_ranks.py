"""Captured steps of two tensor-parallel ranks: every rank makes the same collective calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.request import SamplingParams
from actors.stage.runner import StageRunner
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.rank_pool import RankPool
from tests.actors.transport import shared_symmetric_memory
from tests.gpu.two_layers import LAYERS, expected

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels; see test_gpu_stage"
)
LENGTHS = (1, 3, 13)
TOKENS = 3
SPEC = {"backend": "triton", "max_requests": 4, "graph_tokens": 16, "max_model_len": 64}


_kept: list[object] = []


def share_symmetric_memory(runners: list[StageRunner]) -> None:
    _kept.append(shared_symmetric_memory.install())


def fused_and_other_sums(runners: list[StageRunner]) -> tuple[int, int]:
    """Of the first token's row: sums within the norm's launch, and by operators of torch."""
    peers = runners[0]._group.peers
    assert peers is not None
    *_, memory = shared_symmetric_memory.SharedMemory.groups.values()
    return int(peers.calls_P[0]), memory.num_one_shots


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    pool.call(share_symmetric_memory)
    yield pool
    pool.close()


@pytest.mark.parametrize("num_stages", [2])
def test_tokens_of_transformers(
    ranks: RankPool, tiny_model: Callable[..., Path], num_stages: int
) -> None:
    """The head's gather is in the graph of both ranks; only rank 0 has logits afterwards."""
    ranks.make(tiny_model("llama"), num_stages, capture=True, **SPEC)
    planner = MiniPlanner(ranks.execute, chunk=8, budget=24, feeds=num_stages > 1)
    answers = planner.run(make_prompts(LENGTHS), SamplingParams(max_tokens=TOKENS))
    assert answers == [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert planner.num_hybrid_steps > 1


@pytest.mark.parametrize(("variant", "fused"), [("llama", 2 * LAYERS - 1), ("gemma2", 0)])
def test_tokens_where_kernels_sum_over_ranks(
    ranks: RankPool, tiny_model: Callable[..., Path], variant: str, fused: int
) -> None:
    """Of two sums a layer, all but the last are within the norm's launch, unless
    the result is normed first; another is the embedding's."""
    ranks.make(tiny_model(variant), capture=True, symmetric_memory=True, **SPEC)
    captured = ranks.call(fused_and_other_sums)
    planner = MiniPlanner(ranks.execute, chunk=8, budget=24)
    answers = planner.run(make_prompts(LENGTHS), SamplingParams(max_tokens=TOKENS))
    assert answers == [answer[:TOKENS] for answer in expected(variant, LENGTHS)]
    steps = len(planner.results)
    done = [(fused * steps, (2 * LAYERS + 1 - fused) * steps)] * 2
    assert [
        tuple(after - before for after, before in zip(*counts, strict=True))
        for counts in zip(ranks.call(fused_and_other_sums), captured, strict=True)
    ] == done


@pytest.mark.long
def test_draws_and_log_probabilities_of_one_rank(
    ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    """What the graph's draw does not serve is drawn after it, on rank 0 alone."""
    each = [
        SamplingParams(TOKENS, temperature=0.9, top_p=0.8, seed=3),
        SamplingParams(TOKENS, temperature=1.1, top_k=9, seed=5, presence_penalty=1.5),
        SamplingParams(TOKENS, temperature=0.7, seed=9, logprobs=2, prompt_logprobs=1),
    ]
    alone = MiniPlanner(make_chain(tiny_model("llama")), chunk=8, budget=24)
    wanted = alone.run(make_prompts(LENGTHS), each)
    ranks.make(tiny_model("llama"), capture=True, **SPEC)
    planner = MiniPlanner(ranks.execute, chunk=8, budget=24)
    assert planner.run(make_prompts(LENGTHS), each) == wanted
    assert sum(len(result.logprobs) for result in planner.results) == TOKENS
