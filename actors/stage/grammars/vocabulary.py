"""The bytes of each token, read from the tokenizer's own description.

Byte-level BPE (GPT-2, Llama 3, Qwen) and byte-fallback SentencePiece (Llama 2, Mistral, Yi) both
let a token be turned into bytes without looking at its neighbors; then detokenizing is a table
look-up and an incremental UTF-8 decoder. Tokenizers of another make get no table and take the
slower path of `app.text.incremental.PrefixDetokenizer`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character
_MAX_ADDED_COMPARED = 256


class TokenizerBackend(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]: ...
    def to_str(self) -> str: ...


@cache
def byte_level_alphabet() -> Mapping[str, int]:
    """The printable character by which byte-level BPE writes each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


def _byte_level(token: str) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token holding, say, a blank stands for itself
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))}
    for part in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds


def token_bytes_table(backend: TokenizerBackend, special: Collection[int]) -> list[bytes] | None:
    """Bytes of every token id, or None when tokens do not decode on their own.

    The table is checked against the tokenizer itself on seeded random valid sequences before it
    is trusted; leading blanks, which SentencePiece drops at the start of a text, are not compared.
    """
    description = json.loads(backend.to_str())
    to_bytes = _way_to_bytes(description)
    if to_bytes is None:
        return None
    table = _table(backend, to_bytes)
    added = [entry["id"] for entry in description.get("added_tokens", ())]
    return table if _agrees(backend, table, special, added) else None


def bytes_of_tokens(backend: TokenizerBackend) -> list[bytes]:
    """As `token_bytes_table`, unchecked, and of any make: at worst the names of the tokens."""
    return _table(backend, _way_to_bytes(json.loads(backend.to_str())) or _byte_fallback)


def _way_to_bytes(description: Any) -> Callable[[str], bytes] | None:
    kinds = _decoder_kinds(description.get("decoder"))
    if "ByteLevel" in kinds:
        return _byte_level
    return _byte_fallback if "ByteFallback" in kinds else None


def _table(backend: TokenizerBackend, to_bytes: Callable[[str], bytes]) -> list[bytes]:
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():  # decoders treat an added token like any other
        table[token_id] = to_bytes(token)
    return table


def _agrees(
    backend: TokenizerBackend, table: list[bytes], special: Collection[int], added: list[int]
) -> bool:
    draw = random.Random(0)
    readable = [
        token for token, raw in enumerate(table) if raw and token not in special and _is_text(raw)
    ]
    if not readable:
        return False
    # Added tokens are too few to be drawn among the others.
    named = sorted({*added[:_MAX_ADDED_COMPARED]}.intersection(readable))
    drawn = ([draw.choice(readable) for _ in range(n)] for n in (1, 2, 3, 5, 8, 13, 21, 34))
    for tokens in (named, *drawn):
        ours = b"".join(table[token] for token in tokens).decode()
        if ours.lstrip(" ") != backend.decode(tokens, skip_special_tokens=True).lstrip(" "):
            return False
    return True


def _is_text(raw: bytes) -> bool:
    """Whether the bytes are whole characters."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
