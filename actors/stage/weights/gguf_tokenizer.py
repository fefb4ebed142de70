"""Writes the tokenizer that a GGUF file describes as files of a model folder.

transformers builds it from the metadata, and what it leaves out or guesses is set right here. Of
SentencePiece: a vocabulary may ask for no blank before the text, and Phi-3's special tokens take
the blanks behind them, which no metadata says. Of byte-level BPE: every control token is one token
with the file's id, whatever its characters; text is split and merged as `tokenizer.ggml.pre` means
in llama.cpp. Of both: a token that the file does not have is none.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from actors.stage.models.config import ModelError
from actors.stage.weights.gguf_file import GgufFile

_log = logging.getLogger(__name__)

_SENTENCEPIECE, _BYTE_LEVEL = "llama", "gpt2"  # tokenizer.ggml.model
_CONTROL, _USER_DEFINED = 3, 4  # token types
_NAMED = ("bos", "eos", "unknown", "padding")  # added by transformers whatever their type
_WITHOUT_RSTRIP = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3

# What tokenizer.ggml.pre means beside the splits that transformers knows, as in llama.cpp.
_AS_GPT2 = (
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "gigachat", "a.x-4.0",
    "granite-docling", "exaone4",
)  # fmt: skip
_DIGITS_THEN_GPT2 = (
    "smollm", "refact", "starcoder", "codeshell", "minerva-7b", "mellum2", "command-r", "exaone",
)  # fmt: skip
# Cased letters, as DeepSeek's own list has them: some fewer than Unicode.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_GLM4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_QWEN2 = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Words that begin with capitals or have none, and what an apostrophe adds to them.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{capitals}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    for capitals in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # from the right
_SPLITS: dict[str, tuple[str, ...]] = {  # one within the parts of the other
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2,
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
    **dict.fromkeys(("qwen2", "hunyuan", "stablelm2", "solar-open"), _QWEN2),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "ufakzeka": (_QWEN2[0].removeprefix(_CONTRACTIONS),),  # of Turkish
    "viking": (_BLOOM, r"\p{N}"),
    "superbpe": (r"\p{N}+", r"(?=(?:\d{3})+(?!\d))"),
    "minicpm5": (r"\p{N}{1,3}", *_GLM4),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"), (_BY_THREES, rf"{_CASED_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}")
    ),
    "youtu": (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        rf"{_CASED_WORDS}|\p{{N}}|{_SIGNS}",
    ),
    "kimi-k2": (
        r"\p{Han}+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), _GLM4),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# Text is composed (NFC), as their folders say.
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "f2llmv2", "megrez", "qwen35", "command-r")
# A part that is a token is that token, even if no merges lead to it; and, but for the others', a
# text begins with BOS unless the file says otherwise.
_LIKE_LLAMA3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
)  # fmt: skip
_OTHER_WHOLES = ("glm4", "glm5", "minicpm5", "youtu")


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Raises ModelError, naming the file, for a tokenizer that cannot be read."""
    from transformers import PreTrainedTokenizerFast

    path, metadata = file.path, file.metadata
    model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    num_rows = file.tensors["token_embd.weight"].shape[0]
    if len(tokens) > num_rows:
        raise ModelError(
            f"{path}: tokenizer.ggml.tokens has {len(tokens)} tokens, but token_embd.weight only "
            f"{num_rows} rows"
        )
    if model == _BYTE_LEVEL:
        if pre is None:  # files from before May 2024
            pre = "qwen2" if metadata.get("general.architecture") == "qwen2" else "default"
            _log.warning("%s has no tokenizer.ggml.pre: text is split as %r means", path, pre)
        _check_split(path, str(pre))
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, LookupError, TypeError, ImportError, NotImplementedError) as bad:
        raise ModelError(f"{path}: its tokenizer cannot be read: {bad}") from bad
    if model == _BYTE_LEVEL and pre in _LIKE_LLAMA3:
        tokenizer.add_bos_token = metadata.get("tokenizer.ggml.add_bos_token", True)
    tokenizer.save_pretrained(folder)
    written = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    if model == _SENTENCEPIECE:
        if not metadata.get("tokenizer.ggml.add_space_prefix", True):
            _without_prefix(content)
        if metadata.get("general.architecture") == "phi3":
            for token in content["added_tokens"]:
                token["rstrip"] = token["special"] and token["content"] not in _WITHOUT_RSTRIP
    elif model == _BYTE_LEVEL:
        _set_tokens(content, tokens, _added_of(metadata))
        _set_split(content, pre)
        content["model"]["ignore_merges"] = pre in (*_LIKE_LLAMA3, *_OTHER_WHOLES)
        if pre in _COMPOSED:
            content["normalizer"] = {"type": "NFC"}
    added = content["added_tokens"]
    content["added_tokens"] = [token for token in added if token["id"] < len(tokens)]
    written.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _check_split(path: Path, pre: str) -> None:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return  # an older version, which names no splits

    known = {*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_THEN_GPT2, *_SPLITS}
    if pre not in known:
        raise ModelError(
            f"{path}: tokenizer.ggml.pre {pre!r} is not known, so text would become other tokens "
            f"than the model was trained with; known: {', '.join(sorted(known))}"
        )


def _added_of(metadata: dict[str, Any]) -> dict[int, bool]:
    """Tokens that are found whole in a text, by id: whether they are special."""
    types = enumerate(metadata.get("tokenizer.ggml.token_type") or ())
    added = {n: kind == _CONTROL for n, kind in types if kind in (_CONTROL, _USER_DEFINED)}
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _NAMED)
    return added | {int(token): True for token in named if token is not None}


def _set_tokens(content: dict[str, Any], tokens: list[str], added: dict[int, bool]) -> None:
    """The file's own tokens: transformers cuts control tokens with characters that are not of the
    byte alphabet, such as DeepSeek's, and adds tokens behind the vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelling = bytes_to_unicode()
    alphabet = {*spelling.values()}
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if number not in added and not alphabet.issuperset(token):
            token = "".join(spelling[byte] for byte in token.encode())
        vocab.setdefault(token, number)
    content["model"]["vocab"] = vocab
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": number, "content": tokens[number], **plain, "special": special}
        for number, special in sorted(added.items())
        if number < len(tokens) and vocab[tokens[number]] == number
    ]
    processor = content["post_processor"] or {}
    for name, token in processor.get("special_tokens", {}).items():
        token["ids"] = [vocab[name]]


def _set_split(content: dict[str, Any], pre: str | None) -> None:
    if pre in _DIGITS_THEN_GPT2:
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}]
    elif pre in _SPLITS:
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        steps = [split | {"pattern": {"Regex": regex}} for regex in _SPLITS[pre]]
    else:
        return  # transformers' own
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(bytes_of | {"use_regex": pre in _DIGITS_THEN_GPT2})  # regex: the split of GPT-2
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def _without_prefix(content: dict[str, Any]) -> None:
    """Neither writes a blank before the text nor takes one away."""
    if (content["pre_tokenizer"] or {}).get("type") == "Metaspace":
        content["pre_tokenizer"]["prepend_scheme"] = "never"
    for part, kind in (("normalizer", "Prepend"), ("decoder", "Strip")):
        steps = content[part] or {}
        for key in ("normalizers", "decoders"):
            if key in steps:
                steps[key] = [step for step in steps[key] if step["type"] != kind]
