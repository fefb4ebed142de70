"""The tokens of every way are those of one engine: split, flexible, and with a move at a drain,
over what engines and requests can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.routers import build_router
from actors.scheduling.request import Grammar, SamplingParams
from app.bench.studies.live_fleet import LiveFleet, live_engines, router_of
from app.bench.studies.live_ways import ENGINES, WAYS
from app.engine_client.client import GenerationRequest
from tests import tiny_adapters
from tests.app.fleet.live.test_draining import unhurried as unhurried
from tests.app.fleet.live.test_failover import Answer, through
from tests.app.fleet.live.test_split import struck
from tests.live.reference import make_prompts
from tests.live.test_live_tier import at_rest
from tests.tiny_models import SLOW

# Plain engines give the same tokens in every way in tests/app/bench/studies/test_followed.py.
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(280)]

MAX_TOKENS = 64
# Of one token, and of three that are drawn: drafts are met. These streams are the last, so that
# drafts pay.
SAME = {"logit_bias": ((0, 100.0),), "max_tokens": 120}
REPEATING = {"logit_bias": ((0, 20.0), (1, 20.0), (2, 20.0)), "max_tokens": 100}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "top_k": 20},
    {"temperature": 0.8, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 12, "min_p": 0.05},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logprobs": 2, "temperature": 1.0, "seed": 4, "frequency_penalty": 0.3},
    {"grammar": Grammar("regex", "(ab|cd){20,50}"), "temperature": 1.0, "seed": 3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 1.0, "seed": 5},
    SAME,
    {**REPEATING, "temperature": 0.2, "seed": 9, "frequency_penalty": 0.01},
    {"min_tokens": 30, "stop_token_ids": tuple(range(128)), "temperature": 1.0, "seed": 8},
    {"max_tokens": 1},
    {"max_tokens": 2},
]
# Of prompts: of one token, of full blocks only, of several pieces of a move (16 blocks of 4).
LENGTHS = (81, 17, 40, 130, 64, 22, 9, 1, 60, 33, 5, 12, 100)

# Of three engines that serve every request in every way.
ENGINE_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 weights": {"model": {"quantization": "int8"}},
    "int4 weights": {"model": {"quantization": "int4"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "int8 KV": {"kv": {"dtype": "int8"}},
    "device to device": {"kv": {"direct_gib": 4 / 2**10}},
    "lookup": {"speculation": {"drafter": "lookup"}},
    "adapter": {"adapters": {}},
    "everything": {
        "model": {"quantization": "int8"},
        "kv": {"dtype": "int8"},
        "speculation": {"drafter": "lookup"},
        "adapters": {},
    },
}
# So slow a model that fetching beats computing, and the first token of a step costs so much of it
# that drafts do pay.
COSTS = "{name: slow, tokens_s: [[1, 1.0], [64, 1.2]]}"
ATTENTION = list(tiny_adapters.LLAMA_MODULES[:4])  # the rest are as wide as the model is slow
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # stages and ranks
CASES = [(kind, *layout) for kind in ENGINE_KINDS for layout in LAYOUTS]


def requests(way: str, has_adapter: bool) -> list[GenerationRequest]:
    """One of each kind. The prefixes of one way are none of another's; where there is an adapter,
    every prompt is asked with it too."""
    found = []
    for number, (prompt, kind) in enumerate(zip(make_prompts(LENGTHS), KINDS, strict=True)):
        sampling = SamplingParams(**{"max_tokens": MAX_TOKENS, **kind})
        n = 3 if number in (1, 9) else 1
        name = f"{way}-{number}"
        request = GenerationRequest(name, prompt, sampling, n=n, cache_salt=way)
        found.append(request)
        if has_adapter:
            salt = f"adapter/{way}"
            found.append(replace(request, request_id=f"{name}-adapter", adapter=1, cache_salt=salt))
    embedded = GenerationRequest(
        f"{way}-pooled", make_prompts((70,))[0], SamplingParams(1), pooling="mean", cache_salt=way
    )
    return [*found, embedded]


def merged(*settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections with the keys of all."""
    found: dict[str, dict[str, Any]] = {}
    for sections in settings:
        for name, values in sections.items():
            found[name] = {**found.get(name, {}), **values}
    return found


async def all_at_rest(fleet: LiveFleet, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {name: await at_rest(fleet.engines[name]) for name in names}
    for status in found.values():
        assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
    return found


async def served(fleet: LiveFleet, way: str, has_adapter: bool) -> list[Answer]:
    """What the engines of a way answer."""
    async with fleet.front(router_of(way), WAYS[way]) as front:
        answers, _ = await through(front, requests(way, has_adapter))
        moves = (await front.status())["fleet"]
    if way == "split":
        asked = requests(way, has_adapter)
        num = sum(r.n for r in asked if r.sampling.max_tokens > 1 and r.pooling is None)
        assert moves["num_hand_overs"] == num
    return answers


@pytest.fixture
def slow_sections(sections: dict[str, Any]) -> dict[str, Any]:
    Path(sections["scheduling"]["cost_model"]).write_text(COSTS)
    return sections


@pytest.mark.parametrize(("kind", "stages", "ranks"), CASES)
async def test_the_tokens_of_one_engine(
    ray_cluster: None,
    tiny_model: Callable[..., Path],
    slow_sections: dict[str, Any],
    tmp_path: Path,
    unhurried: None,
    kind: str,
    stages: int,
    ranks: int,
) -> None:
    model = {"model": {"path": str(tiny_model("llama", **SLOW))}}
    parallel = {"pipeline_stages": stages, "tensor_ranks": ranks, "cpus_per_rank": 0.1}
    args = merged(slow_sections, model, {"parallel": parallel}, ENGINE_KINDS[kind])
    if has_adapter := "adapters" in args:
        paths = {"a": str(tiny_adapters.write(tmp_path / "adapter", target_modules=ATTENTION))}
        args["adapters"] = {"max_adapters": 1, "max_rank": 8, "paths": paths}
    async with live_engines(args, ENGINES) as fleet:
        async with fleet.front(router_of("colocated"), ("two",)) as front:
            alone, _ = await through(front, requests("alone", has_adapter))
        status = (await all_at_rest(fleet, ("two",)))["two"]
        if "speculation" in args:
            assert status["num_accepted_drafts"] > 0
        if has_adapter:
            pairs = zip(alone[:-1:2], alone[1:-1:2], strict=True)
            assert sum(without != adapted for without, adapted in pairs) > len(KINDS) // 2
        assert await served(fleet, "split", has_adapter) == alone
        status = (await all_at_rest(fleet, ("one",)))["one"]
        assert status["num_early_blocks"] > 0, "some were fetched while prompts were computed"
        if "direct_gib" in args["kv"]:
            assert status["num_direct_blocks"] > 0
        assert await served(fleet, "flexible", has_adapter) == alone

        both = ("one", "two")
        before = await all_at_rest(fleet, both)
        leaving: list[asyncio.Task[None]] = []

        def leave() -> None:
            leaving.append(asyncio.create_task(fleet.engines["one"].leave()))

        async with fleet.front(build_router("round_robin"), both) as front:
            answers = await struck(front, [(20, leave)], requests("drained", has_adapter))
            moves = (await front.status())["fleet"]
        assert answers == alone
        assert moves["num_moves"] > 0
        assert moves["num_inexact_moves"] == 0
        await asyncio.wait_for(leaving[0], 60)
        after = await all_at_rest(fleet, ("two",))
        for counter in ("num_early_blocks", "num_fetched_blocks"):
            assert before["two"][counter] < after["two"][counter], "copied before they moved"
