"""Keys of config.json: which are refused, which change nothing, and how a refusal is overruled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.stage.models import read
from actors.stage.models.config import ModelError
from actors.stage.models.keys import is_neutral, known_to_transformers
from actors.stage.models.read import load_config
from tests.actors.stage.models.published_keys import PUBLISHED as PLAIN
from tests.actors.stage.models.published_mixtures import MIXTURES

PUBLISHED = PLAIN | MIXTURES


def _folder(tmp_path: Path, name: str, **changed: Any) -> Path:
    architecture, keys = PUBLISHED[name]
    config = keys | {"architectures": [architecture]} | changed
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_not_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is transformers, whose import takes seconds, asked about any of their keys."""
    monkeypatch.setattr(read, "known_to_transformers", None)
    assert load_config(_folder(tmp_path, name)).architecture == PUBLISHED[name][0]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Granite-3.1-MoE", "shared_intermediate_size", 512),
        ("Qwen3-235B-A22B", "routed_scaling_factor", 2.5),
        ("Llama-3.1", "never_heard_of", "it"),
        ("Llama-3.1", "attention_multiplier", 1.0),
        ("Llama-3.1", "quantization", {"bits": 4, "group_size": 64}),
        ("Qwen3", "is_causal", False),
        ("Mistral", "layer_types", ["full_attention"] * 4),
        ("Gemma-3-1B", "vision_config", {"hidden_size": 64}),
        ("MPT-7B", "attn_config", {"alibi": True, "kv_n_heads": 2}),
        ("Llama-3.1", "rope_scaling", {"type": "linear", "factor": 2.0, "alpha": 1000}),
        ("Gemma-3-1B", "rope_parameters", {"full_attention": {"rope_theta": 1e6, "alpha": 2}}),
    ],
)
def test_unknown_keys_are_refused_and_may_be_overruled(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, name, **{key: value})
    with pytest.raises(ModelError, match=rf"{key}.* may change .* model\.ignore_config_keys"):
        load_config(folder)
    inner = {"attn_config": ".kv_n_heads", "rope_scaling": ".alpha", "rope_parameters": ".alpha"}
    load_config(folder, [key + inner.get(key, "")])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("Phi-4-mini", "full_attn_mod", 2),
        ("StarCoder2", "norm_type", "rms_norm"),
        ("Command-R7B", "use_parallel_block", False),
        ("gpt-oss-20b", "experts_per_token", 3),
        ("Gemma-7B", "hidden_act", "silu"),
        ("Gemma-3-1B", "attn_logit_softcapping", 50.0),
        ("Qwen3-Coder", "use_qk_norm", False),
    ],
)
def test_known_keys_with_other_values_are_refused(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"{key} .* is not supported; supported: "):
        load_config(_folder(tmp_path, name, **{key: value}))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("Llama-3.1", {"partial_rotary_factor": 0.5}),
        ("Qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        (
            "Gemma-3-1B",
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
        ),
    ],
)
def test_a_part_of_a_head_is_rotated_only_where_the_family_does(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """Elsewhere transformers rotates all of it, or fails."""
    with pytest.raises(ModelError, match=r"partial_rotary_factor, .* not supported for [A-Z]"):
        load_config(_folder(tmp_path, name, **changed))


def test_what_changes_nothing_is_not_refused(tmp_path: Path) -> None:
    """Neutral values, what all models have in transformers, generation, architecture's defaults."""
    load_config(_folder(tmp_path, "Llama-3.1", clip_qkv=None, some_scale=1.0, use_rope_twice=False))
    load_config(_folder(tmp_path, "Qwen3", chunk_size_feed_forward=16, repetition_penalty=1.1))
    load_config(_folder(tmp_path, "OPT-6.7B", vision_token_id=7, classifier_dropout=0.5))
    unread = {"swiglu_limit": 7.0, "swiglu_alpha": 1.0, "is_encoder_decoder": True, "top_p": 0.5}
    assert known_to_transformers("GptOssForCausalLM", unread) == {"swiglu_limit", "top_p"}
    inner = {"attn_config.attn_impl": "torch", "attn_config.clip_qkv": 6}
    assert known_to_transformers("MptForCausalLM", inner) == {"attn_config.attn_impl"}
    assert known_to_transformers("InternLM2ForCausalLM", {"key": 7}) == set()


def test_command_r_reaches_as_far_as_it_says(tmp_path: Path) -> None:
    assert load_config(_folder(tmp_path, "Command-R")).max_model_len == 131072
    assert load_config(_folder(tmp_path, "Command-R", model_max_length=64)).max_model_len == 256
    scaled = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert load_config(_folder(tmp_path, "Command-R", **scaled)).max_model_len == 512
    assert load_config(_folder(tmp_path, "Llama-3.1", model_max_length=9999)).max_model_len < 9999


def test_gpt2_may_have_its_length_by_the_name_of_llama(tmp_path: Path) -> None:
    """As all its sizes, of which transformers reads either name."""
    config = json.loads((_folder(tmp_path, "GPT-2") / "config.json").read_text())
    del config["n_positions"]
    for more, length in (({}, 1024), ({"max_position_embeddings": 96}, 96)):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        assert load_config(tmp_path).max_model_len == length


def test_neutral_values() -> None:
    assert all(is_neutral("key", value) for value in (None, False, 0, 0.0, 1.0, [], {}, ""))
    assert not any(is_neutral("key", value) for value in (True, 1, 2.0, "none", [0]))
    assert is_neutral("is_causal", True)
    assert not is_neutral("is_causal", False)
    assert not is_neutral("softmax_scale", 1.0)


def test_an_ignored_key_that_is_not_refused_is_an_error(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "Llama-3.1", alpha=3, beta=4)
    for ignored in (["alpha", "beta", "gamma"], ["alpha", "beta", "hidden_size"]):
        with pytest.raises(ModelError, match=r"(gamma|hidden_size) would not be refused"):
            load_config(folder, ignored)
    with pytest.raises(ModelError, match="beta 4 may change"):
        load_config(folder, ["alpha"])
    load_config(folder, ["alpha", "beta"])


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("Llama-3.1", "rms_norm_eps", float("nan"), "rms_norm_eps must be a finite number"),
        ("Llama-3.1", "hidden_size", float("inf"), "hidden_size must be a finite number"),
        ("Llama-3.1", "num_hidden_layers", 0, "num_hidden_layers must be positive, not 0"),
        ("Granite-3.1-MoE", "logits_scaling", 0, "logits_scaling must be positive"),
        ("Gemma-3-1B", "query_pre_attn_scalar", 0, "query_pre_attn_scalar must be positive"),
    ],
)
def test_numbers_that_compute_nothing_are_refused(
    tmp_path: Path, name: str, key: str, value: float, said: str
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{said}"):
        load_config(_folder(tmp_path, name, **{key: value}))
