"""Keys of published config.json files of mixtures with shared experts or other routing, as in
`published_keys.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.stage.models.config import DecoderConfig
from actors.stage.models.read import load_config
from tests.actors.stage.models.published_keys import PUBLISHED

_ALL = PUBLISHED["Llama-2"][1]
_QWEN = {"max_window_layers": 28, "sliding_window": 128, "use_sliding_window": False}
_MOE = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "num_experts_per_tok": 2}
_DEEPSEEK_V3_EXPERTS = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_group": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "topk_group": 1,
}  # fmt: skip
_NEMOTRON_H = {
    "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
    "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 32,
    "mamba_hidden_act": "silu", "mamba_num_heads": 4, "mamba_proj_bias": False, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 2, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "sliding_window": None, "ssm_state_size": 16, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
    "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
}  # fmt: skip
_GRANITE = {
    "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
    "logits_scaling": 8, "pad_token_id": 0, "residual_multiplier": 0.22, "rope_scaling": None,
}  # fmt: skip

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen1.5-MoE": (
        "Qwen2MoeForCausalLM",
        _ALL | _QWEN | _MOE | {
            "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen2_moe",
            "moe_intermediate_size": 32, "norm_topk_prob": False, "num_experts": 4,
            "qkv_bias": True, "shared_expert_intermediate_size": 80,
        },
    ),
    "GLM-4.5": (
        "Glm4MoeForCausalLM",
        _ALL | _DEEPSEEK_V3_EXPERTS | {
            "attention_bias": True, "head_dim": 16, "model_type": "glm4_moe", "pad_token_id": 0,
            "partial_rotary_factor": 0.5, "rope_scaling": None, "use_qk_norm": True,
        },
    ),
    "FlexOlmo-7x7B": (
        "FlexOlmoForCausalLM",
        _ALL | _MOE | {
            "attention_bias": False, "model_type": "flex_olmo", "norm_topk_prob": False,
            "num_experts": 4,
        },
    ),
    "Granite MoE, shared": (
        "GraniteMoeSharedForCausalLM",
        _ALL | _GRANITE | _MOE | {
            "model_type": "granitemoeshared", "num_local_experts": 4,
            "shared_intermediate_size": 48,
        },
    ),
    "Granite-4.0-1B": (
        "GraniteMoeHybridForCausalLM",
        _ALL | _GRANITE | {
            "init_method": "mup", "layer_types": ["attention"] * 4, "mamba_chunk_size": 256,
            "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
            "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
            "mamba_proj_bias": False, "model_type": "granitemoehybrid",
            "normalization_function": "rmsnorm", "num_experts_per_tok": 0,
            "num_local_experts": 0, "output_router_logits": False,
            "position_embedding_type": "rope", "router_aux_loss_coef": 0.01,
            "shared_intermediate_size": 80,
        },
    ),
    "Granite-4.0-H-Tiny": (
        "GraniteMoeHybridForCausalLM",
        _ALL | _GRANITE | _MOE | {
            "init_method": "mup", "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
            "mamba_d_head": 32, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1,
            "mamba_n_heads": 4, "mamba_proj_bias": False, "model_type": "granitemoehybrid",
            "normalization_function": "rmsnorm", "num_local_experts": 4,
            "position_embedding_type": "nope", "shared_intermediate_size": 80,
        },
    ),
    "Nemotron-H-8B": (
        "NemotronHForCausalLM",
        _ALL | _NEMOTRON_H | {
            "attention_head_dim": 16, "hybrid_override_pattern": "M-M*-M", "num_hidden_layers": 6,
            "time_step_rank": 256,
        },
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "NemotronHForCausalLM",
        _ALL | _NEMOTRON_H | {
            "head_dim": 16, "hybrid_override_pattern": "MEM*EME",
            "mamba_ssm_cache_dtype": "float32", "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48, "n_group": 1, "n_routed_experts": 8,
            "n_shared_experts": 1, "norm_eps": 1e-5,
            "norm_topk_prob": True, "num_experts_per_tok": 2, "num_hidden_layers": 7,
            "partial_rotary_factor": 1.0, "routed_scaling_factor": 2.5, "topk_group": 1,
        },
    ),
    "Bamba-9B": (
        "BambaForCausalLM",
        _ALL | {
            "attention_bias": False, "attn_layer_indices": [2], "attn_rotary_emb": 8,
            "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
            "mamba_d_head": 32, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1,
            "mamba_n_heads": 4, "mamba_proj_bias": False, "mlp_bias": False,
            "model_type": "bamba", "num_logits_to_keep": 1, "pad_token_id": 0,
            "rope_scaling": None,
        },
    ),
    "Falcon-H1-0.5B": (
        "FalconH1ForCausalLM",
        _ALL | {
            "attention_bias": False, "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 0.9375, "attn_layer_indices": None,
            "embedding_multiplier": 5.656854249492381, "head_dim": 16,
            "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625,
            "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4,
            "mamba_d_head": 16, "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_expand": 2,
            "mamba_n_groups": 1, "mamba_n_heads": 6, "mamba_norm_before_gate": False,
            "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
            "mlp_bias": False, "mlp_expansion_factor": 8,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "model_type": "falcon_h1", "num_logits_to_keep": 1, "pad_token_id": 0,
            "projectors_bias": False, "rope_scaling": None, "rope_theta": 100000000000.0,
            "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.36, 0.5, 0.37],
            "ssm_out_multiplier": 0.23570226039551587,
        },
    ),
    "Hunyuan-A13B": (
        "HunYuanMoEV1ForCausalLM",
        _ALL | {
            "attention_bias": False, "attention_head_dim": 16, "cla_share_factor": 2,
            "class_num": 0, "dense_list": [4096, 0], "eod_token_id": 3, "head_dim": 16,
            "mlp_bias": False, "model_type": "hunyuan_v1_moe", "moe_drop_tokens": False,
            "moe_intermediate_size": [96] * 4, "moe_layer_num_skipped": 0,
            "moe_random_routing_dropped_token": False, "moe_topk": [2] * 4, "norm_type": "rms",
            "num_experts": 4, "num_shared_expert": [1] * 4,
            "rope_scaling": {
                "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "type": "dynamic",
            },
            "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True,
        },
    ),
    "Solar-Open-100B": (
        "SolarOpenForCausalLM",
        _ALL | _DEEPSEEK_V3_EXPERTS | {
            "attention_bias": False, "first_k_dense_replace": 0, "head_dim": 16,
            "model_type": "solar_open", "partial_rotary_factor": 1.0,
            "rope_scaling": {
                "factor": 2.0, "original_max_position_embeddings": 128, "type": "yarn",
            },
            "routed_scaling_factor": 1.0, "use_qk_norm": False,
        },
    ),
    "dots.llm1": (
        "Dots1ForCausalLM",
        _ALL | _DEEPSEEK_V3_EXPERTS | {
            "attention_bias": False, "max_window_layers": 4, "model_type": "dots1",
            "moe_layer_freq": 1, "n_shared_experts": 2, "scoring_func": "noaux_tc",
            "sliding_window": None, "topk_method": "noaux_tc",
        },
    ),
    "K-EXAONE": (
        "ExaoneMoEForCausalLM",
        _ALL | {
            "first_k_dense_replace": 1, "head_dim": 16, "is_moe_layer": [False, True, True, True],
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "model_type": "exaone_moe", "moe_intermediate_size": 32, "n_group": 1,
            "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2,
            "num_nextn_predict_layers": 1, "num_shared_experts": 1, "pad_token_id": 0,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 64,
            "sliding_window_pattern": "LLLG", "topk_group": 1, "topk_method": "noaux_tc",
        },
    ),
    "MiniMax-M2": (
        "MiniMaxM2ForCausalLM",
        _ALL | _MOE | {
            "attn_type_list": [1] * 4, "attn_window_size": None, "head_dim": 16,
            "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0, "max_model_len": None, "mlp_intermediate_size": 192,
            "model_type": "minimax", "mtp_transformer_layers": 1, "num_expert_group": None,
            "num_local_experts": 4, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
            "quantization_config": {
                "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
                "weight_block_size": [128, 128],
            },
            "rotary_dim": 8, "routed_scaling_factor": 1.0, "router_jitter_noise": 0.0,
            "scoring_func": "sigmoid", "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid", "swa_rope_theta": -1.0, "topk_group": None,
            "use_grouped_topk": True, "use_mtp": True, "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "ERNIE-4.5-21B-A3B": (
        "Ernie4_5_MoeForCausalLM",
        _ALL | {
            "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk",
            "moe_intermediate_size": 32, "moe_k": 2, "moe_layer_end_index": 3,
            "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 4,
            "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_nextn_predict_layers": 1,
            "pad_token_id": 0, "rope_scaling": None, "use_bias": False,
        },
    ),
}  # fmt: skip


def described(folder: Path, name: str, **changed: Any) -> DecoderConfig:
    architecture, keys = MIXTURES[name]
    config = keys | {"architectures": [architecture]} | changed
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return load_config(folder)
