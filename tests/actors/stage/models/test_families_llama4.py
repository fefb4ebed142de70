"""What a config.json of Llama 4 says: which layers are rotated, chunked or mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from actors.stage.models.config import DecoderConfig, ModelError, Temperature
from actors.stage.models.read import load_config


def described(folder: Path, **text: Any) -> DecoderConfig:
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "vision_config": {"hidden_size": 64},
        "text_config": {"num_hidden_layers": 8, **text},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder)


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"no_rope_layers": [], "interleave_moe_layer_step": 2},
        {"no_rope_layers": [0, 1] * 4, "moe_layers": [3]},
        {"no_rope_layer_interval": 3},
    ],
)
def test_layers_are_those_of_transformers(tmp_path: Path, text: dict[str, Any]) -> None:
    found = described(tmp_path, **text)
    theirs = transformers.Llama4TextConfig(num_hidden_layers=8, **text)
    kinds = ["full_attention" if w is None else "chunked_attention" for w in found.sliding_windows]
    assert kinds == theirs.layer_types
    assert [int(rope.dim > 0) for rope in found.ropes] == theirs.no_rope_layers
    assert [i for i in range(8) if found.has_experts(i)] == list(theirs.moe_layers)
    assert (found.inner_size, found.expert_size) == (16384, 8192)
    assert {*found.sliding_windows} == {None, theirs.attention_chunk_size}
    assert found.temperature == Temperature(theirs.attn_scale, theirs.floor_scale, 1, rotated=False)


def test_layers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="need 8 values"):
        described(tmp_path, no_rope_layers=[1, 0])
    with pytest.raises(ModelError, match="need 8 values"):
        described(tmp_path, layer_types=["sliding_attention"] * 8)
