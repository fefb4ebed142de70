"""What config.json of a model of images says of its decoder, and the names of its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from actors.stage.models import read
from actors.stage.models.config import DecoderConfig, ModelError, Temperature
from actors.stage.models.families_vision import FAMILIES
from actors.stage.models.read import load_config
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.models.test_greedy import WEIGHTS, renamed
from tests.actors.stage.weights import scaled_folders
from tests.actors.stage.weights.test_packed import GREEDY as SHORT
from tests.actors.stage.weights.test_packed import LENGTHS, answers

_SIZES: dict[str, Any] = {
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
    "intermediate_size": 96, "max_position_embeddings": 256, "num_attention_heads": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "use_cache": True,
    "vocab_size": 100,
}  # fmt: skip
_MISTRAL = _SIZES | {
    "head_dim": 16, "model_type": "mistral", "rope_theta": 1e9, "sliding_window": None,
}  # fmt: skip
_MINISTRAL = _SIZES | {
    "head_dim": 16, "model_type": "ministral3", "sliding_window": None,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
        "rope_theta": 1e6, "rope_type": "yarn", "type": "yarn",
    },
}  # fmt: skip
_MISTRAL3 = {
    "image_token_index": 10, "model_type": "mistral3", "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_config": {"hidden_size": 16},
    "vision_feature_layer": -1,
}  # fmt: skip
_MISTRAL4 = _SIZES | {
    "first_k_dense_replace": 0, "kv_lora_rank": 32, "model_type": "mistral4", "n_group": 1,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 4, "num_key_value_heads": 4, "q_lora_rank": 48,
    "qk_head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "rope_interleave": True,
    "routed_scaling_factor": 1.0, "topk_group": 1, "v_head_dim": 16,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5, "rope_theta": 1e4,
        "rope_type": "yarn", "type": "yarn",
    },
}  # fmt: skip
_KIMI = {
    "media_placeholder_token_id": 98, "model_type": "kimi_k25", "pad_token_id": 97,
    "vision_config": {"mm_hidden_size": 16}, "ignore_index": -100, "use_unified_vision_chunk": True,
}  # fmt: skip
_KIMI_K2 = _SIZES | {
    "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32,
    "model_type": "kimi_k2", "moe_intermediate_size": 32, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "q_lora_rank": 48,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 16,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16, "type": "yarn",
    },
}  # fmt: skip
_QWEN = {
    "image_token_id": 98, "video_token_id": 99, "vision_start_token_id": 96,
    "vision_end_token_id": 97, "vision_token_id": 95, "vision_config": {"hidden_size": 16},
}  # fmt: skip
_QWEN2 = _SIZES | {
    "max_window_layers": 28, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "rope_theta": 1e6, "sliding_window": 128, "use_sliding_window": False,
}  # fmt: skip
_QWEN3 = _SIZES | {
    "attention_bias": False, "head_dim": 16, "model_type": "qwen3_vl_text", "rope_theta": 5e6,
    "rope_scaling": {
        "mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default",
    },
}  # fmt: skip
# name -> (architecture, the published file's keys; sizes are reduced)
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral-Small-3.1": (
        "Mistral3ForConditionalGeneration", _MISTRAL3 | {"text_config": _MISTRAL},
    ),
    "Ministral-3": ("Mistral3ForConditionalGeneration", _MISTRAL3 | {"text_config": _MINISTRAL}),
    "Mistral-Small-4": ("Mistral3ForConditionalGeneration", _MISTRAL3 | {"text_config": _MISTRAL4}),
    "Kimi-K2.5": ("KimiK25ForConditionalGeneration", _KIMI | {"text_config": _KIMI_K2}),
    "Kimi-K2.5, by transformers": (
        "Kimi_K25ForConditionalGeneration",
        _KIMI | {"text_config": _KIMI_K2 | {"model_type": "deepseek_v3"}},
    ),
    "Devstral-2": ("Ministral3ForCausalLM", _MINISTRAL),
    "Qwen2-VL": ("Qwen2VLForConditionalGeneration", _QWEN | _QWEN2 | {"model_type": "qwen2_vl"}),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration", _QWEN | _QWEN2 | {"model_type": "qwen2_5_vl"},
    ),
    "Qwen2.5-VL, nested": (
        "Qwen2_5_VLForConditionalGeneration",
        _QWEN | {"text_config": _QWEN2 | {"layer_types": ["full_attention"] * 4}},
    ),
    "InternVL3": (
        "InternVLForConditionalGeneration",
        {"text_config": _QWEN2 | {"model_type": "qwen2", "rope_scaling": None, "head_dim": 16}},
    ),
    "InternVL3.5": (
        "InternVLForConditionalGeneration",
        {"text_config": _QWEN3 | {"model_type": "qwen3", "rope_scaling": None}},
    ),
    "Pixtral": (
        "LlavaForConditionalGeneration",
        {"text_config": _MISTRAL | {"is_composition": True}, "vision_config": {"hidden_size": 16}},
    ),
    "Qwen3-VL": ("Qwen3VLForConditionalGeneration", _QWEN | {"text_config": _QWEN3}),
}  # fmt: skip


def described(folder: Path, architecture: str, keys: dict[str, Any]) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(keys | {"architectures": [architecture]}))
    return load_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "known_to_transformers", None)
    found = described(tmp_path, *PUBLISHED[name])
    head_dim = 16 if found.latent is None else 32 + 8
    assert (found.num_layers, found.head_dim, found.sliding_windows) == (4, head_dim, (None,) * 4)
    text = PUBLISHED[name][1].get("text_config", PUBLISHED[name][1])
    assert found.ropes[0].theta == text.get("rope_parameters", text)["rope_theta"]


def test_every_model_is_among_them() -> None:
    assert {architecture for architecture, _ in PUBLISHED.values()} == set(FAMILIES)


def test_queries_grow_by_what_the_rotation_says(tmp_path: Path) -> None:
    assert described(tmp_path, *PUBLISHED["Devstral-2"]).temperature == Temperature(
        0.1, 16, first=0, rotated=True
    )
    for without in ({"llama_4_scaling_beta": 0.0}, {"llama_4_scaling_beta": None}):
        rope = _MINISTRAL["rope_parameters"] | without
        keys = _MINISTRAL | {"rope_parameters": rope}
        assert described(tmp_path, "Ministral3ForCausalLM", keys).temperature is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("Mistral-Small-3.1", {"model_type": "mistral9"}, "text_config of 'mistral9' is not supp"),
        ("Mistral-Small-3.1", {"num_experts": 4}, "num_experts 4 may change"),
        ("Mistral-Small-3.1", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "section"),
        ("Ministral-3", {"attention_bias": True}, "attention_bias True may change"),
        ("Qwen3-VL", {"use_sliding_window": True}, "use_sliding_window True is not supported"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, text: dict[str, Any], message: str) -> None:
    architecture, keys = PUBLISHED[name]
    with pytest.raises(ModelError, match=message):
        described(tmp_path, architecture, keys | {"text_config": keys["text_config"] | text})


@pytest.mark.parametrize(
    ("whole", "inner", "tied"),
    [({}, {}, False), ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True)],
)
def test_either_part_may_tie_the_head(
    tmp_path: Path, whole: dict[str, bool], inner: dict[str, bool], tied: bool
) -> None:
    architecture, keys = PUBLISHED["Qwen3-VL"]
    given = keys | whole | {"text_config": keys["text_config"] | inner}
    assert described(tmp_path, architecture, given).tied_embeddings == tied


def test_kimi(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """DeepSeek-V3 by the names of published files."""
    names = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    folder = renamed(tiny_model("deepseek-v3"), tmp_path / "renamed", names)
    path = folder / "config.json"
    inner = json.loads(path.read_text()) | {"model_type": "kimi_k2"}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": inner}
    path.write_text(json.dumps(_KIMI | whole))
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected("deepseek-v3")


def test_sizes_that_are_not_given(tmp_path: Path) -> None:
    """As in LLaVA 1.5's file, which says where its decoder differs from transformers' Llama."""
    text = {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064}
    found = described(tmp_path, "LlavaForConditionalGeneration", {"text_config": text})
    theirs = transformers.LlavaConfig(text_config=text).text_config
    for ours, name in (
        ("inner_size", "intermediate_size"),
        ("num_kv_heads", "num_key_value_heads"),
    ):
        assert getattr(found, ours) == getattr(theirs, name)
    for name in ("hidden_size", "head_dim", "vocab_size"):
        assert getattr(found, name) == getattr(theirs, name)
    assert (found.num_layers, found.max_positions) == (theirs.num_hidden_layers, 4096)


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        (
            "qwen2.5-vl-images",
            {
                "model.": "model.language_model.",
                "visual.": "model.visual.",
            },
        ),
        (
            "mistral3-images",
            {
                "language_model.model.": "model.language_model.",
                "language_model.lm_head.": "lm_head.",
                "vision_tower.": "model.vision_tower.",
                "multi_modal_projector.": "model.multi_modal_projector.",
            },
        ),
    ],
)
def test_other_names_of_tensors(
    tiny_model: Callable[..., Path], tmp_path: Path, variant: str, names: dict[str, str]
) -> None:
    """As transformers holds them; beside a flat file, too."""
    folder = renamed(tiny_model(variant), tmp_path / "renamed", names)
    before, after = (load_file(f / WEIGHTS).keys() for f in (tiny_model(variant), folder))
    assert before != after
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if variant.startswith("qwen"):
        path.write_text(json.dumps(config | config.pop("text_config")))
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected(variant)


def test_a_folder_of_float8_with_one_scale_a_tensor(tmp_path: Path) -> None:
    """As the instruction models of Ministral 3 are published."""
    model = scaled_folders.write(tmp_path, "mistral", "ministral3-images")
    planner = MiniPlanner(make_chain(tmp_path, 2), feeds=True)
    assert planner.run(make_prompts(LENGTHS), SHORT) == answers(model)
