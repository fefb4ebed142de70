"""Which linear layers a layer has in place of attention, and with which shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.stage.models.read import load_config
from actors.stage.weights.attention_names import attending_linear_shapes


def test_attention_or_a_mixer(tiny_model: Callable[..., Path]) -> None:
    config = load_config(tiny_model("granite-4"))
    assert attending_linear_shapes(config, False) == {
        "self_attn.q_proj": ((64, 64), False),
        "self_attn.k_proj": ((32, 64), False),
        "self_attn.v_proj": ((32, 64), False),
        "self_attn.o_proj": ((64, 64), False),
    }
    assert attending_linear_shapes(config, True) == {
        "mamba.in_proj": ((2 * 128 + 2 * 12 + 4, 64), False),
        "mamba.out_proj": ((64, 128), False),
    }


def test_gates_are_stored_with_queries(tiny_model: Callable[..., Path]) -> None:
    shapes = attending_linear_shapes(load_config(tiny_model("qwen3-5")), False)
    assert shapes["self_attn.q_proj"] == ((2 * 64, 64), False)
    assert shapes["self_attn.o_proj"] == ((64, 64), False)


def test_latent_attention_has_products_of_latents(tiny_model: Callable[..., Path]) -> None:
    shapes = attending_linear_shapes(load_config(tiny_model("youtu")), False)
    assert "self_attn.k_proj" not in shapes
    assert {"self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"} <= set(shapes)
