"""What a replica says of its model's text."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Literal

import pytest

from app.paths import locate
from app.replica import load_text
from app.settings.model_folder import SettingsError
from app.settings.schema import ModelSettings


def test_a_broken_chat_template_is_told_at_the_start_and_costs_the_chats_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(locate("configs/models/demo"), folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    text = load_text(str(folder), ModelSettings(path=str(folder)))
    text.close()
    assert f"{folder}: the chat template (default) does not compile: line 1: " in caplog.text
    assert "chats are refused, completions are answered" in caplog.text


async def test_a_chat_template_of_the_settings_takes_the_place_of_the_models(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    text = load_text("configs/models/demo", ModelSettings(path="", chat_template=str(file)))
    try:
        assert await text.render_chat([{"role": "user", "content": "Hi"}]) == "<Hi>"
    finally:
        text.close()


@pytest.mark.parametrize(
    ("setting", "found"), [("model", {"temperature": 0.7, "top_p": 0.95}), ("openai", {})]
)
def test_the_models_sampling_is_the_default_unless_openais_is_wanted(
    caplog: pytest.LogCaptureFixture, setting: Literal["model", "openai"], found: dict[str, float]
) -> None:
    with caplog.at_level(logging.INFO, logger="app.replica"):
        text = load_text("configs/models/demo", ModelSettings(path="", sampling_defaults=setting))
    text.close()
    assert text.sampling_defaults == found
    assert (f"sample with {found}" in caplog.text) == bool(found)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{% if %}", "model.chat_template: the chat template (default) does not compile: line 1: "),
        (" ", "model.chat_template: {file}: it is empty"),
        (None, "model.chat_template: {file}: No such file or directory"),
    ],
)
def test_one_that_will_not_do_ends_the_start(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        load_text("configs/models/demo", ModelSettings(path="", chat_template=str(file)))
    assert str(caught.value).startswith(said.format(file=file))
