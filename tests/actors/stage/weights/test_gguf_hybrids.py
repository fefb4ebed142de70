"""GGUF files of models with states give the tokens of the folders that they were converted from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from tests.actors.stage.greedy_reference import BY_LENGTH, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain, make_runner
from tests.actors.stage.weights import gguf_hybrids
from tests.actors.stage.weights.gguf_conversions import convert
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers

DELTA = (gguf_hybrids.delta_rule_keys, gguf_hybrids.delta_rule)
NAMED = (gguf_hybrids.delta_rule_keys_of_layers, gguf_hybrids.delta_rule)
GROUPED = (gguf_hybrids.delta_rule_keys, gguf_hybrids.delta_rule_grouped)
CONVOLUTIONS = (gguf_hybrids.convolution_keys, gguf_hybrids.short_convolutions)
GRANITE = (gguf_hybrids.granite_keys, gguf_hybrids.permuted_mamba2)
BAMBA = (gguf_hybrids.bamba_keys, gguf_hybrids.permuted_mamba2)
NEMOTRON = (gguf_hybrids.nemotron_keys, gguf_hybrids.permuted_mamba2)
FALCON = (gguf_hybrids.falcon_keys, gguf_hybrids.falcon_h1)
CASES: dict[str, tuple[str, tuple[Callable[..., Any], Callable[..., Any]], dict[str, Any]]] = {
    "qwen35": ("qwen3-5", DELTA, {}),
    "qwen35moe": ("qwen3-5-moe", DELTA, {}),
    "qwen3next": ("qwen3-next", DELTA, {"mlp_only_layers": []}),
    "qwen35, layers named": ("qwen3-5", NAMED, {}),
    "qwen3next, layers named": ("qwen3-next", NAMED, {"mlp_only_layers": []}),
    "qwen3next, older": ("qwen3-next", GROUPED, {"mlp_only_layers": []}),
    "lfm2": ("lfm2", CONVOLUTIONS, {}),
    "lfm2moe": (
        "lfm2-moe",
        CONVOLUTIONS,
        {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    ),
    "granitehybrid": ("granite-4", GRANITE, {}),
    "granitehybrid, dense": ("granite-4-dense", GRANITE, {}),
    "granitehybrid, Bamba": ("bamba", BAMBA, {"attention_bias": True}),
    "nemotron_h": ("nemotron-h", NEMOTRON, {}),
    "nemotron_h_moe": ("nemotron-3", NEMOTRON, {}),
    "falcon-h1": ("falcon-h1", FALCON, {}),
}


@pytest.mark.parametrize("architecture", CASES)
def test_families(tmp_path: Path, architecture: str) -> None:
    variant, (metadata, change), overrides = CASES[architecture]
    path = tmp_path / "tiny.gguf"
    model = convert(path, architecture.split(",")[0], variant, metadata, change, **overrides)
    folder = model_folder(path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model, variant in BY_LENGTH)


def test_bamba_with_whole_heads_rotated_is_refused(tmp_path: Path) -> None:
    """The converter writes so of a folder that does not say `attn_rotary_emb`, yet half rotates."""
    variant, (metadata, change), _ = CASES["granitehybrid, Bamba"]

    def whole(writer: gguf.GGUFWriter, config: Any) -> None:
        metadata(writer, config)
        writer.add_rope_dimension_count(16)

    convert(tmp_path / "tiny.gguf", "granitehybrid", variant, whole, change)
    with pytest.raises(
        ModelError, match=r"granitehybrid\.rope\.dimension_count is 16; supported: 8"
    ):
        model_folder(tmp_path / "tiny.gguf", tmp_path / "cache")


def test_factors_within_the_weights_leave_no_place_for_adapters(tmp_path: Path) -> None:
    """Falcon-H1's file does not say by what its weights have been multiplied."""
    variant, (metadata, change), _ = CASES["falcon-h1"]
    convert(tmp_path / "tiny.gguf", "falcon-h1", variant, metadata, change)
    folder = model_folder(tmp_path / "tiny.gguf", tmp_path / "cache")
    with pytest.raises(ModelError, match=r"adapters\.max_adapters: .* GGUF file of Falcon-H1"):
        make_runner(folder, max_adapters=1, max_adapter_rank=8)
