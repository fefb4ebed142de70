"""The tokenizer of a model folder: transformers' choice, found sooner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.stage.models.config import GGUF_LINK

_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the class's names
# Model types for which AutoTokenizer takes a class of its own although the folder names that one.
_WITH_OWN_CLASS = frozenset(
    {
        "hyperclovax_vision_v2",
        "qwen2",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen4_exp",
        "siglip2",
    }
)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer that AutoTokenizer would return. Its imports take over a second, so a tokenizer
    of the general class is read without them; so is a GGUF file's, whose split and normalizer a
    class of the model type would replace."""
    if _is_general(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens with a name such as `eos_token`, and those that the tokenizer marks as special."""
    added = tokenizer.added_tokens_decoder.items()
    marked = (token_id for token_id, token in added if token.special)
    return frozenset((*tokenizer.all_special_ids, *marked))


def _is_general(folder: Path) -> bool:
    """Whether tokenizer.json is the whole tokenizer: other classes change it when it is read."""
    if (folder / GGUF_LINK).is_symlink():
        return (folder / "tokenizer.json").is_file()
    names = ("tokenizer_config.json", "config.json")
    try:
        tokenizer, model = (json.loads((folder / name).read_bytes()) for name in names)
        return (
            tokenizer["tokenizer_class"] in _GENERAL
            and "auto_map" not in tokenizer
            and {model.get("model_type"), model.get("model_name")}.isdisjoint(_WITH_OWN_CLASS)
            and (folder / "tokenizer.json").is_file()
            and not (folder / "tekken.json").exists()  # Mistral's own format, preferred to it
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # AutoTokenizer tells what is wrong
