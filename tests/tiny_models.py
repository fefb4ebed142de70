"""Tiny random-weight Hugging Face folders, one per architecture and config variant.

Weights are drawn wide enough that greedy continuations vary, so that equal tokens mean equal
arithmetic. Every folder has safetensors, a byte-level tokenizer with a chat template, and
generation defaults. `python -m tests.tiny_models FOLDER VARIANT` writes one by hand.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import tiny_dense, tiny_gemma4, tiny_hybrids, tiny_mixtures

EOS, TURN_END, TURN_START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
VOCAB_SIZE = 263  # 256 bytes, 3 specials, 4 rows that no token uses; odd, so no even split
EOS_TOKEN_ID = 256
TURN_END_TOKEN_ID = 257

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

# Of a model whose steps take some milliseconds, and of one that has long streams too: they do not
# end before a test's stroke falls, however late front and client are for them on a loaded machine.
# Of forty streams of 120 tokens that two engines served, a front saw all end too early with a width
# of 96, and none with one of 2048; what is wider still only takes longer.
SLOW: dict[str, Any] = {"intermediate_size": 4096}
LASTING: dict[str, Any] = {**SLOW, "max_position_embeddings": 2048}


def _rope(kind: str, theta: float = 10_000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


_FALCON = {"num_key_value_heads": None}
_FALCON_RW = {
    **_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True
}  # fmt: skip
_SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6}
_MPT = {"num_key_value_heads": None, "max_seq_len": 256}
_LLAMA_4 = {
    "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4,
    "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
    "attention_chunk_size": 24, "floor_scale": 8, "attn_scale": 0.3,
}  # fmt: skip
_LONG = {"original_max_position_embeddings": 64, "factor": 4.0}

# variant -> (model class, config entries over the base)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-linear": ("Llama", _rope("linear", factor=2.0)),
    "llama-dynamic": ("Llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 64}),
    "llama-llama3": (
        "Llama",
        _rope("llama3", 500_000.0, low_freq_factor=1.0, high_freq_factor=4.0, **_LONG),
    ),
    "llama-yarn": ("Llama", _rope("yarn", **_LONG)),
    "llama-yarn-mscale": (
        "Llama",
        _rope("yarn", mscale=0.9, mscale_all_dim=0.6, beta_fast=24, beta_slow=2, **_LONG),
    ),
    "llama-yarn-attention": ("Llama", _rope("yarn", attention_factor=1.3, truncate=False, **_LONG)),
    "llama-longrope": (
        "Llama",
        _rope(
            "longrope",
            short_factor=[1.0 + 0.1 * i for i in range(8)],
            long_factor=[2.0 + 0.5 * i for i in range(8)],
            **_LONG,
        ),
    ),
    "yi": (
        "Llama",
        {**_rope("default", 5_000_000.0), "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    ),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "mistral-unlimited": ("Mistral", {"sliding_window": None}),
    "ministral": (
        "Ministral",
        {
            "sliding_window": 16,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, **_rope("default", 1_000_000.0)}),
    "qwen2-sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3", {**_rope("default", partial_rotary_factor=0.75), "sliding_window": 24}),
    "phi3-longrope": (
        "Phi3",
        {
            **_rope(
                "longrope",
                short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + 0.5 * i for i in range(8)],
            ),
            "original_max_position_embeddings": 128,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
    "gemma3-images": (
        "Gemma3WithImages",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-7b": ("Falcon", _FALCON),
    "falcon-40b": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-biased": (
        "Falcon",
        {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon-alibi": ("Falcon", _FALCON_RW),
    # 6 and 12 heads: slopes of no power of two, and of 12 such that rounding changes them.
    "falcon-alibi-6": ("Falcon", {**_FALCON_RW, **_SIX_HEADS}),
    "falcon-alibi-12": ("Falcon", {**_FALCON_RW, **_SIX_HEADS, "num_attention_heads": 12}),
    "bloom": ("Bloom", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    "bloom-6": ("Bloom", {"num_key_value_heads": None, **_SIX_HEADS}),
    "mpt": ("Mpt", {**_MPT, "tie_word_embeddings": True}),
    "mpt-6": ("Mpt", {**_MPT, **_SIX_HEADS, "attn_config": {"softmax_scale": 0.3}}),
    "starcoder2": ("Starcoder2", {"sliding_window": 16}),
    "gpt2": ("GPT2", {"num_key_value_heads": None}),
    "opt": ("OPT", {"num_key_value_heads": None, "ffn_dim": 96, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 4,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            **_rope("yarn", 150_000.0, beta_fast=32.0, beta_slow=1.0, truncate=False, **_LONG),
        },
    ),
    "llama4": ("Llama4", _LLAMA_4),
    # Only dense layers in the first of two stages, and all of one temperature.
    "llama4-plain": (
        "Llama4",
        {**_LLAMA_4, "use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [2]},
    ),
    "llama4-yarn": ("Llama4", {**_LLAMA_4, **_rope("yarn", attention_factor=2.0, **_LONG)}),
    "llama4-images": ("Llama4WithImages", _LLAMA_4),
    "youtu": ("Youtu", tiny_mixtures.LATENT),
    "youtu-yarn": (
        "Youtu",
        {
            **tiny_mixtures.LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            **_rope("yarn", mscale=0.7, mscale_all_dim=1.0, **_LONG),
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {**tiny_mixtures.LATENT, "scale_emb": 6, "dim_model_base": 32, "v_head_dim": None},
    ),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    **tiny_dense.VARIANTS,
    **tiny_mixtures.VARIANTS,
    **tiny_hybrids.VARIANTS,
    **tiny_gemma4.VARIANTS,
}
# Architectures that transformers lacks, and the variant whose weights they have by other names.
BY_OTHER_NAMES = {
    "InternLM2ForCausalLM": "llama",
    "MPTForCausalLM": "mpt",
    "ExaoneMoEForCausalLM": "exaone-moe",
    "KimiK25ForConditionalGeneration": "deepseek-v3",
    "Kimi_K25ForConditionalGeneration": "deepseek-v3",  # transformers saves it by wrong names
}
# Classes whose names do not follow the rule.
_CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma3WithImages": "Gemma3TextConfig",
    "Llama4": "Llama4TextConfig",
    "Llama4WithImages": "Llama4TextConfig",
    **tiny_dense.CONFIGS,
    **tiny_hybrids.CONFIGS,
    **tiny_gemma4.CONFIGS,
}
_MODELS = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3WithImages": "Gemma3ForConditionalGeneration",
    "Llama4WithImages": "Llama4ForConditionalGeneration",
    **tiny_dense.MODELS,
    **tiny_hybrids.MODELS,
    **tiny_gemma4.MODELS,
}
# Classes of configs that hold the decoder's as one part -> their other entries.
_OUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3WithImages": (
        "Gemma3Config",
        {
            "mm_tokens_per_image": 4,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
    "Llama4WithImages": (
        "Llama4Config",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
    **tiny_dense.OUTER,
    **tiny_hybrids.OUTER,
    **tiny_gemma4.OUTER,
}


def architecture(variant: str) -> str:
    """The class of its model, as config.json names it."""
    family = VARIANTS[variant][0]
    return _MODELS.get(family, f"{family}ForCausalLM")


def build(variant: str = "llama", seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """The variant as a transformers model in float32, ready to generate."""
    family, entries = VARIANTS[variant]
    config_class = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))
    config = config_class(**{**_BASE, **entries, **overrides})
    if family in _OUTER:
        outer, others = _OUTER[family]
        config = getattr(transformers, outer)(text_config=config, **copy.deepcopy(others))
    model: transformers.PreTrainedModel = getattr(transformers, architecture(variant))(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3, generator=generator)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
    model.generation_config.pad_token_id = EOS_TOKEN_ID
    return model.eval()


def write(
    folder: Path,
    variant: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write config, tokenizer and safetensors of a variant; returns the folder."""
    model = build(variant, seed, **overrides)
    if dtype != torch.float32:
        model = model.to(dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(
        folder, max_shard_size=size // num_shards + 1 if num_shards > 1 else "5GB"
    )
    write_tokenizer(folder)
    generation = {"eos_token_id": [EOS_TOKEN_ID, TURN_END_TOKEN_ID], "pad_token_id": EOS_TOKEN_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: token i is byte i in the order of the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True) for text in (EOS, TURN_END, TURN_START)]
    tokenizer.add_special_tokens(specials)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    fast.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }}\n{% endfor %}"
        + "{% for m in messages %}" + TURN_START + "{{ m['role'] }}\n{{ m['content'] }}" + TURN_END
        + "\n{% endfor %}{% if add_generation_prompt %}" + TURN_START + "assistant\n{% endif %}"
    )  # fmt: skip
    fast.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:3])
