"""GGUF files of dense decoders give the tokens of the folders that they were converted from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from tests.actors.stage.greedy_reference import BY_LENGTH, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_conversions import as_they_are, convert, qkv_fused, with_pairs
from tests.actors.stage.weights.gguf_hybrids import granite_keys, permuted_mamba2
from tests.actors.stage.weights.gguf_mixtures import mixture_keys
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers


def dense_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "granitemoehybrid":  # without Mamba, whose keys it has all the same
        granite_keys(writer, config)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    if config.model_type == "olmo3":
        local, rope = rope["sliding_attention"], rope["full_attention"]
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_freq_base_swa(local["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if (window := getattr(config, "sliding_window", None)) is not None:
        writer.add_sliding_window(window)
    if config.model_type in ("exaone4", "olmo3") and window is not None:
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(pattern)
    if (scale := getattr(config, "logit_scale", None)) is not None:
        writer.add_logit_scale(scale)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


# What the format cannot say, as llama.cpp takes it to be.
COHERE2 = {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "num_hidden_layers": 4}
WHOLE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "exaone4": ("exaone4", as_they_are, {}),
    "exaone4, without windows": ("exaone4-unlimited", as_they_are, {}),
    "olmo2": ("olmo3", as_they_are, {}),
    "chatglm": ("glm", as_they_are, {}),
    "chatglm, fused": ("glm", qkv_fused(), {}),
    "internlm2": ("llama", with_pairs, {}),
    "seed_oss": ("seed-oss", as_they_are, {}),
    "glm4": ("glm4", as_they_are, {}),
    "glm4, whole heads rotated": ("glm4", as_they_are, {"rope_parameters": WHOLE}),
    "chatglm, whole heads rotated": ("glm", as_they_are, {"rope_parameters": WHOLE}),
    "command-r": ("cohere", as_they_are, {}),
    "cohere2": ("cohere2", as_they_are, COHERE2),
    "granite": ("granite-4-dense", permuted_mamba2, {"layer_types": ["attention"] * 3}),
}


@pytest.mark.parametrize("architecture", CASES)
def test_families(tmp_path: Path, architecture: str) -> None:
    variant, change, overrides = CASES[architecture]
    path, called = tmp_path / "tiny.gguf", architecture.split(",")[0]
    model = convert(path, called, variant, dense_keys, change, **overrides)
    folder = model_folder(path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2), feeds=True)
    right = answers(model, variant in BY_LENGTH)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right


@pytest.mark.parametrize(
    ("called", "variant", "keys"),
    [
        ("granite", "granite-4-dense", dense_keys),
        ("granitemoe", "granite-moe-hybrid", mixture_keys),
    ],
)
def test_granite_without_rotation_is_refused(
    tmp_path: Path, called: str, variant: str, keys: Callable[..., Any]
) -> None:
    more = {"layer_types": ["attention"] * 3, "position_embedding_type": "nope"}
    convert(tmp_path / "tiny.gguf", called, variant, keys, permuted_mamba2, **more)
    said = rf"tiny.gguf: {called}\.rope\.scaling\.finetuned is False; supported: True"
    with pytest.raises(ModelError, match=said):
        model_folder(tmp_path / "tiny.gguf", tmp_path / "cache")
