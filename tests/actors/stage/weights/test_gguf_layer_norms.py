"""GGUF files of decoders with layer norms give the tokens of the folders they came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from actors.stage.gguf_folder import model_folder
from tests.actors.stage.greedy_reference import BY_LENGTH, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_conversions import (
    Tensors,
    as_they_are,
    convert,
    qkv_fused,
    with_pairs,
)
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers


def keys(writer: gguf.GGUFWriter, config: Any) -> None:
    kind, hidden, heads = config.model_type, config.hidden_size, config.num_attention_heads
    given = config.to_dict()
    rope = given.get("rope_parameters") or {}
    writer.add_context_length(256)
    widths = {"falcon": "ffn_hidden_size", "gpt2": "n_inner", "gpt_bigcode": "n_inner"}
    width = None if kind in ("bloom", "mpt") else given.get(widths.get(kind, "intermediate_size"))
    writer.add_feed_forward_length(width or 4 * hidden)
    eps = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    writer.add_layer_norm_eps(next((given[key] for key in eps if given.get(key)), 1e-5))
    shared = {"falcon": "num_kv_heads"}.get(kind, "num_key_value_heads")
    one = kind == "gpt_bigcode" or (kind == "falcon" and not config.new_decoder_architecture)
    writer.add_head_count_kv(1 if one else given.get(shared) or heads)
    head_dim = given.get("head_dim") or hidden // heads
    part = rope.get("partial_rotary_factor") or given.get("rotary_pct") or 1
    writer.add_rope_dimension_count(int(head_dim * part))
    if kind in ("stablelm", "gpt_neox"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind == "mpt":
        writer.add_max_alibi_bias(8.0)


def as_queries_keys_values(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Of all heads, one below another; in the folder, by head or group of them."""
    if "query_key_value" in name:
        heads = config.num_attention_heads
        dim = config.hidden_size // heads
        groups = heads
        if config.model_type == "falcon":
            groups = config.num_kv_heads if config.new_decoder_architecture else 1
        each = tensor.view(groups, -1, dim, *tensor.shape[1:])
        parts = each[:, :-2], each[:, -2:-1], each[:, -1:]
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    yield name.removeprefix("transformer.") if config.model_type == "bloom" else name, tensor


def turned(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    is_turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    yield name, tensor.T if is_turned else tensor


def plus_one(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


# What the format cannot say, as llama.cpp takes it to be.
NEOX = {"hidden_act": "gelu", "rotary_emb_base": 10_000}
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "partial_rotary_factor": 0.25,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "starcoder2": ("starcoder2", as_they_are, {"sliding_window": None}),
    "phi2": ("phi", as_they_are, {}),
    "phi2, fused": ("phi", qkv_fused(), {}),
    "stablelm": ("stablelm", as_they_are, {}),
    "stablelm, parallel": ("stablelm-parallel", as_they_are, {}),
    "nemotron": ("nemotron-biased", plus_one, {}),
    "olmo": ("olmo", with_pairs, {}),
    "gptneox": ("gpt-neox", as_queries_keys_values, NEOX),
    "gptneox, serial": ("gpt-neox-serial", as_queries_keys_values, NEOX),
    "gptneox, scaled": ("gpt-neox", as_queries_keys_values, NEOX | {"rope_parameters": YARN}),
    "falcon": ("falcon-7b", as_queries_keys_values, {}),
    "falcon, of groups": ("falcon-40b", as_queries_keys_values, {}),
    "bloom": ("bloom", as_queries_keys_values, {}),
    "mpt": ("mpt", as_they_are, {}),
    "gpt2": ("gpt2", turned, {}),
    "starcoder": ("gpt-bigcode", as_they_are, {}),
}


@pytest.mark.parametrize("architecture", CASES)
def test_families(tmp_path: Path, architecture: str) -> None:
    variant, change, overrides = CASES[architecture]
    path, called = tmp_path / "tiny.gguf", architecture.split(",")[0]
    model = convert(path, called, variant, keys, change, **overrides)
    folder = model_folder(path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2), feeds=True)
    right = answers(model, variant in BY_LENGTH)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right
