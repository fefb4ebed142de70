"""Shapes read from config.json: dense models and mixtures of experts, and their cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.simulate.hardware.deployments import compose, load_model
from app.simulate.hardware.interconnect import SHAPES
from app.simulate.hardware.model_config import is_model_config, read_shape, shape_of_config
from app.simulate.hardware.operators import CONFIGS
from app.simulate.hardware.shapes import MODELS, Experts, experts_touched

BASE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
MIXTRAL = BASE | {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = BASE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
}
OLMOE = BASE | {
    "architectures": ["OlmoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
GPT_OSS = BASE | {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 16,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "sliding_window": 128,
}
QWEN3_5 = BASE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
# As published: Nemotron Nano 9B v2, Nemotron 3 Nano 30B-A3B, Falcon-H1 7B.
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_head_dim": 128,
    "conv_kernel": 4,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "max_position_embeddings": 131072,
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "vocab_size": 131072,
}
NEMOTRON_3 = NEMOTRON_H | {
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
}
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"],
    "attn_layer_indices": None,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "max_position_embeddings": 262144,
    "num_attention_heads": 12,
    "num_hidden_layers": 44,
    "num_key_value_heads": 2,
    "vocab_size": 130048,
}
DEEP = BASE | {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
}

ERNIE = BASE | {
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
}
K_EXAONE = OLMOE | {"first_k_dense_replace": 1, "num_shared_experts": 1}


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (BASE, None),
        (MIXTRAL, Experts(8, 2, 14336, 32)),
        (QWEN3_MOE, Experts(128, 8, 768, 47)),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, Experts(128, 8, 768, 24)),
        (OLMOE, Experts(64, 8, 1024, 32)),
        (GPT_OSS, Experts(32, 4, 2880, 32)),
        (DEEP, Experts(64, 4, 1024, 29, shared=2048)),
        (ERNIE, Experts(64, 6, 1536, 31, shared=3072)),
        (K_EXAONE, Experts(64, 8, 1024, 31, shared=1024)),
        (MIXTRAL | {"shared_intermediate_size": 512}, Experts(8, 2, 14336, 32, shared=512)),
    ],
)
def test_experts_are_read(config: dict[str, Any], experts: Experts | None) -> None:
    assert shape_of_config(config, "it").experts == experts


@pytest.mark.parametrize("name", sorted(MODELS))
def test_dense_shapes_are_those_of_the_paper_s_deployments(name: str) -> None:
    known = MODELS[name]
    read = read_shape(SHAPES / name / "config.json")
    assert replace(read, max_model_len=0, profiled="") == replace(
        known, max_model_len=0, profiled=""
    )


def test_a_window_of_some_layers_is_left_out() -> None:
    assert shape_of_config(MIXTRAL | {"sliding_window": 4096}, "it").window == 4096
    assert shape_of_config(GPT_OSS, "it").window == 0
    assert shape_of_config(OLMOE | {"sliding_window": 4096}, "it").window == 0


def test_the_inner_size_of_lfm2_is_that_of_the_loaded_model() -> None:
    """Of which `block_ff_dim` goes before `intermediate_size`; null is as good as absent."""
    plain = BASE | {"architectures": ["Lfm2ForCausalLM"], "intermediate_size": 1536}
    for own, inner in (
        ({}, 1024),
        ({"block_ffn_dim_multiplier": None, "block_multiple_of": None}, 1024),
        ({"block_auto_adjust_ff_dim": None}, 1024),
        ({"block_ff_dim": 3072}, 2048),
        ({"block_ff_dim": 3072, "block_ffn_dim_multiplier": 1.1, "block_multiple_of": 100}, 2300),
        ({"block_ff_dim": 3072, "block_auto_adjust_ff_dim": False}, 3072),
    ):
        assert shape_of_config(plain | own, "it").intermediate == inner, own


def test_configs_that_lack_something_say_what(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for config, message in (
        ({"architectures": ["BloomForCausalLM"]}, "lacks the key 'hidden_size'"),
        (BASE | {"num_experts_per_tok": 2}, "lacks the key 'num_local_experts or"),
        (DEEP | {"kv_lora_rank": 512}, "latent attention"),
        (BASE | {"global_head_dim": 512}, "heads differ in size"),
        (BASE | {"hybrid_override_pattern": "M*-", "mamba_num_heads": 4}, "and an MLP each"),
        (BASE | {"mamba_d_ssm": 64, "mamba_n_heads": 4}, r"\(mamba_d_ssm\)"),
        (NEMOTRON_H | {"hybrid_override_pattern": "M-M-"}, "no layers of both"),
        (NEMOTRON_H | {"hybrid_override_pattern": "*-*-"}, "no layers of both"),
        (QWEN3_5 | {"layer_types": ["linear_attention"] * 32}, "no layers of both"),
    ):
        path.write_text(json.dumps(config), "utf-8")
        with pytest.raises(ValueError, match=message):
            load_model(path)


def test_a_folder_is_told_from_a_cost_model(tmp_path: Path) -> None:
    assert is_model_config(SHAPES / "llama3-8b" / "config.json")
    assert not is_model_config(CONFIGS / "llama3-8b-h100.json")
    assert not is_model_config(tmp_path)
    with pytest.raises(OSError, match=r"config\.json"):
        load_model(tmp_path)


def test_a_model_is_placed_on_the_fewest_devices(tmp_path: Path) -> None:
    dense, mixture = load_model(SHAPES / "llama3-8b"), load_model(SHAPES / "granite-moe-1b")
    assert dense.name == "llama3-8b-a100-tp1-pp1"
    assert mixture.name == "granite-moe-1b-a100-tp1-pp1"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL), "utf-8")
    model = load_model(tmp_path)
    assert (model.tensor_ranks, model.num_stages) == (2, 1)
    assert model.kv_tokens >= model.max_model_len == 32768
    path.write_text(json.dumps(MIXTRAL | {"num_local_experts": 512}), "utf-8")
    with pytest.raises(ValueError, match="does not fit on 32"):
        load_model(path)


def test_a_mixture_costs_what_its_experts_do() -> None:
    """One token costs a dense model of the experts that it passes. More tokens add to the memory
    floor what more experts are touched, and cost at last what their compute does."""
    shape = shape_of_config(MIXTRAL, "it")
    assert shape.experts is not None
    mixture = compose(shape, "a100", 2, 1)
    passed = compose(replace(shape, intermediate=2 * 14336, experts=None), "a100", 2, 1)
    attention = compose(replace(shape, intermediate=0, experts=None), "a100", 2, 1)
    assert mixture.linear_s(1) == pytest.approx(passed.linear_s(1), rel=1e-3)
    one_s = (mixture.linear_s(1) - attention.linear_s(1)) / 2
    for tokens in (2, 4, 8):
        expected_s = attention.linear_s(tokens) + one_s * experts_touched(8, 2, tokens)
        assert mixture.linear_s(tokens) == pytest.approx(expected_s, rel=0.03)
    assert mixture.linear_s(4096) == pytest.approx(passed.linear_s(4096), rel=0.05)


def test_layers_with_states_have_no_growing_cost_but_that_of_moving_them() -> None:
    """Of 32 layers, 24 keep states: a quarter of the KV and of its cost, and beside it, for each
    request and step, the states of 24 layers read and written as fast as KV."""
    dense = replace(shape_of_config(BASE, "it"), max_model_len=4096)
    hybrid = replace(shape_of_config(QWEN3_5, "it"), max_model_len=4096)
    assert hybrid.kv_bytes_per_token == dense.kv_bytes_per_token / 4
    one, other = compose(dense, "a100", 1, 1), compose(hybrid, "a100", 1, 1)
    assert other.decode_kv_s == pytest.approx(one.decode_kv_s / 4)
    assert other.prefill_pair_s == pytest.approx(one.prefill_pair_s / 4)
    assert hybrid.states is not None
    tokens = 2 * 24 * hybrid.states.state_bytes / dense.kv_bytes_per_token  # as much as these
    moved_s = other.decode_slice_s - one.decode_slice_s / 4
    assert moved_s == pytest.approx(tokens * one.decode_kv_s)
    assert other.state_tokens == pytest.approx(
        3 * 24 * hybrid.states.state_bytes / hybrid.kv_bytes_per_token, abs=1
    )
    assert one.state_tokens == 0


@pytest.mark.parametrize(
    ("config", "parameters", "kv_layers", "layers", "state_bytes"),
    [  # a state: heads x their size x state in float32, and three inputs of the convolution
        (NEMOTRON_H, 8.9e9, 4, (27, 4, 25), 4 * 128 * 80 * 128 + 6 * (128 * 80 + 2 * 8 * 128)),
        (NEMOTRON_3, 31.6e9, 6, (23, 6, 23), 4 * 64 * 64 * 128 + 6 * (64 * 64 + 2 * 8 * 128)),
        (FALCON_H1, 7.6e9, 44, (44, 44, 44), 4 * 24 * 128 * 256 + 6 * (24 * 128 + 2 * 256)),
    ],
)
def test_layers_of_one_part_each_and_of_attention_and_states_side_by_side(
    config: dict[str, Any],
    parameters: float,
    kv_layers: int,
    layers: tuple[int, int, int],
    state_bytes: int,
) -> None:
    shape = shape_of_config(config, "it")
    assert shape.weight_bytes / 2 == pytest.approx(parameters, rel=0.01)
    assert shape.kv_bytes_per_token == 4 * kv_layers * 128 * config["num_key_value_heads"]
    assert shape.states is not None
    assert (shape.state_layers, shape.attention_layers, shape.mlp_layers) == layers
    assert shape.states.state_bytes == state_bytes
    attending = replace(shape, states=None, attending=shape.num_layers, mlps=shape.num_layers)
    one, all_of_all = (
        compose(replace(s, profiled="llama-2-70b"), "a100", 2, 1) for s in (shape, attending)
    )
    share = kv_layers / shape.num_layers
    assert one.decode_kv_s == pytest.approx(share * all_of_all.decode_kv_s)


def test_parts_of_nemotron_h_are_read_under_both_names() -> None:
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    for config in (NEMOTRON_H, NEMOTRON_3):
        kinds = [names[letter] for letter in config["hybrid_override_pattern"]]
        renamed = config | {"hybrid_override_pattern": None, "layers_block_type": kinds}
        assert shape_of_config(renamed, "it") == shape_of_config(config, "it")
