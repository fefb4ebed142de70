"""What config.json of the families of 2025 says, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from actors.stage.models import read
from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.families_dense import FAMILIES
from actors.stage.models.read import load_config

_ALL: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0",
    "use_cache": True, "vocab_size": 100,
}  # fmt: skip
_HYBRID = ["sliding_attention"] * 3 + ["full_attention"]
_LLAMA3_ROPE = {
    "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_type": "llama3",
}  # fmt: skip
_OLMO3 = _ALL | {
    "layer_types": _HYBRID, "model_type": "olmo3", "rope_theta": 500000, "sliding_window": 64,
    "rope_scaling": {
        "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0,
        "original_max_position_embeddings": 64, "rope_type": "yarn",
    },
}  # fmt: skip
_HUNYUAN = _ALL | {
    "attention_head_dim": 16, "cla_share_factor": 2, "class_num": 0, "dense_list": [64, 0],
    "add_classification_head": False, "eod_token_id": 3, "head_dim": 16, "im_end_id": 5,
    "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12, "mlp_bias": False,
    "model_type": "hunyuan_v1_dense", "norm_type": "rms", "org_vocab_size": 100, "pad_id": 9,
    "pool_type": "last", "pretraining_tp": 1, "sep_token_id": 8, "text_end_id": 7,
    "text_start_id": 6, "use_cla": False, "use_qk_norm": True,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "type": "dynamic",
    },
}  # fmt: skip
# name -> (architecture, the published file's keys; sizes are reduced)
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMo-3": ("Olmo3ForCausalLM", _OLMO3),
    "EXAONE-4-32B": (
        "Exaone4ForCausalLM",
        _ALL | {
            "layer_types": _HYBRID, "model_type": "exaone4", "rope_scaling": _LLAMA3_ROPE,
            "rope_theta": 1000000, "sliding_window": 64, "sliding_window_pattern": "LLLG",
        },
    ),
    "EXAONE-4-1.2B": (
        "Exaone4ForCausalLM",
        _ALL | {
            "head_dim": 16, "layer_types": ["full_attention"] * 4, "model_type": "exaone4",
            "rope_scaling": _LLAMA3_ROPE, "sliding_window": None, "sliding_window_pattern": None,
        },
    ),
    "Seed-OSS": (
        "SeedOssForCausalLM",
        _ALL | {
            "attention_bias": True, "attention_out_bias": False, "head_dim": 16,
            "mlp_bias": False, "model_type": "seed_oss", "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7,
        },
    ),
    "ERNIE-4.5-0.3B": (
        "Ernie4_5ForCausalLM",
        _ALL | {
            "compression_ratio": 1.0, "head_dim": 16, "model_type": "ernie4_5",
            "rope_scaling": None, "rope_theta": 500000.0, "use_bias": False,
        },
    ),
    "Helium-1": (
        "HeliumForCausalLM", _ALL | {"head_dim": 16, "mlp_bias": False, "model_type": "helium"},
    ),
    "Hunyuan": ("HunYuanDenseV1ForCausalLM", _HUNYUAN),
    "AFM": (
        "ArceeForCausalLM",
        _ALL | {
            "head_dim": 16, "hidden_act": "relu2", "mlp_bias": False, "model_type": "arcee",
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
                "original_max_position_embeddings": 64, "rope_type": "yarn",
            },
        },
    ),
}  # fmt: skip


def described(folder: Path, name: str, **changed: Any) -> DecoderConfig:
    architecture, keys = PUBLISHED[name]
    config = keys | changed | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "known_to_transformers", None)
    found = described(tmp_path, name)
    assert (found.num_layers, found.head_dim, found.num_kv_heads) == (4, 16, 2)


def test_every_family_is_among_them() -> None:
    assert {architecture for architecture, _ in PUBLISHED.values()} == set(FAMILIES)


def test_only_layers_without_a_window_are_scaled(tmp_path: Path) -> None:
    found = described(tmp_path, "OLMo-3")
    assert [rope.kind for rope in found.ropes] == ["default"] * 3 + ["yarn"]
    assert {rope.theta for rope in found.ropes} == {500_000.0}
    assert found.sliding_windows == (64, 64, 64, None)
    keys = PUBLISHED["OLMo-3"][1]
    theirs = transformers.Olmo3Config(**{k: v for k, v in keys.items() if k != "layer_types"})
    assert [*theirs.layer_types] == _HYBRID
    assert described(tmp_path, "OLMo-3", layer_types=None) == found


def test_layers_without_positions_are_those_without_a_window(tmp_path: Path) -> None:
    found = described(tmp_path, "EXAONE-4-32B")
    assert [rope.dim for rope in found.ropes] == [16, 16, 16, 0]
    by_number = described(tmp_path, "EXAONE-4-32B", layer_types=None, sliding_window_pattern=4)
    assert by_number == found
    assert {rope.dim for rope in described(tmp_path, "EXAONE-4-1.2B").ropes} == {16}


def test_a_fixed_alpha_stretches_the_base(tmp_path: Path) -> None:
    rope = described(tmp_path, "Hunyuan").ropes[0]
    assert (rope.kind, rope.theta) == ("default", 10_000.0 * 1000.0 ** (16 / 14))
    scaling = PUBLISHED["Hunyuan"][1]["rope_scaling"] | {"alpha": None}
    assert described(tmp_path, "Hunyuan", rope_scaling=scaling).ropes[0].kind == "dynamic"


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("Hunyuan", {"use_cla": True}, "use_cla True is not supported"),
        ("Hunyuan", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        ("AFM", {"rope_scaling": {"type": "linear", "factor": 2, "alpha": 9}}, "alpha 9 may"),
        ("EXAONE-4-1.2B", {"attention_bias": True}, "attention_bias True may change"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        described(tmp_path, name, **changed)
