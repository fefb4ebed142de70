"""What is said of a model folder without a tokenizer that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.text.processor import TextProcessor, TokenizerError
from tests.app.text.tiny_tokenizer import byte_level_folder


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, " holds no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read: JSONDecodeError: "),
        ("tokenizer.json", "{}", "cannot be read: KeyError: "),
        ("tokenizer_config.json", "[]", "cannot be read: AttributeError: "),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    folder = byte_level_folder(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError) as raised:
        TextProcessor(folder)
    assert str(raised.value).startswith(f"model.path: {folder}")
    assert said in str(raised.value)
