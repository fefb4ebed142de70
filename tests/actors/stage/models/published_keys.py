"""Keys of published config.json files, with their values; sizes are reduced.

Each row lists what its file has beyond the keys that nearly all of them share.
"""

from __future__ import annotations

from typing import Any

_ALL: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "use_cache": True, "vocab_size": 100,
}  # fmt: skip
_LLAMA = {"attention_bias": False, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1}
_LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_type": "llama3",
}  # fmt: skip
_YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 64,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip
_QWEN = {"max_window_layers": 28, "sliding_window": 128, "use_sliding_window": False}
_QWEN3 = _QWEN | {"attention_bias": False, "head_dim": 16, "sliding_window": None}
_PHI = {
    "attention_bias": False, "embd_pdrop": 0.0, "model_type": "phi3", "pad_token_id": 0,
    "original_max_position_embeddings": 64, "resid_pdrop": 0.0, "sliding_window": 262144,
}  # fmt: skip
_LONGROPE = {"long_factor": [1.08] * 8, "short_factor": [1.0] * 8, "type": "longrope"}
_GEMMA2 = {
    "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh", "model_type": "gemma2", "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "sliding_window": 64, "sliding_window_size": 64,
}  # fmt: skip
_GEMMA3 = {
    "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma3_text", "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 64,
    "sliding_window_pattern": 6,
}  # fmt: skip
_GRANITE = {
    "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
    "logits_scaling": 16.0, "mlp_bias": False, "model_type": "granite", "pad_token_id": 0,
    "residual_multiplier": 0.22, "rope_scaling": None,
}  # fmt: skip
_MOE = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "num_experts_per_tok": 2}
_COHERE = {
    "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "model_type": "cohere", "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 1, "embd_pdrop": 0.1,
    "eos_token_id": 1, "gradient_checkpointing": False, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 256, "n_embd": 64, "n_head": 4,
    "n_inner": None, "n_layer": 2, "n_positions": 256, "n_special": 0,
    "predict_special_tokens": True, "resid_pdrop": 0.1, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "use_cache": True, "vocab_size": 100,
}  # fmt: skip
_OPT = {
    "_name_or_path": "facebook/opt-6.7b", "_remove_final_layer_norm": False,
    "activation_dropout": 0.0, "activation_function": "relu", "attention_dropout": 0.0,
    "do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 96, "hidden_size": 64,
    "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 256, "model_type": "opt",
    "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 1, "prefix": "</s>",
    "torch_dtype": "float16", "use_cache": True, "vocab_size": 100, "word_embed_proj_dim": 64,
}  # fmt: skip
_FALCON = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "bias": False,
    "hidden_dropout": 0.0, "hidden_size": 64, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5, "model_type": "falcon", "multi_query": True,
    "new_decoder_architecture": False, "num_attention_heads": 4, "num_hidden_layers": 2,
    "parallel_attn": True, "use_cache": True, "vocab_size": 100,
}  # fmt: skip
_MPT = {
    "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
        "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
        "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
    },
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}, "d_model": 64, "emb_pdrop": 0,
    "embedding_fraction": 1.0, "expansion_ratio": 4,
    "init_config": {"fan_mode": "fan_in", "init_nonlinearity": "relu", "name": "kaiming_normal_"},
    "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 256,
    "model_type": "mpt", "n_heads": 4, "n_layers": 2, "no_bias": True,
    "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "gpt-neox",
    "torch_dtype": "bfloat16", "use_cache": False, "verbose": 0, "vocab_size": 100,
}  # fmt: skip
_BLOOM = {
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "hidden_dropout": 0.0,
    "hidden_size": 64, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
    "masked_softmax_fusion": True, "model_type": "bloom", "n_head": 4, "n_inner": None,
    "n_layer": 2, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 4,
    "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0,
    "use_cache": True, "vocab_size": 100,
}  # fmt: skip
_STARCODER2 = {
    "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default", "model_type": "starcoder2",
    "norm_epsilon": 1e-5, "norm_type": "layer_norm", "sliding_window": 64, "use_bias": True,
}  # fmt: skip
_GPT_OSS = {
    **_MOE, "attention_bias": True, "experts_per_token": 2, "head_dim": 16,
    "initial_context_length": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "model_type": "gpt_oss", "num_local_experts": 4, "pad_token_id": 0,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rope_scaling": _YARN, "sliding_window": 64, "swiglu_limit": 7.0,
}  # fmt: skip
_LLAMA4 = {
    "attention_bias": False, "attention_chunk_size": 64, "attn_scale": 0.1,
    "attn_temperature_tuning": 4, "floor_scale": 64, "for_llm_compressor": False, "head_dim": 16,
    "interleave_moe_layer_step": 1, "intermediate_size_mlp": 96, "model_type": "llama4_text",
    "no_rope_layers": [], "num_experts_per_tok": 1, "num_local_experts": 4,
    "output_router_logits": False, "pad_token_id": 0, "rope_scaling": _LLAMA3_ROPE,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True,
}  # fmt: skip
_COHERE2 = {
    **_COHERE, "attention_bias": False, "cache_implementation": "hybrid", "head_dim": 16,
    "layer_switch": 4, "model_type": "cohere2", "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rotary_pct": 1.0,
    "sliding_window": 64, "sliding_window_pattern": 4, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False,
}  # fmt: skip

