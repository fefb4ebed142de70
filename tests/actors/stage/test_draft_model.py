"""A draft model changes how many tokens a step yields, never which: on real stages."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from actors.scheduling.build import build_core
from actors.scheduling.events import Emit, Event, Execute, StepDone, Submit
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Request, SamplingParams
from actors.stage.models.config import ModelError
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import Execute as Run
from tests.actors.stage.mini_planner import chain, make_chain, make_runner
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.test_speculation import BASE, NUM_BLOCKS, serve

LENGTH = 60
MODEL = replace(BASE, drafter="model", draft_model="small", max_drafts=4)
Folder = Callable[..., Path]


def stages(folder: Path, draft: Path | None, num_stages: int = 1, **spec: object) -> Run:
    """Stages of one process; draft: the folder of their draft model."""
    path = None if draft is None else str(draft)
    options = {"backend": "cpu", "draft_model_path": path, "max_drafts": 4, **spec}
    return make_chain(folder, num_stages, NUM_BLOCKS, **options)


def long_requests(lengths: tuple[int, ...] = (3, 17, 40), first_id: int = 0) -> list[Request]:
    """Greedy and drawn, long enough that acceptance is learned."""
    return [
        Request(first_id + i, tuple(p), SamplingParams(LENGTH, temperature=min(i, 1), seed=i), 0.0)
        for i, p in enumerate(make_prompts(lengths))
    ]


def num_asked(plans: list[StepPlan]) -> int:
    return sum(count for plan in plans for _, count in plan.drafts_asked)


CHANGES: dict[str, dict[str, object]] = {
    "default": {},
    "no lookahead": {"lookahead": False},
    "small KV": {"num_blocks": 40},
    "small KV, no cache": {"num_blocks": 40, "prefix_cache": False, "watermark": 0.0},
    "small KV, swaps": {"num_blocks": 40, "num_host_blocks": 40, "swap": "always"},
    "small chunks": {"token_budget": 15},
    "one draft": {"max_drafts": 1},
    "vllm": {"policy": "vllm"},
    "two stages": {"num_stages": 2},
    "two stages, small KV": {"num_stages": 2, "num_blocks": 40},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("draft", ["llama", "llama-tied"])
def test_equal_bytes_on_the_cpu_library(tiny_model: Folder, name: str, draft: str) -> None:
    """Of all kinds of sampling, several answers to one prompt among them: with a model that is
    mostly right, the served one, and with another, which is mostly wrong."""
    skip_unless_available("cpu")
    config = replace(MODEL, **CHANGES[name])  # type: ignore[arg-type]
    folder, num_stages = tiny_model("llama"), config.num_stages
    plain, _, _ = serve(replace(BASE, num_stages=num_stages), stages(folder, None, num_stages))
    run = stages_with_host(folder, tiny_model(draft), num_stages, config.num_host_blocks)
    drafted, core, plans = serve(config, run)
    assert drafted == plain
    assert any(plan.drafts for plan in plans)
    assert bool(config.num_host_blocks) == any(plan.swap_in for plan in plans)
    accepted = core.outcomes.num_accepted_drafts / core.speculation.num_drafts
    assert accepted > 0.95 if draft == "llama" else accepted < 0.5


def stages_with_host(folder: Path, draft: Path, num_stages: int, num_host_blocks: int) -> Run:
    runners = [
        make_runner(
            folder, NUM_BLOCKS, num_host_blocks, num_stages=num_stages, stage=stage, backend="cpu",
            draft_model_path=str(draft), max_drafts=4,
        )
        for stage in range(num_stages)
    ]  # fmt: skip
    return chain(runners)


def test_equal_tokens_on_torch(tiny_model: Folder) -> None:
    """Another family drafts; torch does not round alike in every batch, so only tokens count."""
    folder = tiny_model("qwen3")
    plain, _, _ = serve(BASE, stages(folder, None, backend="torch"))
    for draft in (folder, tiny_model("llama")):
        drafted, core, _ = serve(MODEL, stages(folder, draft, backend="torch"))
        assert {i: a.tokens for i, a in drafted.items()} == {i: a.tokens for i, a in plain.items()}
        assert core.speculation.num_drafts > 0


@pytest.mark.parametrize("num_stages", [1, 2])
def test_equal_tokens_on_two_ranks(ranks: RankPool, tiny_model: Folder, num_stages: int) -> None:
    """The draft model runs in one of them."""
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    options = {"backend": "cpu", "draft_model_path": str(folder), "max_drafts": 4}
    ranks.make(folder, num_stages, NUM_BLOCKS, backend="cpu")
    plain, _, _ = serve(replace(BASE, num_stages=num_stages), ranks.execute)
    infos = ranks.make(folder, num_stages, NUM_BLOCKS, **options)
    drafted, core, _ = serve(replace(MODEL, num_stages=num_stages), ranks.execute)
    assert drafted == plain
    assert core.outcomes.num_accepted_drafts > 0.9 * core.speculation.num_drafts > 0
    assert infos[0][-1].kv_block_bytes > infos[1][-1].kv_block_bytes


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_model_that_drafts_for_itself_fills_every_step(
    tiny_model: Folder, num_stages: int
) -> None:
    """At temperature 1 as well: it draws with the same noise."""
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    config = replace(MODEL, num_stages=num_stages)
    _, core, plans = serve(config, stages(folder, folder, num_stages), requests=long_requests())
    drafts = [len(tokens) for plan in plans for _, tokens in plan.drafts]
    assert core.outcomes.num_accepted_drafts == core.speculation.num_drafts
    assert len(drafts) <= 3 * (LENGTH / 5 + 3)  # five tokens a step, but for the first few
    assert drafts[len(drafts) // 2] == 4


def test_blocks_of_the_prefix_cache_serve_both_models(tiny_model: Folder) -> None:
    """A prompt that an earlier request left in the cache is not computed again by either."""
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    runner = make_runner(
        folder, NUM_BLOCKS, backend="cpu", draft_model_path=str(folder), max_drafts=4
    )
    drafting, missing = runner._drafting, list[int]()
    assert drafting is not None
    lengths_of = drafting._lengths

    def noted(asking: list[Any]) -> list[int]:
        missing.extend(one.num_missing for one in asking)
        return lengths_of(asking)

    drafting._lengths = noted  # type: ignore[method-assign]
    prompt = tuple(make_prompts((60,))[0])
    sampling = SamplingParams(9, temperature=1.0, seed=3)
    answers = []
    for number in range(2):
        found, core, _ = serve(
            MODEL, chain([runner]), requests=[Request(number, prompt, sampling, 0.0)]
        )
        answers.append(found[number].tokens)
        assert core.outcomes.num_accepted_drafts == core.speculation.num_drafts > 0
    assert answers[0] == answers[1]
    assert missing[0] >= 60


def test_a_block_that_the_second_tier_fills_is_computed_again(tiny_model: Folder) -> None:
    """The tier keeps the served model's KV alone."""
    folder = tiny_model("llama")
    runner = make_runner(folder, NUM_BLOCKS, draft_model_path=str(folder), max_drafts=4)
    drafting, kv = runner._drafting, runner.kv
    assert drafting is not None
    assert kv is not None
    serve(MODEL, chain([runner]), requests=long_requests())
    filled = int(np.flatnonzero(drafting._num_filled_B == 4)[0])
    others = np.delete(drafting._num_filled_B, filled)
    kv.write(filled, kv.read(filled))
    assert drafting._num_filled_B[filled] == 0
    assert (np.delete(drafting._num_filled_B, filled) == others).all()


