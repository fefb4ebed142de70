"""What a model's folder must hold, and what is read from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.settings.load import parse, resolve
from app.settings.model_folder import (
    SettingsError,
    hub_name,
    model_config,
    model_description,
    model_folder,
    pin_models,
    sampling_defaults,
    vocabulary,
)

DEMO = "configs/models/demo"
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99,
    "num_attention_heads": 4,
}  # fmt: skip
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
_LENGTHS = {
    "text_config": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {**_SIZES, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        },
        131072,
    ),
    "yarn": (
        {
            **_SIZES, "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512,
            "rope_scaling": _YARN,
        },
        2048,
    ),
    "n_positions": (
        {
            "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
            "n_positions": 1024, "vocab_size": 99,
        },
        1024,
    ),
    "max_seq_len": (
        {
            "architectures": ["MPTForCausalLM"], "d_model": 64, "n_layers": 2, "n_heads": 4,
            "max_seq_len": 8192, "vocab_size": 99, "attn_config": {"alibi": True}, "no_bias": True,
        },
        8192,
    ),
}  # fmt: skip


def test_a_folder_is_read() -> None:
    assert model_folder(DEMO) == Path(DEMO).resolve()
    assert model_config(DEMO)["vocab_size"] == max(vocabulary(DEMO).values()) + 1


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()  # as of another user's folder, also for the superuser
    with pytest.raises(SettingsError, match=r"^model\.path: .*/config\.json: Is a directory"):
        model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "speculation.model: '{folder}' holds no config.json"),
        ("{", "speculation.model: {folder}/config.json is not JSON"),
        ("[]", "speculation.model: {folder}/config.json is not a JSON object"),
    ],
)
def test_what_is_wrong_with_it_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SettingsError) as caught:
        model_config(str(tmp_path), "speculation.model")
    assert str(caught.value).startswith(message.format(folder=tmp_path))
    with pytest.raises(SettingsError) as caught:
        model_config("missing")
    assert str(caught.value) == f"model.path: no folder 'missing' in {Path.cwd()}"
    with pytest.raises(SettingsError, match=r"^model\.path: no folder '/missing'$"):
        model_config("/missing")


def test_a_path_is_preferred_to_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = {"model": {"path": "org/name"}, "speculation": {"model": None}}
    with pytest.raises(
        SettingsError, match=r"^model\.path: no folder 'org/name' in .+, and HF_HUB_"
    ):
        pin_models(args)
    with pytest.raises(SettingsError, match="is not whole in"):
        model_folder("org/name", with_weights=True)
    (tmp_path / "org/name").mkdir(parents=True)
    assert model_folder("org/name") == tmp_path / "org/name"
    assert hub_name("org/name") is None
    assert pin_models({"models": [args]}) == {"models": [args]}


def test_a_tokenizer_of_another_form_has_no_known_vocabulary(tmp_path: Path) -> None:
    assert vocabulary(str(tmp_path)) == {}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": "other"}))
    assert vocabulary(str(tmp_path)) == {}


@pytest.mark.parametrize("named", _LENGTHS)
def test_sizes_are_those_of_the_model_that_the_stages_build(tmp_path: Path, named: str) -> None:
    """Whatever config.json calls them, and after the scaling of positions."""
    content, length = _LENGTHS[named]
    (tmp_path / "config.json").write_text(json.dumps(content))
    args = {"model": {"path": str(tmp_path)}}
    assert model_description(str(tmp_path)).max_model_len == length
    resolved = resolve(parse({**args, "parallel": {"pipeline_stages": 2}}))
    assert resolved.scheduler.max_model_len == resolved.stage.max_model_len == length
    activations = 4 * 64 * resolved.scheduler.max_step_tokens
    assert resolved.channel_bytes == (1 << 20) + activations
    too_long = {"model": {**args["model"], "max_model_len": length + 1}}
    with pytest.raises(SettingsError, match=rf"exceeds the model's {length} positions"):
        resolve(parse(too_long))
    with pytest.raises(SettingsError, match="3 stages for 2 layers"):
        resolve(parse({**args, "parallel": {"pipeline_stages": 3}}))


def test_the_longest_contexts_are_served_on_demand(tmp_path: Path) -> None:
    content = {**_LENGTHS["yarn"][0], "max_position_embeddings": 10 << 20, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = {"path": str(tmp_path)}
    assert resolve(parse({"model": model})).stage.max_model_len == 1 << 20
    whole = {**model, "max_model_len": 10 << 20}
    assert resolve(parse({"model": whole})).stage.max_model_len == 10 << 20


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, {}),
        ({"eos_token_id": 2, "max_new_tokens": 9, "do_sample": True}, {}),
        ({"temperature": None, "top_k": 20}, {"top_k": 20}),
        (
            {"repetition_penalty": 1.05, "top_k": 20, "temperature": 1, "min_p": 0.1, "top_p": 0.8},
            {
                "temperature": 1, "top_p": 0.8, "top_k": 20, "min_p": 0.1,
                "repetition_penalty": 1.05,
            },
        ),
    ],
)  # fmt: skip
def test_sampling_is_recommended_by_the_folder(
    tmp_path: Path, said: dict[str, float] | None, found: dict[str, float]
) -> None:
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == (found, [])


def test_what_no_request_may_have_is_not_recommended(tmp_path: Path) -> None:
    said = {"temperature": "hot", "top_p": 1.5, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    found, (first, second) = sampling_defaults(tmp_path)
    assert found == {"top_k": 20}
    assert first.startswith("temperature 'hot' of ")
    assert second.startswith("top_p 1.5 of ")


def test_recommendations_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"generation_config\.json is not readable JSON"):
        sampling_defaults(tmp_path)
