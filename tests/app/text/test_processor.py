"""What is said of a model folder without a tokenizer that can be read, and where many texts are
tokenized."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from app.text.chat_template import TemplateBusy
from app.text.processor import TextProcessor, TokenizerError, load_tokenizer
from tests.tiny_tokenizers import byte_level_folder


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


def test_a_gguf_files_tokenizer_is_read_as_it_was_written(tmp_path: Path) -> None:
    """transformers' class for the model type would split and normalize as it says itself."""
    folder = byte_level_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.gguf").symlink_to(tmp_path / "tiny.gguf")
    backend = load_tokenizer(str(folder)).backend_tokenizer
    split = backend.pre_tokenizer.pre_tokenize_str("ab 12")
    assert [part for part, _ in split] == ["ab", "Ġ12"]
    assert backend.normalizer is None


def test_a_tokenizer_of_remote_code_is_told_how_to_be_saved(tmp_path: Path) -> None:
    """InternLM2's published folders have one."""
    folder = byte_level_folder(tmp_path)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    described = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(
        TokenizerError, match=r"holds no tokenizer\.json but tokenizer\.model, .* sav"
    ):
        TextProcessor(folder)


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


async def test_long_chats_hold_up_each_other_alone_and_are_bounded(
    byte_level: TextProcessor,
) -> None:
    """The thread of the long ones waits here; those that were given up cost nothing."""
    may_go_on = threading.Event()
    byte_level._long_chats.submit(may_go_on.wait)
    long = [{"role": "user", "content": "x" * (1 << 22)}]
    waiting = [asyncio.create_task(byte_level.render_chat(long)) for _ in range(9)]
    await asyncio.sleep(0)
    short = [{"role": "user", "content": "Hi"}]
    assert "Hi" in await byte_level.render_chat(short)
    with pytest.raises(TemplateBusy, match="too many long chats"):
        await byte_level.render_chat(long)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    may_go_on.set()
    longer = [{"role": "user", "content": "x" * (1 << 17)}]
    assert longer[0]["content"] in await byte_level.render_chat(longer)


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        (None, "mean"),
        ('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}', "mean"),
        ('{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}', "last"),
        ('{"pooling_mode_cls_token": true}', None),
        ('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}', None),
        ("[1]", None),
    ],
)
def test_embeddings_are_pooled_as_the_folder_says(
    tmp_path: Path, content: str | None, pooling: str | None
) -> None:
    folder = byte_level_folder(tmp_path)
    if content is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(content)
    text = TextProcessor(folder)
    text.close()
    assert text.pooling == pooling
