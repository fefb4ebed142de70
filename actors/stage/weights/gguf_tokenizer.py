"""Writes the tokenizer that a GGUF file describes as files of a model folder.

transformers builds it from the metadata. Two things that it leaves out are added here: a vocabulary
of SentencePiece may ask for no blank before the text, and Phi-3's special tokens take the blanks
behind them, which no metadata says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.stage.models.config import ModelError
from actors.stage.weights.gguf_file import GgufFile

_SENTENCEPIECE = "llama"  # tokenizer.ggml.model
_WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Raises ModelError, naming the file, for a tokenizer that cannot be read."""
    from transformers import PreTrainedTokenizerFast

    path = file.path
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, TypeError, ImportError, NotImplementedError) as bad:
        raise ModelError(f"{path}: its tokenizer cannot be read: {bad}") from bad
    tokenizer.save_pretrained(folder)
    if file.metadata.get("tokenizer.ggml.model") != _SENTENCEPIECE:
        return
    written = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    if not file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        _without_prefix(content)
    if file.metadata.get("general.architecture") == "phi3":
        for token in content["added_tokens"]:
            token["rstrip"] = token["special"] and token["content"] not in _WITHOUT_RSTRIP
    written.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _without_prefix(content: dict[str, Any]) -> None:
    """Neither writes a blank before the text nor takes one away."""
    if (content["pre_tokenizer"] or {}).get("type") == "Metaspace":
        content["pre_tokenizer"]["prepend_scheme"] = "never"
    for part, kind in (("normalizer", "Prepend"), ("decoder", "Strip")):
        steps = content[part] or {}
        for key in ("normalizers", "decoders"):
            if key in steps:
                steps[key] = [step for step in steps[key] if step["type"] != kind]
