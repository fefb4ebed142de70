"""What a replica says of its model's text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.paths import locate
from app.replica import load_text
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
