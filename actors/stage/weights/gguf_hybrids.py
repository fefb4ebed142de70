"""GGUF architectures most of whose layers keep a state in place of keys and values."""

from __future__ import annotations

from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_dense import granite_keys
from actors.stage.weights.gguf_family import MLP_NORM, SIGMOID, GgufFamily, of_layers, only
from actors.stage.weights.gguf_metadata import GgufMetadata
from actors.stage.weights.gguf_mixtures import experts, of_deepseek_v3


def _delta_rule(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    heads = metadata.number("ssm.time_step_rank")
    metadata.get("rope.dimension_sections")  # for a text, the rotation is a plain one
    interval = metadata.get("full_attention_interval", 4)
    given = metadata.get("attention.recurrent_layers")  # with those that predict further tokens
    if given is None:
        layers = {"full_attention_interval": interval}
    else:
        kinds = ["linear_attention" if keeps else "full_attention" for keeps in given]
        layers = {"layer_types": kinds[: config["num_hidden_layers"]]}
    return {
        **layers,
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "linear_num_key_heads": metadata.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.number("ssm.inner_size") // heads,
    }


def _delta_rule_experts(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    found = experts(metadata, config)
    shared = metadata.get("expert_shared_feed_forward_length", found["moe_intermediate_size"])
    return {
        **_delta_rule(metadata, config),
        **found,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": shared,
    }


def _lfm2(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    attends = of_layers(metadata, "attention.head_count_kv")
    kinds = ["full_attention" if heads else "conv" for heads in attends]
    first = kinds.index("conv") if "conv" in kinds else 0
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.number("shortconv.l_cache"),
        "conv_bias": metadata.has(f"blk.{first}.shortconv.conv.bias"),
        "layer_types": kinds,
        "norm_eps": config.pop("rms_norm_eps"),
        "attention_bias": False,
    }


def _lfm2_moe(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    only(metadata, "expert_gating_func", SIGMOID)
    found = _lfm2(metadata, config) | experts(metadata, config)
    del found["block_auto_adjust_ff_dim"]
    return {
        **found,
        "norm_topk_prob": True,
        "num_dense_layers": metadata.number("leading_dense_block_count"),
        "use_expert_bias": True,
    }


def _mamba(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """Sizes of Mamba-2 by the keys of Bamba, Granite and Falcon."""
    heads, width = metadata.number("ssm.time_step_rank"), metadata.number("ssm.inner_size")
    names = "".join(metadata.file.tensors)
    return {
        "mamba_conv_bias": "ssm_conv1d.bias" in names,
        "mamba_d_conv": metadata.number("ssm.conv_kernel"),
        "mamba_d_head": width // heads,
        "mamba_d_state": metadata.number("ssm.state_size"),
        "mamba_n_groups": metadata.number("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_proj_bias": "ssm_in.bias" in names,
    }


def _granite_hybrid(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """Granite 4, whose files always say of a shared MLP, or Bamba."""
    attends = of_layers(metadata, "attention.head_count_kv")
    if metadata.get("expert_shared_feed_forward_length") is None:
        return _bamba(metadata, config, attends)
    found = {
        **granite_keys(metadata, config),
        **_mamba(metadata, config),
        "layer_types": ["attention" if heads else "mamba" for heads in attends],
        "mamba_expand": metadata.number("ssm.inner_size") // config["hidden_size"],
        "num_local_experts": metadata.get("expert_count", 0),
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned") else "nope",
        "shared_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
    }
    if number := metadata.get("expert_used_count", 0):
        found["num_experts_per_tok"] = number
    return found


def _bamba(metadata: GgufMetadata, config: JsonObject, attends: list[int]) -> JsonObject:
    only(metadata, "rope.scaling.finetuned", True)  # else nothing is rotated
    # Half of each head is, also of folders that do not say so in the key that converters read.
    only(metadata, "rope.dimension_count", config["head_dim"] // 2)
    attending = [layer for layer, heads in enumerate(attends) if heads]
    biases = (metadata.has(f"blk.{layer}.attn_q.bias") for layer in attending)
    return {
        **_mamba(metadata, config),
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "attention_bias": any(biases),
        "attn_layer_indices": attending,
        "mamba_expand": metadata.number("ssm.inner_size") // config["hidden_size"],
        "mlp_bias": metadata.has("blk.0.ffn_gate.bias"),
    }


def _falcon_h1(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """The file's weights have all multipliers in them."""
    return {
        **_mamba(metadata, config),
        "mamba_d_ssm": metadata.number("ssm.inner_size"),
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": metadata.has("blk.0.ssm_norm.weight"),
        "mlp_bias": metadata.has("blk.0.ffn_gate.bias"),
    }


def _nemotron_h(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    attends = of_layers(metadata, "attention.head_count_kv")
    widths = of_layers(metadata, "feed_forward_length")
    mlp = "moe" if metadata.get("expert_count", 0) else "mlp"
    if mlp == "mlp":  # what files have all the same
        only(metadata, "expert_group_count", 1)
        only(metadata, "expert_group_used_count", 1)
    kinds = [
        "attention" if heads else mlp if width else "mamba"
        for heads, width in zip(attends, widths, strict=True)
    ]
    found = _mamba(metadata, config)
    names = "".join(metadata.file.tensors)
    more: JsonObject = {"layer_norm_epsilon": config.pop("rms_norm_eps")}
    if mlp == "moe":
        shared = metadata.number("expert_shared_feed_forward_length")
        more |= of_deepseek_v3(metadata, config) | {"moe_shared_expert_intermediate_size": shared}
        for key in ("first_k_dense_replace", "num_experts"):
            del more[key]
    return {
        **more,
        "attention_bias": False,
        "conv_kernel": found["mamba_d_conv"],
        "layers_block_type": kinds[: config.pop("num_hidden_layers")],
        "mamba_head_dim": found["mamba_d_head"],
        "mamba_num_heads": found["mamba_n_heads"],
        "mlp_bias": "ffn_up.bias" in names,
        "mlp_hidden_act": "relu2",
        "n_groups": found["mamba_n_groups"],
        "ssm_state_size": found["mamba_d_state"],
        "use_bias": found["mamba_proj_bias"],
        "use_conv_bias": found["mamba_conv_bias"],
    }


_CONVOLUTIONS = {
    "output_norm": "token_embd_norm",
    "ssm_conv1d": "shortconv.conv",
    "ssm_in": "shortconv.in_proj",
    "ssm_out": "shortconv.out_proj",
}

FAMILIES: dict[str, GgufFamily] = {
    "qwen35": GgufFamily(
        "Qwen3_5ForCausalLM", "qwen3_5_text", _delta_rule, norms_plus_one=True, renamed=MLP_NORM
    ),
    "qwen35moe": GgufFamily(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _delta_rule_experts,
        norms_plus_one=True, renamed=MLP_NORM,
    ),
    "qwen3next": GgufFamily(
        "Qwen3NextForCausalLM", "qwen3_next", _delta_rule_experts,
        norms_plus_one=True, renamed=MLP_NORM, regrouped=True,
    ),
    "lfm2": GgufFamily("Lfm2ForCausalLM", "lfm2", _lfm2, renamed=_CONVOLUTIONS),
    "lfm2moe": GgufFamily("Lfm2MoeForCausalLM", "lfm2_moe", _lfm2_moe, renamed=_CONVOLUTIONS),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", _granite_hybrid,
        permuted=True, split_gate_up=True,
    ),
    "nemotron_h": GgufFamily("NemotronHForCausalLM", "nemotron_h", _nemotron_h, permuted=True),
    "nemotron_h_moe": GgufFamily("NemotronHForCausalLM", "nemotron_h", _nemotron_h, permuted=True),
    "falcon-h1": GgufFamily(
        "FalconH1ForCausalLM", "falcon_h1", _falcon_h1, without_ending=("ffn_norm",)
    ),
}  # fmt: skip
