"""Small tokenizers made on the spot: no download, nothing of other tests.

The byte-level one has the bytes themselves as its first tokens, in order: token 97 is "a".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from actors.stage.grammars.vocabulary import byte_level_alphabet

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("Ġ", "the"), ("Ã", "©")]
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.content == 'refuse me' %}{{ raise_exception('not this') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_folder(
    folder: Path, *, template: str | None = TEMPLATE, special: Sequence[str] = SPECIAL
) -> Path:
    """A model folder with a byte-level BPE tokenizer (no weights).

    special: tokens that are so called; the first ends answers.
    """
    by_byte = {byte: char for char, byte in byte_level_alphabet().items()}
    vocab = {by_byte[byte]: byte for byte in range(256)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return _write(folder, tokenizer, template, special)


def sentencepiece_folder(folder: Path) -> Path:
    """A folder in the manner of Llama 2: blanks as marks, unknown bytes as <0x..>."""
    vocab: dict[str, int] = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in "▁abcdefghijklmnopqrstuvwxyz.,!?ABCé":
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return _write(folder, tokenizer, None)


def wordpiece_folder(folder: Path) -> Path:
    """A tokenizer whose tokens do not decode on their own."""
    words = ["[UNK]", "un", "##able", "able", "house", "##s", "the", "."]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return _write(folder, tokenizer, None)


def _write(
    folder: Path, tokenizer: Tokenizer, template: str | None, special: Sequence[str] = SPECIAL
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special[0],
        "additional_special_tokens": list(special[1:]),
        "model_max_length": 100000,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
