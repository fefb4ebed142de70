"""What is said of a model folder without a tokenizer that can be read, and where many texts are
tokenized."""

from __future__ import annotations

import asyncio
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


async def test_many_short_texts_leave_the_event_loop_free(byte_level: TextProcessor) -> None:
    """Each is short enough to be tokenized at once, all together are not."""
    texts = [f"{number}: é" * 50 for number in range(256)]
    ran: list[str] = []
    asyncio.get_running_loop().call_soon(ran.append, "encoding")
    tokens = await byte_level.encode_all(texts)
    assert ran == ["encoding"]
    assert tokens == [byte_level.encode_now(text) for text in texts]
    asyncio.get_running_loop().call_soon(ran.append, "decoding")
    assert await byte_level.decode_all(tokens) == texts
    assert ran == ["encoding", "decoding"]
    assert await byte_level.encode_all([]) == []
    assert await byte_level.decode_all([]) == []
