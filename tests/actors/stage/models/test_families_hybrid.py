"""What published files of models with states say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.stage.models.config import DecoderConfig, LinearAttention, ModelError, ShortConv
from actors.stage.models.read import load_config
from actors.stage.models.split import split
from actors.stage.spec import StageSpec

_DELTA: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "full_attention_interval": 4,
    "head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 16, "max_position_embeddings": 262144,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "use_cache": True, "vocab_size": 100,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48,
}  # fmt: skip
_TEXT: dict[str, Any] = _DELTA | {
    "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 7, "mamba_ssm_dtype": "float32",
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "output_gate_type": "swish",
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
_IMAGES: dict[str, Any] = {
    "image_token_id": 9, "video_token_id": 10, "vision_start_token_id": 11,
    "vision_end_token_id": 12, "vision_config": {"depth": 1}, "transformers_version": "4.57.0",
}  # fmt: skip
_CONV: dict[str, Any] = {
    "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "eos_token_id": 7, "hidden_size": 64,
    "initializer_range": 0.02, "max_position_embeddings": 128000, "norm_eps": 1e-5,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100,
}  # fmt: skip
# name -> the published file's keys; sizes are reduced
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next": _DELTA | _EXPERTS | {
        "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1,
        "intermediate_size": 96, "mlp_only_layers": [], "model_type": "qwen3_next",
        "norm_topk_prob": True, "output_router_logits": False, "partial_rotary_factor": 0.25,
        "rope_scaling": None, "rope_theta": 10000000, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_sliding_window": False,
    },
    "Qwen3.5": _IMAGES | {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": _TEXT | {"intermediate_size": 96, "model_type": "qwen3_5_text"},
        "tie_word_embeddings": True,
    },
    "Qwen3.5-MoE": _IMAGES | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": _TEXT | _EXPERTS | {"model_type": "qwen3_5_moe_text"},
        "tie_word_embeddings": False,
    },
    "LFM2": _CONV | {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 64,
        "block_ff_dim": 384, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_dim": 64,
        "conv_dim_out": 64, "conv_use_xavier_init": True, "full_attn_idxs": [3],
        "model_type": "lfm2", "num_heads": 4, "use_pos_enc": True,
    },
    "LFM2-MoE": _CONV | {
        "architectures": ["Lfm2MoeForCausalLM"], "intermediate_size": 96,
        "layer_types": ["conv"] * 3 + ["full_attention"], "model_type": "lfm2_moe",
        "moe_intermediate_size": 32, "norm_topk_prob": True, "num_dense_layers": 2,
        "num_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
}  # fmt: skip


def described(folder: Path, name: str, **changed: Any) -> DecoderConfig:
    """changed: keys of the decoder's part."""
    raw = PUBLISHED[name]
    if "text_config" in raw:
        raw = raw | {"text_config": raw["text_config"] | changed}
    else:
        raw = raw | changed
    (folder / "config.json").write_text(json.dumps(raw), "utf-8")
    return load_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(tmp_path: Path, name: str) -> None:
    found = described(tmp_path, name)
    assert found.mixer_layers == (True, True, True, False)
    assert found.dtype == "bfloat16"
    if name.startswith("LFM2"):
        assert found.mixer == ShortConv(taps=3)
        assert (found.norm_eps, found.tied_embeddings, found.attention_gate) == (1e-5, True, False)
        return
    assert found.mixer == LinearAttention(
        taps=4, num_key_heads=2, num_heads=4, key_dim=16, value_dim=16
    )
    assert {rope.dim for rope in found.ropes} == {8}
    assert (found.attention_gate, found.norm_offset) == (True, 1.0)
    assert found.tied_embeddings == (name == "Qwen3.5")


def test_sizes_of_experts_and_inner_layers(tmp_path: Path) -> None:
    for name in ("Qwen3-Next", "Qwen3.5-MoE"):
        found = described(tmp_path, name)
        assert (found.expert_size, found.shared_expert_size, found.num_experts) == (32, 48, 8)
        assert found.expert_layers == (True,) * 4
    assert described(tmp_path, "LFM2-MoE").expert_layers == (False, False, True, True)
    assert described(tmp_path, "LFM2").inner_size == 256
    assert described(tmp_path, "LFM2", block_ffn_dim_multiplier=1.3).inner_size == 512
    assert described(tmp_path, "LFM2", block_auto_adjust_ff_dim=False).inner_size == 384


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("Qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads 3: no multiple of 2"),
        ("Qwen3.5", {"attn_output_gate": False}, "attn_output_gate False is not supported"),
        ("Qwen3.5", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported"),
        ("Qwen3.5", {"layer_types": ["linear_attention"]}, "must name full_attention or linear"),
        ("Qwen3.5", {"model_type": "qwen4"}, "text_config of 'qwen4' is not supported"),
        ("Qwen3-Next", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("LFM2", {"layer_types": ["linear_attention"] * 4}, "must name full_attention or conv"),
        ("LFM2-MoE", {"use_expert_bias": False}, "use_expert_bias False is not supported"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        described(tmp_path, name, **changed)


def test_key_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="2 key heads of linear attention cannot be split over 4"):
        split(described(tmp_path, "Qwen3.5"), StageSpec(str(tmp_path), tensor_ranks=4))
