"""What a model's folder must hold, and what is read from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.settings.model_folder import (
    SettingsError,
    hub_name,
    model_config,
    model_folder,
    pin_models,
    vocabulary,
)

DEMO = "configs/models/demo"


def test_a_folder_is_read() -> None:
    assert model_folder(DEMO) == Path(DEMO).resolve()
    assert model_config(DEMO)["vocab_size"] == max(vocabulary(DEMO).values()) + 1


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
    with pytest.raises(SettingsError, match=r"model\.path: no folder 'missing'"):
        model_config("missing")


def test_a_path_is_preferred_to_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = {"model": {"path": "org/name"}, "speculation": {"model": None}}
    with pytest.raises(
        SettingsError, match=r"^model\.path: no folder 'org/name' here, and HF_HUB_"
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