# name -> (architecture, the file's keys)
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-2": ("LlamaForCausalLM", _ALL | {"pretraining_tp": 1, "rope_scaling": None}),
    "Llama-3.1": ("LlamaForCausalLM", _ALL | _LLAMA | {"rope_scaling": _LLAMA3_ROPE}),
    "Llama-3.2": (
        "LlamaForCausalLM", _ALL | _LLAMA | {"head_dim": 16, "rope_scaling": _LLAMA3_ROPE},
    ),
    "Llama-4-Scout, text": ("Llama4ForCausalLM", _ALL | _LLAMA4),
    "ALLaM": ("LlamaForCausalLM", _ALL | _LLAMA | {"internal_version": "7b-alpha"}),
    "SmolLM2": (
        "LlamaForCausalLM",
        _ALL | _LLAMA | {
            "is_llama_config": True, "rope_interleaved": False,
            "transformers.js_config": {"dtype": "q4"},
        },
    ),
    "Mistral": (
        "MistralForCausalLM", _ALL | {"model_type": "mistral", "sliding_window": 64},
    ),
    "Mixtral": (
        "MixtralForCausalLM",
        _ALL | _MOE | {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    ),
    "Qwen2.5": ("Qwen2ForCausalLM", _ALL | _QWEN | {"model_type": "qwen2"}),
    "DeepSeek-R1-Distill-Qwen": (
        "Qwen2ForCausalLM", _ALL | _QWEN | {"model_type": "qwen2", "use_mrope": False},
    ),
    "Qwen3": ("Qwen3ForCausalLM", _ALL | _QWEN3 | {"model_type": "qwen3", "rope_scaling": None}),
    "Qwen3-235B-A22B": (
        "Qwen3MoeForCausalLM",
        _ALL | _QWEN3 | _MOE | {
            "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_moe",
            "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 4,
            "rope_scaling": None,
        },
    ),
    "Qwen3-Coder": (
        "Qwen3MoeForCausalLM",
        _ALL | _QWEN3 | _MOE | {
            "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_moe",
            "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 4,
            "qkv_bias": False, "rope_scaling": None, "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
    ),
    "Phi-3.5-mini": (
        "Phi3ForCausalLM",
        _ALL | _PHI | {
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "rope_scaling": _LONGROPE,
        },
    ),
    "Phi-4": ("Phi3ForCausalLM", _ALL | _PHI | {"rope_scaling": None, "sliding_window": None}),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        _ALL | _PHI | {
            "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
            "partial_rotary_factor": 0.75,
            "rope_scaling": _LONGROPE | {"long_factor": [1.0] * 6, "short_factor": [1.0] * 6},
        },
    ),
    "Gemma-7B": (
        "GemmaForCausalLM",
        _ALL | {
            "attention_bias": False, "head_dim": 16, "hidden_act": "gelu",
            "hidden_activation": "gelu_pytorch_tanh", "model_type": "gemma", "pad_token_id": 0,
        },
    ),
    "Gemma-2": ("Gemma2ForCausalLM", _ALL | _GEMMA2),
    "Gemma-3-1B": ("Gemma3ForCausalLM", _ALL | _GEMMA3),
    "OLMo-2": ("Olmo2ForCausalLM", _ALL | {"attention_bias": False, "model_type": "olmo2"}),
    "OLMoE": (
        "OlmoeForCausalLM",
        _ALL | _MOE | {
            "attention_bias": False, "clip_qkv": None, "model_type": "olmoe",
            "norm_topk_prob": False, "num_experts": 4,
        },
    ),
    "Granite-3.3": ("GraniteForCausalLM", _ALL | _GRANITE),
    "Granite-3.1-MoE": (
        "GraniteMoeForCausalLM",
        _ALL | _GRANITE | _MOE | {"model_type": "granitemoe", "num_local_experts": 4},
    ),
    "SmolLM3": (
        "SmolLM3ForCausalLM",
        _ALL | _QWEN | {
            "attention_bias": False, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2,
            "sliding_window": None, "layer_types": ["full_attention"] * 4,
        },
    ),
    "GLM-4-0414": (
        "Glm4ForCausalLM",
        _ALL | {
            "attention_bias": True, "head_dim": 16, "model_type": "glm4", "pad_token_id": 0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "InternLM2.5": (
        "InternLM2ForCausalLM",
        _ALL | {
            "attn_implementation": "eager", "bias": False, "model_type": "internlm2",
            "pretraining_tp": 1, "rope_scaling": {"type": "dynamic", "factor": 2.0},
            "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
        },
    ),
    "StarCoder2": ("Starcoder2ForCausalLM", _ALL | _STARCODER2),
    "Falcon-7B": ("FalconForCausalLM", _FALCON | {"num_kv_heads": 71}),
    "Falcon-40B": (
        "FalconForCausalLM", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "Command-R": ("CohereForCausalLM", _ALL | _COHERE | {"model_max_length": 131072}),
    "Command-R7B": ("Cohere2ForCausalLM", _ALL | _COHERE2),
    "gpt-oss-20b": ("GptOssForCausalLM", _ALL | _GPT_OSS),
    "GPT-2": ("GPT2LMHeadModel", _GPT2),
    "OPT-6.7B": ("OPTForCausalLM", _OPT),
    "BLOOM": ("BloomForCausalLM", _BLOOM),
    "MPT-7B": ("MPTForCausalLM", _MPT),
}  # fmt: skip
