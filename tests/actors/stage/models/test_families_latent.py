"""What published files of models with latent attention say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.stage.models.config import DecoderConfig, Latent, ModelError
from actors.stage.models.read import load_config
from kernels.layer_form import Routing

_SIZES: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 1024,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 100, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "moe_layer_freq": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "seq_aux": True,
}  # fmt: skip
_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64, "type": "yarn",
}  # fmt: skip
# name -> the published file's keys; sizes are reduced
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": _SIZES | _EXPERTS | {
        "architectures": ["DeepseekV2ForCausalLM"], "auto_map": {"AutoConfig": "x.Y"},
        "ep_size": 1, "model_type": "deepseek_v2", "n_group": 1, "n_shared_experts": 2,
        "norm_topk_prob": False, "pretraining_tp": 1, "q_lora_rank": None, "rope_scaling": _YARN,
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "topk_group": 1, "topk_method": "greedy",
    },
    "DeepSeek-V2": _SIZES | _EXPERTS | {
        "architectures": ["DeepseekV2ForCausalLM"], "ep_size": 1, "model_type": "deepseek_v2",
        "n_group": 4, "norm_topk_prob": False, "rope_scaling": _YARN, "rope_theta": 10000,
        "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 2,
        "topk_method": "group_limited_greedy",
    },
    "DeepSeek-V3": _SIZES | _EXPERTS | {
        "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "x.Y"},
        "ep_size": 1, "model_type": "deepseek_v3", "n_group": 4, "norm_topk_prob": True,
        "num_nextn_predict_layers": 1, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "scoring_func": "sigmoid", "topk_group": 2, "topk_method": "noaux_tc",
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
    "GLM-4.7-Flash": _SIZES | _EXPERTS | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "n_group": 1,
        "norm_topk_prob": True, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
        "topk_group": 1, "topk_method": "noaux_tc",
    },
    "MiniCPM3": {key: value for key, value in _SIZES.items() if key != "v_head_dim"} | {
        "architectures": ["MiniCPM3ForCausalLM"], "auto_map": {"AutoConfig": "x.Y"},
        "dim_model_base": 32, "model_type": "minicpm3", "scale_depth": 1.4, "scale_emb": 12,
        "rope_scaling": {
            "long_factor": [1.1] * 4, "original_max_position_embeddings": 1024,
            "short_factor": [1.1] * 4, "type": "longrope",
        },
    },
    "Youtu-LLM": _SIZES | {
        "architectures": ["YoutuForCausalLM"], "embedding_initializer_range": 0.1,
        "head_dim": 8, "mlp_bias": False, "model_type": "youtu", "qk_head_dim": 24,
        "rope_interleave": True, "rope_theta": 1600000, "tie_word_embeddings": True,
    },
}  # fmt: skip


def described(folder: Path, name: str, **changed: Any) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name] | changed), "utf-8")
    return load_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(tmp_path: Path, name: str) -> None:
    found = described(tmp_path, name)
    assert found.latent == Latent(
        rank=32,
        query_rank=0 if name == "DeepSeek-V2-Lite" else 48,
        plain_dim=16,
        rotated_dim=8,
        value_dim=16,
    )
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 1, 40)
    assert {(rope.dim, rope.interleaved) for rope in found.ropes} == {(8, name != "MiniCPM3")}


def test_scores_of_a_scaled_rotation(tmp_path: Path) -> None:
    plain = described(tmp_path, "DeepSeek-V3", rope_scaling=None)
    assert plain.attention_scale == 24**-0.5
    scaled = described(tmp_path, "DeepSeek-V3")
    assert scaled.attention_scale == pytest.approx(24**-0.5 * 1.36888794541**2)  # 0.1 ln 40 + 1
    assert scaled.ropes[0].attention_factor == 1.0


def test_experts_of_deepseek(tmp_path: Path) -> None:
    assert described(tmp_path, "DeepSeek-V2-Lite").routing == Routing(best_of_group=1)
    grouped = Routing(num_groups=4, kept_groups=2, best_of_group=1, scale=16.0)
    assert described(tmp_path, "DeepSeek-V2").routing == grouped
    third = described(tmp_path, "DeepSeek-V3")
    assert (third.routing.scores, third.routing.num_groups) == ("sigmoid", 4)
    assert third.names.stored_prefixes == (("model.layers.4.", None),)
    listed = described(tmp_path, "GLM-4.7-Flash", mlp_layer_types=["sparse"] * 3 + ["dense"])
    assert listed.expert_layers == (True, True, True, False)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("DeepSeek-V2", {"topk_group": 5}, "n_group 4, topk_group 5 do not fit 8 experts"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("DeepSeek-V3", {"kv_lora_rank": 33}, "kv_lora_rank must be even, not 33"),
        ("DeepSeek-V3", {"qk_rope_head_dim": 0}, "qk_rope_head_dim must be positive, not 0"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name dense or"),
        ("Youtu-LLM", {"qk_head_dim": 32}, "qk_head_dim 32 is not supported; supported: 24"),
        ("Youtu-LLM", {"sliding_window": 64}, "sliding_window 64 may change"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        described(tmp_path, name, **changed)
