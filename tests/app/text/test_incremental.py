"""Any split of any text gives the same text; what tokenizers say is what we say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from app.text.incremental import PrefixDetokenizer, TableDetokenizer
from app.text.processor import TextProcessor
from tests.tiny_tokenizers import byte_level_folder, sentencepiece_folder, wordpiece_folder

BYTES = [bytes([byte]) for byte in range(256)]


@given(st.text(), st.data())
def test_any_split_of_any_text_is_the_text(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    detokenizer = TableDetokenizer(BYTES)
    pieces = [
        detokenizer.push(list(raw[start:end]))
        for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)
    ]
    for piece in pieces:
        piece.encode()  # never half a character
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.binary())
def test_broken_bytes_come_as_the_replacement_character(raw: bytes) -> None:
    detokenizer = TableDetokenizer(BYTES)
    text = "".join(detokenizer.push([byte]) for byte in raw) + detokenizer.flush()
    assert text == raw.decode("utf-8", "replace")


@given(tokens=st.lists(st.integers(0, 261)))
def test_byte_level_agrees_with_the_tokenizer(byte_level: TextProcessor, tokens: list[int]) -> None:
    detokenizer = byte_level.detokenizer()
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()
    assert text == byte_level.decode(tokens)


def test_byte_level_uses_the_table(byte_level: TextProcessor) -> None:
    assert isinstance(byte_level.detokenizer(), TableDetokenizer)


def test_special_tokens_are_shown_only_on_demand(byte_level: TextProcessor) -> None:
    end = byte_level.eos_token_ids[0]
    assert byte_level.detokenizer().push([97, end, 98]) == "ab"
    shown = byte_level.detokenizer(skip_special_tokens=False).push([97, end, 98])
    assert shown == "a<|end|>b"


def test_special_tokens_without_a_name_are_special(tmp_path: Path) -> None:
    """As in folders whose tokenizer.json alone marks them: turns of Llama 3, Gemma and Phi-3."""
    folder = byte_level_folder(tmp_path)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    turns = config.pop("additional_special_tokens")
    path.write_text(json.dumps(config))
    text = TextProcessor(folder)
    try:
        tokens = [97, *(text.encode_now(turn)[0] for turn in turns), 98]
        assert len(tokens) == 2 + len(turns)
        detokenizer = text.detokenizer()
        assert isinstance(detokenizer, TableDetokenizer)
        assert detokenizer.push(tokens) == "ab" == text.decode(tokens)
    finally:
        text.close()


def test_tokens_beyond_the_vocabulary_are_silent(byte_level: TextProcessor) -> None:
    assert byte_level.detokenizer().push([97, 10_000, 98]) == "ab"
    assert byte_level.token_bytes(10_000) == b""


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor(sentencepiece_folder(Path(tmp_path_factory.mktemp("marks"))))


def test_byte_fallback_keeps_the_blank_between_prompt_and_answer(
    sentencepiece: TextProcessor,
) -> None:
    tokens = sentencepiece.encode_now("the end é 猫", add_special_tokens=False)
    detokenizer = sentencepiece.detokenizer()
    assert isinstance(detokenizer, TableDetokenizer)
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()
    assert text == " the end é 猫"
    assert sentencepiece.decode(tokens) == "the end é 猫"


def test_added_tokens_of_blanks_are_blanks(tmp_path: Path) -> None:
    """Gemma's runs of blanks are added tokens, and decoders treat those like any other token."""
    folder = sentencepiece_folder(tmp_path)
    path = folder / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.add_tokens([AddedToken(t, normalized=False) for t in ("▁▁", "▁▁▁▁", "<0x>", "猫|é")])
    backend.add_special_tokens(["<odd▁one|猫>"])
    backend.save(str(path))
    text = TextProcessor(folder)
    try:
        vocab = backend.get_vocab()
        tokens = [vocab[t] for t in ("a", "▁▁▁▁", "b", "▁▁", "<0x>", "猫|é")]
        odd = vocab["<odd▁one|猫>"]
        detokenizer = text.detokenizer()
        assert isinstance(detokenizer, TableDetokenizer)
        assert detokenizer.push(tokens) == text.decode(tokens) == "a    b  <0x>猫|é"
        assert text.token_bytes(tokens[1]) == b"    "
        named = text.detokenizer(skip_special_tokens=False).push([tokens[0], odd])
        assert named == text.decode([tokens[0], odd], skip_special_tokens=False) == "a<odd one|猫>"
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        of_grammars = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
        assert [of_grammars[t] for t in tokens] == [text.token_bytes(t) for t in tokens]
    finally:
        text.close()


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor(wordpiece_folder(Path(tmp_path_factory.mktemp("words"))))


@given(tokens=st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_other_tokenizers_take_the_prefix_path(wordpiece: TextProcessor, tokens: list[int]) -> None:
    detokenizer = wordpiece.detokenizer()
    assert isinstance(detokenizer, PrefixDetokenizer)
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()
    assert text.split() == wordpiece.decode(tokens).split()


@given(st.text(min_size=1), st.data())
def test_the_prefix_path_never_splits_a_character(text: str, data: st.DataObject) -> None:
    raw = list(text.encode())

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    detokenizer = PrefixDetokenizer(decode)  # type: ignore[arg-type]
    pieces = [detokenizer.push([byte]) for byte in raw]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
