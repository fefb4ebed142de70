"""What a config.json says: every family has a tiny model, and layers go to stages evenly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from actors.stage.models.config import ModelError
from actors.stage.models.read import FAMILIES, load_config
from actors.stage.models.split import split_layers
from tests.actors.stage.mini_planner import make_runner
from tests.tiny_models import BY_OTHER_NAMES, VARIANTS, architecture


@pytest.mark.parametrize("num_layers", [1, 5, 30, 32, 61])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
def test_layers_are_split_evenly(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(ModelError, match="cannot fill"):
            split_layers(num_layers, num_stages)
        return
    ranges = split_layers(num_layers, num_stages)
    assert [layer for start, end in ranges for layer in range(start, end)] == list(
        range(num_layers)
    )
    counts = [end - start for start, end in ranges]
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_every_family_has_a_tiny_model() -> None:
    """So every one is held against transformers."""
    assert set(FAMILIES) == {architecture(variant) for variant in VARIANTS} | set(BY_OTHER_NAMES)


def write_gemma3_4b(folder: Path, **text: Any) -> dict[str, Any]:
    """The keys that the published config of 4 B has: the others have transformers' defaults."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_a_decoder_within_a_model_of_images(tmp_path: Path) -> None:
    given = write_gemma3_4b(tmp_path)
    found = load_config(tmp_path)
    theirs = transformers.Gemma3Config(text_config=given["text_config"]).text_config
    assert (found.num_heads, found.num_kv_heads) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert (found.head_dim, found.vocab_size) == (theirs.head_dim, theirs.vocab_size)
    assert found.max_positions == theirs.max_position_embeddings
    assert found.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert found.tied_embeddings
    kinds = ["sliding_attention" if w else "full_attention" for w in found.sliding_windows]
    assert kinds == theirs.layer_types
    assert (found.eos_token_ids, found.dtype) == ((1, 106), "bfloat16")


def test_the_inner_part_is_checked_like_a_whole_config(tmp_path: Path) -> None:
    write_gemma3_4b(tmp_path, num_experts=4)
    with pytest.raises(ModelError, match="num_experts 4 may change what a model computes"):
        load_config(tmp_path)
    write_gemma3_4b(tmp_path, final_logit_softcapping=30.0)  # which only the text models have
    with pytest.raises(ModelError, match=r"final_logit_softcapping 30\.0 is not supported"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="lacks the key 'text_config'"):
        load_config(tmp_path)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Mixtral", "Qwen3", "SmolLM3", "GptOss"])
def test_the_base_of_a_rotation_that_is_not_given(tmp_path: Path, kind: str) -> None:
    """Families differ in it."""
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    }  # fmt: skip
    if kind == "GptOss":
        sizes["rope_parameters"] = {"rope_type": "linear", "factor": 2.0}
    elif kind != "Mixtral":
        del sizes["num_local_experts"]
    config = {"architectures": [f"{kind}ForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = getattr(transformers, f"{kind}Config")(**sizes).rope_parameters
    assert load_config(tmp_path).ropes[0].theta == theirs["rope_theta"]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("types", [None, ["sliding_attention", "full_attention"] * 2])
def test_windows_of_smollm3_are_those_of_transformers(
    tmp_path: Path, used: bool, types: list[str] | None
) -> None:
    given: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 99,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None,
        "use_sliding_window": used, "sliding_window": 16, "layer_types": types,
    }  # fmt: skip
    config = {"architectures": ["SmolLM3ForCausalLM"], **given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**given))
    layers = theirs.model.layers
    expected = tuple(layer.self_attn.sliding_window for layer in layers)
    assert load_config(tmp_path).sliding_windows == expected


@pytest.mark.parametrize(
    ("variant", "window"),
    [("llama", 0), ("mistral", 16), ("mistral-unlimited", 0), ("gemma3", 0), ("llama4", 0)],
)
def test_a_window_that_all_layers_share_is_told(
    tiny_model: Callable[..., Path], variant: str, window: int
) -> None:
    folder = tiny_model(variant)
    assert load_config(folder).attention_window == window
    assert make_runner(folder).info.attention_window == window


@pytest.mark.parametrize("wrong", ["x", [1, None]])
def test_a_wrong_end_token_is_a_fault_of_the_file_that_has_it(tmp_path: Path, wrong: Any) -> None:
    config = write_gemma3_4b(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        load_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": wrong}))
    with pytest.raises(ModelError, match=r"/config\.json: eos_token_id"):
        load_config(tmp_path)


@pytest.mark.parametrize("nothing", [None, []])
def test_end_tokens_are_those_of_the_file_that_lists_some(tmp_path: Path, nothing: Any) -> None:
    config = write_gemma3_4b(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": nothing}))
    assert load_config(tmp_path).eos_token_ids == (1, 106)
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": nothing}))
    assert load_config(tmp_path).eos_token_ids == ()
    generation.write_text('{"eos_token_id": 0}')
    assert load_config(tmp_path).eos_token_ids == (0,)


def test_published_configs() -> None:
    """The shapes that ship with the repository are readable."""
    root = Path(__file__).resolve().parents[4] / "configs" / "models"
    folders = [path.parent for path in root.rglob("config.json")]
    assert folders
    for folder in folders:
        config = load_config(folder)
        assert config.num_heads % config.num_kv_heads == 0