def test_a_long_prompt_is_made_up_for_in_parts(tiny_model: Folder) -> None:
    """Requests that are ready draft meanwhile."""
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    run = stages(folder, folder, max_step_tokens=64)
    config = replace(MODEL, max_step_tokens=128)
    requests = [*long_requests((150,)), *long_requests((4,), first_id=1)]
    plain, _, _ = serve(BASE, stages(folder, None), requests=requests)
    offered: list[dict[int, tuple[int, ...]]] = []

    def execute(plan: StepPlan) -> StepResult:
        result = run(plan)
        if plan.drafts_asked:
            offered.append(dict(result.drafts_offered))
        return result

    drafted, core, _ = serve(config, execute, requests=requests)
    assert drafted == plain
    assert [sorted(one) for one in offered[:4]] == [[1], [1], [0, 1], [0, 1]]
    assert core.outcomes.num_accepted_drafts == core.speculation.num_drafts


def test_a_step_repeated_gives_the_same(tiny_model: Folder) -> None:
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    plain, _, _ = serve(BASE, stages(folder, None))
    run = stages(folder, tiny_model("llama-tied"))

    def twice(plan: StepPlan) -> StepResult:
        first = run(plan)
        assert run(plan) == first
        return first

    drafted, core, _ = serve(MODEL, twice)
    assert drafted == plain
    assert core.speculation.num_drafts > 0


