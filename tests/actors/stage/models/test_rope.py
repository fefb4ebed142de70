"""Rotation tables of published models' parameters, against transformers position by position."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from actors.stage.models.read import load_config
from actors.stage.models.rope import cos_sin_table, read_rope

# Parameters as published with these models; lengths cut where only the table's rows matter.
CASES: dict[str, dict[str, Any]] = {
    "Llama 2": {"max_position_embeddings": 4096, "rope_theta": 10_000.0},
    "Yi 34B": {"max_position_embeddings": 4096, "rope_theta": 5_000_000.0},
    "Qwen 3": {"max_position_embeddings": 40960, "rope_theta": 1_000_000},
    "Llama 3.1": {
        "max_position_embeddings": 131072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Qwen 2.5, long": {
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "type": "yarn",
        },
    },
    "Yarn Llama 2": {
        "max_position_embeddings": 65536,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
            "finetuned": True,
        },
    },
    "Gemma 4": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
    "Gemma 4, stretched": {
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 10_000.0, "factor": 8.0},
    },
    "Vicuna 16k": {
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
}


def reference(config: LlamaConfig, num_positions: int) -> torch.Tensor:
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, 1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", CASES)
def test_table(name: str) -> None:
    entries = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, **CASES[name]}
    rope = read_rope(entries, 128, entries["max_position_embeddings"])
    table = cos_sin_table(rope, 4000, 128)
    torch.testing.assert_close(table, reference(LlamaConfig(**entries), 4000), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_row_is_that_of_a_sequence_ending_there(kind: str) -> None:
    """Each row equals what transformers uses for the last token of a sequence of that length."""
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        scaling |= {
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.05 * i for i in range(16)],
            "long_factor": [2.0 + i for i in range(16)],
        }
    entries = {
        "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "rope_theta": 10_000.0,
        "max_position_embeddings": 64 if kind == "dynamic" else 256, "rope_scaling": scaling,
    }  # fmt: skip
    rope = read_rope(entries, 32, entries["max_position_embeddings"])
    assert rope.reach == 256
    table = cos_sin_table(rope, 256, 32)
    for length in (1, 63, 64, 65, 66, 100, 256):
        rows = reference(LlamaConfig(**entries), length)
        torch.testing.assert_close(table[length - 1], rows[-1], rtol=0, atol=2e-5)


def test_reach_of_published_lengths() -> None:
    def reach(name: str) -> int:
        return read_rope(CASES[name], 128, CASES[name]["max_position_embeddings"]).reach

    assert reach("Llama 3.1") == 131072
    assert reach("Qwen 2.5, long") == 131072
    assert reach("Yarn Llama 2") == 65536
    assert reach("Vicuna 16k") == 16384


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scaling_replaces_rope_parameters(key: str) -> None:
    """As in transformers: model cards tell to add it to a config to make its context longer."""
    scaling = {**YARN, "rope_theta": 1_000_000.0}
    scaling[key] = scaling.pop("rope_type")
    entries: dict[str, Any] = {
        "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    }  # fmt: skip
    rope = read_rope(entries, 128, 40960)
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 1_000_000.0, 4.0)
    theirs = reference(LlamaConfig(**entries), 4000)
    torch.testing.assert_close(cos_sin_table(rope, 4000, 128), theirs, rtol=0, atol=2e-4)


def test_rope_scaling_leaves_the_base_that_it_does_not_name() -> None:
    given = {"rope_type": "default", "rope_theta": 1e6}
    rope = read_rope({"rope_parameters": given, "rope_scaling": YARN}, 128, 40960)
    assert (rope.kind, rope.theta, rope.original_positions) == ("yarn", 1e6, 32768)
    contrary = {"rope_parameters": YARN, "rope_scaling": {"factor": 2.0}}
    with pytest.raises(ValueError, match=r"rope_scaling names no rope_type, .* names 'yarn'"):
        read_rope(contrary, 128, 40960)


def test_rope_scaling_of_layers_that_differ_is_that_of_full_attention(tmp_path: Path) -> None:
    entries: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(entries))
    local, full = (load_config(tmp_path).ropes[i] for i in (0, 5))
    theirs = Gemma3TextConfig(**entries).rope_parameters
    for rope, kind in ((local, "sliding_attention"), (full, "full_attention")):
        their = theirs[kind]
        assert (rope.kind, rope.theta) == (their["rope_type"], their["rope_theta"])
        assert rope.factor == their.get("factor", 1.0)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("given", [{}, {"factor": 0}, {"factor": -2.0}, {"factor": math.inf}])
def test_a_factor_that_is_needed_is_not_made_up(kind: str, given: dict[str, Any]) -> None:
    scaling = {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **given}
    with pytest.raises(ValueError, match=f"rope type '{kind}'.* factor"):
        read_rope({"rope_scaling": scaling}, 128, 4096)


def test_a_factor_that_is_null_is_the_ratio_of_the_lengths() -> None:
    entries: dict[str, Any] = {
        "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 10_000.0,
        "rope_scaling": {**YARN, "factor": None},
    }  # fmt: skip
    rope = read_rope(entries, 128, 131072)
    assert rope.factor == 4.0
    theirs = reference(LlamaConfig(**entries), 4000)
    torch.testing.assert_close(cos_sin_table(rope, 4000, 128), theirs, rtol=0, atol=2e-4)
    for kind in ("linear", "dynamic", "llama3"):
        with pytest.raises(ValueError, match=f"rope type '{kind}' needs a factor"):
            read_rope({"rope_scaling": {"rope_type": kind, "factor": None}}, 128, 4096)


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
}


@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 2048}])
@pytest.mark.parametrize("outer", [{}, {"original_max_position_embeddings": 1024}])
def test_trained_length_of_phi3(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    """The config's own goes before that of the rotation, and is 4096 where it is not given."""
    entries: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 99,
        "num_attention_heads": 4, "max_position_embeddings": 32768, "pad_token_id": None,
        **outer, "rope_scaling": {**LONG, **inner},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(entries))
    rope = load_config(tmp_path).ropes[0]
    theirs = Phi3RotaryEmbedding(Phi3Config(**entries))
    table = cos_sin_table(rope, 5000, 32)
    for length in (1000, 1500, 3000, 5000):
        cos, sin = theirs(torch.zeros(1, 1), torch.arange(length)[None])
        row = torch.cat((cos[0, -1, :16], sin[0, -1, :16]))
        torch.testing.assert_close(table[length - 1], row, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_trained_length_of_the_whole_config(kind: str) -> None:
    scaling = {**YARN, "rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    entries: dict[str, Any] = {
        "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "rope_theta": 10_000.0,
        "max_position_embeddings": 131072, "rope_scaling": scaling,
        "original_max_position_embeddings": 1024,
    }  # fmt: skip
    table = cos_sin_table(read_rope(entries, 128, 131072), 4000, 128)
    theirs = reference(LlamaConfig(**entries), 4000)
    torch.testing.assert_close(table, theirs, rtol=0, atol=2e-4)


def test_what_cannot_be_rotated_is_refused() -> None:
    with pytest.raises(ValueError, match="differ between layers"):
        read_rope({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 64, 128)
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.6 rotates 19 features of 32"):
        read_rope({"partial_rotary_factor": 0.6}, 32, 128)
    with pytest.raises(ValueError, match="longrope needs 32 short and long factors"):
        read_rope(
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, 64, 128
        )
