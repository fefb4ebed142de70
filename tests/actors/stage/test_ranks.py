"""Tensor parallelism: two processes, gloo between them, the same tokens as transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.scheduling.request import SamplingParams
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from tests import tiny_models
from tests.actors.stage.greedy_reference import (
    GREEDY,
    expected,
    make_prompts,
    skip_unless_available,
)
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.weights import mxfp4_folders, packed_folders
from tests.actors.stage.weights.test_packed import GREEDY as SHORT
from tests.actors.stage.weights.test_packed import LENGTHS, answers


@pytest.mark.parametrize(
    ("variant", "num_stages"), [("llama", 1), ("llama", 2), ("llama-biased", 3)]
)
def test_two_ranks(
    ranks: RankPool, tiny_model: Callable[..., Path], variant: str, num_stages: int
) -> None:
    ranks.make(tiny_model(variant), num_stages)
    planner = MiniPlanner(ranks.execute, chunk=7, feeds=num_stages > 1)
    assert planner.run(make_prompts(), GREEDY) == expected(variant)
    assert planner.num_hybrid_steps > 3


# Latent attention without and with a latent of queries (youtu-yarn, minicpm3). States of a rank's
# heads, stored in groups (qwen3-next) and apart (qwen3-5), or channels (lfm2-adjusted). Heads of
# Mamba-2 of one group, whose norm spans the ranks (granite-4), and of two (nemotron-h); beside
# attention (falcon-h1).
# One key/value head for two ranks (yi, falcon-7b), a tied odd vocabulary (qwen2, qwen3), windows
# (mistral), fused tensors (phi3, glm4), whole q/k norm (olmo2, olmoe), groups (falcon-40b), stored
# transposed (gpt2), learned positions (opt), experts (qwen3-moe, mixtral), in one tensor
# (granite-moe), sinks (gpt-oss), ALiBi of a rank's heads (falcon-alibi-6), a norm of
# the embedding (bloom), a shared expert (llama4, glm4-moe), with a gate (qwen2-moe), a
# bias of the head (phi, gptj), sizes by layer and experts beside an MLP (gemma4), shared keys and
# values (gemma4-unified), inputs of layers (gemma4-inputs).
OTHER_FAMILIES = (
    "youtu-yarn", "minicpm3", "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "mistral4",
    "yi", "qwen2", "qwen3", "mistral", "ministral", "phi3", "olmo2", "granite", "smollm3", "glm",
    "glm4", "gemma", "gemma2", "gemma3", "falcon-7b", "falcon-40b", "falcon-biased", "starcoder2",
    "gpt2", "opt", "cohere", "cohere2", "mixtral", "qwen3-moe", "olmoe", "granite-moe", "gpt-oss",
    "llama4", "falcon-alibi-6", "bloom", "mpt-6", "glm4-moe", "qwen2-moe", "ministral3",
    "olmo3", "exaone4", "seed-oss-biased", "ernie4.5", "helium", "hunyuan", "arcee",
    "gpt-neox", "gptj", "gpt-bigcode", "phi", "stablelm", "nemotron-biased", "olmo", "vault-gemma",
    "minimax-m2", "ernie4-5-moe", "solar-open", "dots1", "exaone-moe",
    "flex-olmo", "granite-moe-shared", "granite-moe-hybrid", "hunyuan-moe", "gemma4",
    "gemma4-inputs", "gemma4-unified",
    "qwen3-next", "qwen3-5", "qwen3-5-moe", "lfm2-adjusted", "lfm2-moe",
    "granite-4", "nemotron-h", "nemotron-3", "bamba", "falcon-h1",
)  # fmt: skip


def test_every_family_is_among_them() -> None:
    """But those that only name the tensors of another: a decoder beside images."""
    inner = {v for v in tiny_models.VARIANTS if v.endswith("-images")}
    found = {tiny_models.architecture(variant) for variant in ("llama", *OTHER_FAMILIES)}
    wanted = {tiny_models.architecture(variant) for variant in {*tiny_models.VARIANTS} - inner}
    assert found == wanted


LONG = ("gemma4-unified",)  # all of which others show, too


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.long] if v in LONG else []) for v in OTHER_FAMILIES],
)
def test_two_ranks_of_other_families(
    ranks: RankPool, tiny_model: Callable[..., Path], variant: str
) -> None:
    ranks.make(tiny_model(variant))
    assert MiniPlanner(ranks.execute).run(make_prompts(), GREEDY) == expected(variant)


@pytest.mark.parametrize("variant", ["qwen3-biased", "falcon-alibi-12"])
def test_two_ranks_on_the_cpu_library(
    ranks: RankPool, tiny_model: Callable[..., Path], variant: str
) -> None:
    skip_unless_available("cpu")
    ranks.make(tiny_model(variant), 2, backend="cpu")
    planner = MiniPlanner(ranks.execute, feeds=True)
    assert planner.run(make_prompts(), GREEDY) == expected(variant)


@pytest.mark.parametrize(
    ("method", "backend"), [("awq", "torch"), ("gptq", "torch"), ("awq", "cpu")]
)
def test_two_ranks_of_packed_weights(
    ranks: RankPool, tmp_path: Path, method: str, backend: str
) -> None:
    skip_unless_available(backend)
    packed_folders.write(tmp_path, method, "yi", group=16)  # 96 inner features, 48 a rank
    alone = MiniPlanner(make_chain(tmp_path, backend=backend)).run(make_prompts(), GREEDY)
    ranks.make(tmp_path, backend=backend)
    assert MiniPlanner(ranks.execute).run(make_prompts(), GREEDY) == alone


def test_two_ranks_of_two_stages_of_mxfp4(ranks: RankPool, tmp_path: Path) -> None:
    """A rank's half of an expert's 96 inner features cuts a group of 32."""
    skip_unless_available("cpu")
    model = mxfp4_folders.write(tmp_path)
    ranks.make(tmp_path, 2, backend="cpu")
    planner = MiniPlanner(ranks.execute, feeds=True)
    assert planner.run(make_prompts(LENGTHS), SHORT) == answers(model)


def test_sampled_tokens_and_swaps_reach_every_rank(
    ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    """With one stage no tokens are fed: the ranks exchange winners, or have them from rank 0."""
    kinds: tuple[dict[str, object], ...] = (
        {}, {"top_p": 0.9}, {"temperature": 0.0}, {"presence_penalty": 0.7}, {"top_k": 9},
        {"temperature": 1.4}, {"min_p": 0.1, "logit_bias": ((3, 2.0),)},
    )  # fmt: skip
    warm = [
        SamplingParams(20, **{"temperature": 0.9, "seed": s, **kind})  # type: ignore[arg-type]
        for s, kind in enumerate(kinds)
    ]
    alone = MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts(), warm)
    ranks.make(tiny_model("llama"), 1, 26, 64)
    planner = MiniPlanner(ranks.execute, num_blocks=26, num_host_blocks=64)
    assert planner.run(make_prompts(), warm) == alone
    assert planner.num_preemptions > 2


def test_each_rank_holds_its_part(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    whole = StageRunner(StageSpec(str(tiny_model("llama")), backend="torch", block_size=4)).info
    infos = ranks.make(tiny_model("llama"), 2)
    held = [info.num_parameters for rank in infos for info in rank]
    norms = 64 * (2 * 3 + 1)  # replicated on both ranks
    assert sum(held) == whole.num_parameters + norms
    assert infos[0][0].kv_block_bytes + infos[0][1].kv_block_bytes == (whole.kv_block_bytes // 2)


def test_too_many_ranks_for_the_heads(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen3", num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(RuntimeError, match="3 attention heads cannot be split over 2 ranks"):
        ranks.make(folder)