def test_stages_built_anew_go_on_with_the_same_tokens(tiny_model: Folder) -> None:
    """As after a stage's death: what is known is computed again, by both models."""
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    plain, _, _ = serve(BASE, stages(folder, None), requests=long_requests())
    begun = [replace(r, output=tuple(plain[r.request_id].tokens[:20])) for r in long_requests()]
    run = stages(folder, folder)
    core = build_core(MODEL)
    plans, rest = deque[StepPlan](), {r.request_id: list[int]() for r in begun}

    def send(event: Event) -> None:
        for instruction in core.handle(event, 0.0):
            if isinstance(instruction, Execute):
                plans.append(instruction.plan)
            elif isinstance(instruction, Emit):
                for output in instruction.outputs:
                    rest[output.request_id] += output.tokens

    for request in begun:
        send(Submit(request))
    while plans:
        send(StepDone(run(plans.popleft())))
    assert rest == {i: answer.tokens[20:] for i, answer in plain.items()}
    assert core.outcomes.num_accepted_drafts == core.speculation.num_drafts > 0


def changed(folder: Path, copy: Path, **config: object) -> Path:
    """A copy of a model's folder with other entries in its config."""
    copytree(folder, copy)
    entries = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**entries, **config}))
    return copy


def test_a_shorter_model_drafts_as_far_as_it_reaches(tiny_model: Folder, tmp_path: Path) -> None:
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    short = changed(folder, tmp_path / "short", max_position_embeddings=64)
    plain, _, _ = serve(BASE, stages(folder, None), requests=long_requests())
    run = stages(folder, short)
    drafted, _, plans = serve(MODEL, run, requests=long_requests())
    assert drafted == plain
    assert any(plan.drafts for plan in plans)
    for plan in plans:
        ends = {i: start + count for i, start, count, _ in plan.slices}
        assert all(ends[i] <= 64 for i, _ in plan.drafts)


def test_output_that_is_not_finite_is_no_draft(tiny_model: Folder, tmp_path: Path) -> None:
    """Weights that overflow: the served model's steps go on."""
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    broken = copytree(folder, tmp_path / "copy")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(1e36)
    weights["lm_head.weight"] *= 1e4
    save_file(weights, broken / "model.safetensors")
    plain, _, _ = serve(BASE, stages(folder, None))
    drafted, _, plans = serve(MODEL, stages(folder, broken))
    assert drafted == plain
    assert num_asked(plans) > 0
    assert not any(plan.drafts for plan in plans)


def test_another_vocabulary_is_refused(tiny_model: Folder, tmp_path: Path) -> None:
    other = changed(tiny_model("llama"), tmp_path / "other", vocab_size=300)
    with pytest.raises(ModelError, match=r"^speculation\.model: a vocabulary of 300 tokens in"):
        stages(tiny_model("llama"), other, backend="torch", load_format="dummy")


def test_a_folder_that_is_no_model_is_refused(tiny_model: Folder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^speculation\.model: .*config\.json"):
        stages(tiny_model("llama"), tmp_path, backend="torch")
