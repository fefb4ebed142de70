"""The tokenizer that grammars are compiled with is the one that transformers chooses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from actors.stage.grammars.tokenizer import _WITH_OWN_CLASS, _is_general, read_tokenizer
from tests.tiny_models import write_tokenizer

DEMO = Path(__file__).parents[4] / "configs/models/demo"
GENERAL = "PreTrainedTokenizerFast"
CLASSES = (GENERAL, "TokenizersBackend", "Qwen2TokenizerFast", "GPT2Tokenizer", "LlamaTokenizer")


def pieces() -> Tokenizer:
    """In the manner of Llama 2: blanks as marks, unknown bytes as <0x..>."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcé"]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


def words() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["[UNK]", "un", "##able", "house", "##s"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def written(
    folder: Path, model_type: str, declared: str | None, made: Tokenizer | None = None
) -> Path:
    """A model folder without weights; made: its tokenizer instead of the byte-level one."""
    folder.mkdir()
    write_tokenizer(folder)
    if made is not None:
        made.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": declared}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def facts(tokenizer: Any) -> tuple[Any, ...]:
    """All that a grammar is compiled with."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=400, stop_token_ids=[1])
    return (info.decoded_vocab, info.vocab_type, info.add_prefix_space, info.special_token_ids)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("make", [None, pieces, words])
def test_it_is_the_one_that_transformers_chooses(
    tmp_path: Path, make: Callable[[], Tokenizer] | None, model_type: str
) -> None:
    made = None if make is None else make()
    for declared in (*CLASSES, None):
        folder = written(tmp_path / str(declared), model_type, declared, made)
        try:
            expected = facts(AutoTokenizer.from_pretrained(folder))
        except Exception as refused:  # by a class that does not suit the file
            with pytest.raises(type(refused)):
                facts(read_tokenizer(folder))
        else:
            assert facts(read_tokenizer(folder)) == expected, declared


def test_common_folders_are_read_without_the_search(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [DEMO, *map(tiny_model, ("llama", "mixtral", "gemma2"))]
    expected = [facts(AutoTokenizer.from_pretrained(folder)) for folder in folders]
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    assert [facts(read_tokenizer(folder)) for folder in folders] == expected


def test_types_with_a_class_of_their_own_are_those_of_transformers() -> None:
    found = {
        kind
        for kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if tokenization_auto.TOKENIZER_MAPPING_NAMES[kind] != "TokenizersBackend"
    }
    assert found == _WITH_OWN_CLASS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {}}'),
        ("tokenizer_config.json", "{"),
        ("config.json", "[]"),
        ("tekken.json", "{}"),
        ("tokenizer.json", None),
        ("config.json", None),
    ],
)
def test_anything_else_is_left_to_transformers(
    tmp_path: Path, name: str, content: str | None
) -> None:
    folder = written(tmp_path / "model", "llama", GENERAL)
    assert _is_general(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert not _is_general(folder)
