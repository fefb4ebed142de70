"""What config.json of families with layer norms and rotary positions says, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.stage.models import read
from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.families_neox import FAMILIES
from actors.stage.models.read import load_config
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.models.test_greedy import WEIGHTS

_ALL: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "gelu",
    "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_hidden_layers": 4,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "use_cache": True, "vocab_size": 100,
}  # fmt: skip
_LAYER_NORMS = _ALL | {"layer_norm_eps": 1e-5}
_GPT = {
    "activation_function": "gelu_new", "attn_pdrop": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0,
    "eos_token_id": 1, "gradient_checkpointing": False, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5, "n_embd": 64, "n_head": 4, "n_inner": None, "n_layer": 4,
    "n_positions": 256, "resid_pdrop": 0.0, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer", "use_cache": True, "vocab_size": 100,
}  # fmt: skip
# name -> (architecture, the published file's keys; sizes are reduced), rotated features
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Pythia": (
        "GPTNeoXForCausalLM",
        _LAYER_NORMS | {
            "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
        4,
    ),
    "GPT-J": (
        "GPTJForCausalLM",
        _GPT | {"model_type": "gptj", "rotary": True, "rotary_dim": 8},
        8,
    ),
    "StarCoder": (
        "GPTBigCodeForCausalLM",
        _GPT | {
            "activation_function": "gelu", "attention_softmax_in_fp32": True,
            "inference_runner": 0, "max_batch_size": None, "max_sequence_length": None,
            "model_type": "gpt_bigcode", "multi_query": True, "pad_key_length": True,
            "pre_allocate_kv_cache": False, "scale_attention_softmax_in_fp32": True,
            "validate_runner_input": True,
        },
        0,
    ),
    "Phi-2": (
        "PhiForCausalLM",
        _LAYER_NORMS | {
            "embd_pdrop": 0.0, "hidden_act": "gelu_new", "model_type": "phi",
            "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "qk_layernorm": False,
            "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0,
        },
        8,
    ),
    "StableLM-2": (
        "StableLmForCausalLM",
        _LAYER_NORMS | {
            "hidden_act": "silu", "hidden_dropout": 0.0, "model_type": "stablelm",
            "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "qk_layernorm": False,
            "rope_scaling": None, "rope_theta": 10000, "use_parallel_residual": False,
            "use_qkv_bias": True,
        },
        4,
    ),
    "Minitron": (
        "NemotronForCausalLM",
        _ALL | {
            "attention_bias": False, "head_dim": 16, "hidden_act": "relu2", "mlp_bias": False,
            "model_type": "nemotron", "norm_eps": 1e-5, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 10000,
        },
        8,
    ),
    "OLMo": (
        "OlmoForCausalLM",
        _ALL | {
            "attention_bias": False, "clip_qkv": None, "hidden_act": "silu",
            "model_type": "olmo", "num_key_value_heads": 4, "pretraining_tp": 1,
            "rope_scaling": None, "rope_theta": 10000.0,
        },
        16,
    ),
}  # fmt: skip


def described(folder: Path, name: str, **changed: Any) -> DecoderConfig:
    architecture, keys, _ = PUBLISHED[name]
    config = keys | changed | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "known_to_transformers", None)
    found = described(tmp_path, name)
    assert (found.num_layers, found.head_dim, found.max_positions) == (4, 16, 256)
    assert found.ropes[0].dim == PUBLISHED[name][2]


def test_every_family_is_among_them() -> None:
    assert {architecture for architecture, _, _ in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("OLMo", {"clip_qkv": 8.0}, r"clip_qkv 8\.0 is not supported"),
        ("StableLM-2", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
        ("Phi-2", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
        ("StarCoder", {"scale_attn_weights": False}, "scale_attn_weights False is not supp"),
        ("StarCoder", {"add_cross_attention": True}, "add_cross_attention True is not supp"),
        ("GPT-J", {"rotary_dim": 20}, "rotary_dim 20 does not fit in heads of 16"),
        ("Pythia", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        described(tmp_path, name, **changed)


def test_pythia_as_it_was_published(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The rotation's keys by other names, the head's too, and buffers that are not read."""
    folder = shutil.copytree(tiny_model("gpt-neox-serial"), tmp_path / "pythia")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    stored = load_file(folder / WEIGHTS)
    stored["embed_out.weight"] = stored["gpt_neox.embed_in.weight"].clone()
    stored["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    stored["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected(
        "gpt-neox-serial"
    )
