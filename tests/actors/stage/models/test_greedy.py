"""Greedy tokens equal to transformers in float32: every architecture, chunk size and split."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.stage.models.config import ModelError
from tests import tiny_models
from tests.actors.stage.greedy_reference import (
    GREEDY,
    expected,
    make_prompts,
    skip_unless_available,
)
from tests.actors.stage.mini_planner import MiniPlanner, chain, make_chain, make_runner
from tests.tiny_gemma4 import ONE_STAGE

WEIGHTS = "model.safetensors"


def test_reference_varies() -> None:
    """The tiny models do not fall into one token: equality below means something."""
    for variant in ("llama", "mistral", "qwen2", "qwen3"):
        assert len({token for answer in expected(variant) for token in answer}) > 40


# The decoder of another variant, by its names in a folder of its own.
REPEATED = ("gemma4-inputs-images", "gemma4-unified")
VARIANTS = [
    pytest.param(variant, marks=[pytest.mark.long] if variant in REPEATED else [])
    for variant in tiny_models.VARIANTS
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(tiny_model: Callable[..., Path], variant: str) -> None:
    """On the backend that CPUs serve with; on torch's they are computed in two stages below."""
    skip_unless_available("cpu")
    planner = MiniPlanner(make_chain(tiny_model(variant), backend="cpu"), chunk=7)
    assert planner.run(make_prompts(), GREEDY) == expected(variant)
    assert planner.num_hybrid_steps > 3


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3-layer-types", "falcon-alibi-12"])
def test_every_chunk_size(tiny_model: Callable[..., Path], variant: str, chunk: int) -> None:
    planner = MiniPlanner(make_chain(tiny_model(variant)), chunk=chunk, budget=max(chunk, 16))
    assert planner.run(make_prompts(), GREEDY) == expected(variant)


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama-tied",
        "llama4-plain",
        "mistral",
        "qwen2",
        "qwen3",
        "gpt-oss",
        "falcon-alibi",
        "bloom",
        "mpt",
    ],
)
def test_three_stages(tiny_model: Callable[..., Path], variant: str) -> None:
    execute = make_chain(tiny_model(variant), 3)
    planner = MiniPlanner(execute, chunk=16, feeds=True)
    assert planner.run(make_prompts(), GREEDY) == expected(variant)


@pytest.mark.parametrize("variant", [p for p in VARIANTS if p.values[0] not in ONE_STAGE])
def test_every_variant_in_two_stages_and_recomputed(
    tiny_model: Callable[..., Path], variant: str
) -> None:
    execute = make_chain(tiny_model(variant), 2, num_blocks=26)
    planner = MiniPlanner(execute, num_blocks=26, chunk=5, feeds=True)
    assert planner.run(make_prompts(), GREEDY) == expected(variant)
    assert planner.num_preemptions > 0


@pytest.mark.parametrize("num_host_blocks", [0, 64])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_preemption(tiny_model: Callable[..., Path], num_stages: int, num_host_blocks: int) -> None:
    """So few blocks that requests are put back, and come back recomputed or swapped in."""
    runners = [
        make_runner(
            tiny_model("qwen2-sliding"), 26, num_host_blocks, num_stages=num_stages, stage=s
        )
        for s in range(num_stages)
    ]
    planner = MiniPlanner(
        chain(runners), num_blocks=26, chunk=16, feeds=num_stages > 1,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    assert planner.run(make_prompts(), GREEDY) == expected("qwen2-sliding")
    assert planner.num_preemptions > 2
    assert len(planner.free) == 26


def write_internlm2(folder: Path) -> Path:
    """The variant "llama" as InternLM2 stores it: q, k and v in one tensor, by key/value head."""
    tiny_models.write(folder, "llama")
    renamed = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    tensors = {}
    stored = load_file(folder / WEIGHTS)
    for name, tensor in stored.items():
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        if name.endswith("q_proj.weight"):
            groups = [
                stored[name.replace("q_proj", which)].view(2, -1, 16, 64)
                for which in ("q_proj", "k_proj", "v_proj")
            ]
            fused = name.replace("self_attn.q_proj", "attention.wqkv")
            tensors[fused] = torch.cat(groups, dim=1).reshape(-1, 64)
        elif "self_attn" not in name:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}}
    path.write_text(json.dumps(config | {"bias": False}))
    return folder


def test_internlm2(tmp_path: Path) -> None:
    folder = write_internlm2(tmp_path)
    assert MiniPlanner(make_chain(folder, 2), feeds=True).run(make_prompts(), GREEDY) == expected(
        "llama"
    )


def test_internlm2_without_the_prefix_of_the_model(tmp_path: Path) -> None:
    """The head, which has no prefix in any checkpoint, is not "lm_head"."""
    found = renamed(write_internlm2(tmp_path / "stored"), tmp_path / "model", {"model.": ""})
    assert MiniPlanner(make_chain(found)).run(make_prompts(), GREEDY) == expected("llama")


def renamed(folder: Path, target: Path, names: dict[str, str]) -> Path:
    """A copy of a model folder, prefixes of its tensors replaced."""
    shutil.copytree(folder, target)
    stored = load_file(folder / WEIGHTS)
    for old, new in names.items():
        stored = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in stored.items()
        }
    save_file(stored, target / WEIGHTS, {"format": "pt"})
    return target


def test_both_names_of_a_decoder_within_a_model_of_images(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model("gemma3-images")
    assert any(n.startswith("language_model.model.") for n in load_file(folder / WEIGHTS))
    newer = {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    found = renamed(folder, tmp_path / "newer", newer)
    answers = MiniPlanner(make_chain(found, 2), feeds=True).run(make_prompts(), GREEDY)
    assert answers == expected("gemma3-images")
    doubled = tmp_path / "doubled"
    shutil.copytree(folder, doubled)
    stored = load_file(folder / WEIGHTS)
    stored["model.norm.weight"] = stored["language_model.model.norm.weight"].clone()
    save_file(stored, doubled / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensors .*model\.norm\.weight and .* stand for one"):
        make_chain(doubled)


def test_legacy_rope_keys(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` beside each other, as checkpoints before 2026 have them."""
    folder = shutil.copytree(tiny_model("llama-yarn"), tmp_path / "legacy")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    config.pop("head_dim")
    path.write_text(json.dumps(config))
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected("llama-yarn")
