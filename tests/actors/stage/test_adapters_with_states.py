"""LoRA adapters of models whose layers keep a state: tokens as of weights that peft has merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.scheduling.request import Request
from tests import tiny_adapters
from tests.actors.stage.greedy_reference import (
    GREEDY,
    expected,
    make_prompts,
    skip_unless_available,
)
from tests.actors.stage.mini_planner import Execute, MiniPlanner, chain, make_runner
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.test_adapters import SLOTS
from tests.actors.stage.test_speculation import NUM_BLOCKS, serve
from tests.actors.stage.test_speculation_with_states import DRAFTED, redone

Folder = Callable[..., Path]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
QWEN_3_5 = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *ATTENTION)
# What peft may change; it leaves `out_proj` out of Nemotron-H and Falcon-H1.
MODULES: dict[str, tuple[str, ...]] = {
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION),
    "qwen3-5": (*QWEN_3_5, *MLP),
    "qwen3-5-images": (*QWEN_3_5, *MLP),
    "qwen3-5-moe": QWEN_3_5,
    "lfm2": ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
    "lfm2-moe": ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj"),
    "granite-4": ("in_proj", "out_proj", *ATTENTION),
    "granite-4-dense": (
        "in_proj", "mamba.out_proj", *ATTENTION, "shared_mlp.input_linear",
        "shared_mlp.output_linear",
    ),
    "nemotron-h": ("in_proj", *ATTENTION, "up_proj", "down_proj"),
    "nemotron-3": ("in_proj", *ATTENTION),
    "bamba": ("in_proj", "out_proj", *ATTENTION, *MLP),
    "falcon-h1": ("in_proj", *ATTENTION, *MLP),
    "falcon-h1-normed": ("in_proj", *ATTENTION, *MLP),
}  # fmt: skip
# The others: `make test-long`, and two of them on ranks below.
SHORT = ("qwen3-5-images", "lfm2-moe", "nemotron-h", "falcon-h1")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if v in SHORT else pytest.mark.long) for v in MODULES],
)
def test_every_family(tiny_model: Folder, tmp_path: Path, variant: str) -> None:
    skip_unless_available("cpu")
    adapter = tiny_adapters.write(tmp_path / "a", variant, target_modules=[*MODULES[variant]])
    plain, merged = expected(variant), tiny_adapters.expected(adapter, variant)
    assert plain != merged
    wanted = [merged[n] if n % 3 else plain[n] for n in range(7)]
    for backend in ("torch", "cpu"):
        runner = make_runner(tiny_model(variant), backend=backend, **SLOTS)
        runner.load_adapter(1, adapter)
        planner = MiniPlanner(chain([runner]), chunk=7)
        found = planner.run(make_prompts(), GREEDY, adapters=[2 * (n % 3 > 0) for n in range(7)])
        assert found == wanted, backend


@pytest.mark.parametrize(
    ("variant", "num_stages"),
    [
        ("qwen3-next", 2),
        ("granite-4-dense", 1),
        pytest.param("falcon-h1-normed", 1, marks=pytest.mark.long),
    ],
)
def test_two_ranks(
    ranks: RankPool, tiny_model: Folder, tmp_path: Path, variant: str, num_stages: int
) -> None:
    skip_unless_available("cpu")
    adapter = tiny_adapters.write(tmp_path / "a", variant, target_modules=[*MODULES[variant]])
    ranks.make(tiny_model(variant), num_stages, backend="cpu", **SLOTS)
    ranks.load_adapter(2, adapter)
    planner = MiniPlanner(ranks.execute, feeds=num_stages > 1)
    found = planner.run(make_prompts(), GREEDY, adapters=[3] * 7)
    assert found == tiny_adapters.expected(adapter, variant)


def test_beside_drafts_and_saved_states(tiny_model: Folder, tmp_path: Path) -> None:
    """Each prompt is asked twice of the model and of two adapters: a state saved by one is not
    another's, and a wrong draft goes back to a state of its own adapter."""
    skip_unless_available("cpu")
    adapters = [
        tiny_adapters.write(tmp_path / str(n), "qwen3-5", 2 + n, target_modules=[*modules])
        for n, modules in enumerate((QWEN_3_5, MLP))
    ]
    each = [expected("qwen3-5"), *(tiny_adapters.expected(a, "qwen3-5") for a in adapters)]
    runner = make_runner(tiny_model("qwen3-5"), NUM_BLOCKS, backend="cpu", **SLOTS)
    for slot, adapter in enumerate(adapters):
        runner.load_adapter(slot, adapter)
    run: Execute = chain([runner])
    requests = [
        Request(100 * time + 10 * n + a, tuple(prompt), GREEDY, 0.0, cache_salt=str(a), adapter=a)
        for time in range(2)
        for n, prompt in enumerate(make_prompts())
        for a in range(3)
    ]
    config = replace(DRAFTED, max_requests=8, num_saved_states=32)
    known, _, _ = serve(replace(config, drafter="none"), run, requests=requests)
    found, _, plans = serve(config, run, known, requests)
    assert found == known
    for request in requests:
        wanted = each[request.adapter][request.request_id % 100 // 10]
        assert found[request.request_id].tokens == wanted
    assert redone(plans), "no draft was wrong"
    assert any(start.state_row is not None for plan in plans for start in plan.started)
