"""What a config.json of Gemma 4 says: published ones, layer by layer, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from actors.stage.folder_check import check_config
from actors.stage.models import read
from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.read import load_config
from actors.stage.weights.names import all_shapes
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.tiny_gemma4 import FULL, SLIDING

_COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16",
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
_LARGE = {
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "max_position_embeddings": 262144, "sliding_window": 1024, "use_double_wide_mlp": False,
    "use_bidirectional_attention": "vision", "layer_types": ([SLIDING] * 5 + [FULL]) * 2,
    "num_hidden_layers": 12,
}  # fmt: skip
_DENSE = {"enable_moe_block": False, "moe_intermediate_size": None, "num_experts": None,
          "top_k_experts": None}  # fmt: skip
# As published, but for the number of layers (and, in the first, for that of those that share).
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "E2B": (
        "Gemma4",
        _COMMON | _DENSE | {
            "attention_k_eq_v": False, "hidden_size": 1536, "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144, "layer_types": ([SLIDING] * 4 + [FULL]) * 3,
            "max_position_embeddings": 131072, "model_type": "gemma4_text",
            "num_attention_heads": 8, "num_global_key_value_heads": None, "num_hidden_layers": 15,
            "num_key_value_heads": 1, "num_kv_shared_layers": 10, "sliding_window": 512,
            "use_bidirectional_attention": None, "use_double_wide_mlp": True,
        },
    ),
    "26B-A4B": (
        "Gemma4",
        _COMMON | _LARGE | {
            "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
            "model_type": "gemma4_text", "moe_intermediate_size": 704, "num_attention_heads": 16,
            "num_experts": 128, "num_global_key_value_heads": 2, "num_key_value_heads": 8,
            "top_k_experts": 8,
        },
    ),
    "31B": (
        "Gemma4",
        _COMMON | _LARGE | _DENSE | {
            "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma4_text",
            "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_key_value_heads": 16,
        },
    ),
    "12B": (
        "Gemma4Unified",
        _COMMON | _LARGE | _DENSE | {
            "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma4_unified_text",
            "num_attention_heads": 16, "num_global_key_value_heads": 1, "num_key_value_heads": 8,
        },
    ),
}  # fmt: skip


def described(folder: Path, name: str, **changed: Any) -> DecoderConfig:
    family, text = PUBLISHED[name]
    config = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "audio_config": {"hidden_size": 1024},
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 768},
        "text_config": text | changed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder)


def theirs(name: str, **changed: Any) -> Any:
    family, text = PUBLISHED[name]
    return getattr(transformers, f"{family}TextConfig")(**text | changed)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_tensors_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is transformers asked about any of their keys."""
    monkeypatch.setattr(read, "known_to_transformers", None)
    config = described(tmp_path, name)
    with torch.device("meta"):
        model = getattr(transformers, f"{PUBLISHED[name][0]}ForCausalLM")(theirs(name))
    wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert all_shapes(config) == wanted
    assert config.dtype == "bfloat16"
    assert config.widest_head == 512


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("saved", [False, True])
def test_layers_are_those_of_transformers(tmp_path: Path, name: str, saved: bool) -> None:
    """saved: by transformers, which writes sizes by layer."""
    given = theirs(name)
    found = described(tmp_path, name)
    if saved:
        text = {**given.to_dict(), "architectures": [f"{PUBLISHED[name][0]}ForCausalLM"]}
        assert "global_head_dim" not in text
        (tmp_path / "config.json").write_text(json.dumps(text))
        read_again = load_config(tmp_path)
        assert [found.at(n).kinds for n in range(3)] == [read_again.at(n).kinds for n in range(3)]
        found = read_again
    last: dict[str, int] = {}
    for layer, kind in enumerate(found.kinds):
        own, shares = given.per_layer_config[layer], given.kv_sharing_modes[layer] == "reuse"
        assert (kind.head_dim, kind.num_kv_heads) == (own.head_dim, own.num_key_value_heads)
        assert kind.inner_size == given.intermediate_size * (2 if shares else 1)
        which = given.layer_types[layer]
        last[which] = last[which] if shares else layer
        assert kind.kv_source == last[which]
        assert (kind.names.k is None) == shares
        assert found.sliding_windows[layer] == (given.sliding_window if which == SLIDING else None)
        assert found.ropes[layer].kind == given.rope_parameters[which]["rope_type"]
        assert found.ropes[layer].dim == own.head_dim


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    for family in ("Gemma4", "Gemma4Unified"):
        config = {"architectures": [f"{family}ForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found, given = load_config(tmp_path), getattr(transformers, f"{family}TextConfig")()
        assert [window is None for window in found.sliding_windows] == [
            which == FULL for which in given.layer_types
        ]
        assert [kind.head_dim for kind in found.kinds] == [
            one.head_dim for one in map(given.per_layer_config.__getitem__, range(30))
        ]
        assert found.max_positions == given.max_position_embeddings
        assert max(filter(None, found.sliding_windows)) == given.sliding_window
        size = getattr(given, "hidden_size_per_layer_input", 0)
        assert (found.hidden_size, found.layer_input_size) == (given.hidden_size, size)


def test_the_last_layer_has_no_window_whatever_is_said(tmp_path: Path) -> None:
    layer_types = [FULL, SLIDING, SLIDING]
    said = {"layer_types": layer_types, "num_hidden_layers": 3, "num_kv_shared_layers": 0}
    found = described(tmp_path, "31B", **said)
    assert theirs("31B", **said | {"layer_types": [*layer_types]}).layer_types[-1] == FULL
    assert [window is None for window in found.sliding_windows] == [True, False, True]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supp"),
        ({"vocab_size_per_layer_input": 4096}, "vocab_size_per_layer_input 4096 is not supported"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers 12: no layer before has keys"),
        ({"per_layer_config": {"3": {"sliding_window": 8}}}, "per_layer_config: sliding_window"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "lacks the key 'sliding_attention"),
        (
            {"rope_parameters": {k: {"partial_rotary_factor": 0.5} for k in (FULL, SLIDING)}},
            "partial_rotary_factor, by which 128 of 256 features",
        ),
        ({"hidden_activation": "tanh"}, "hidden_act 'tanh' is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not supp"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        described(tmp_path, "E2B", **changed)


def test_layers_that_need_another_stage_are_refused(tiny_model: Callable[..., Path]) -> None:
    message = "hidden_size_per_layer_input 12: .* cannot be split into 2 pipeline stages"
    with pytest.raises(ModelError, match=message):
        make_chain(tiny_model("gemma4-inputs"), 2)
    message = "num_kv_shared_layers: layer 3 attends to .* layer 2, which is in another of 4 pipe"
    with pytest.raises(ModelError, match=message):  # by the first stage, which has neither
        check_config(tiny_model("gemma4-unified"), num_stages=4)


def test_ranks_that_do_not_fit_some_layers_are_refused(tmp_path: Path) -> None:
    described(tmp_path, "31B", num_global_key_value_heads=2, num_key_value_heads=4)
    check_config(tmp_path, tensor_ranks=4)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_global_key_value_heads": 3}
    described(tmp_path, "12B", **heads)
    with pytest.raises(ModelError, match="3 key/value heads cannot be split over 4 ranks"):
        check_config(tmp_path, tensor_ranks=4)


def test_stored_keys_of_layers_that_share_are_not_read(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Published folders have them; on torch's backend, whose one stage is not tested elsewhere."""
    folder = shutil.copytree(tiny_model("gemma4-inputs-images"), tmp_path / "model")
    path = folder / "model.safetensors"
    stored = load_file(path)
    for layer in range(3, 6):
        prefix = f"model.language_model.layers.{layer}.self_attn."
        size = 24 if layer == 5 else 16
        stored[f"{prefix}k_proj.weight"] = torch.full((size, 64), torch.nan)
        stored[f"{prefix}v_proj.weight"] = torch.full((size, 64), torch.nan)
        stored[f"{prefix}k_norm.weight"] = torch.full((size,), torch.nan)
    save_file(stored, path, {"format": "pt"})
    planner = MiniPlanner(make_chain(folder), chunk=7)
    assert planner.run(make_prompts(), GREEDY) == expected("gemma4-inputs-images")
