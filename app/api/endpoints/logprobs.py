"""Log-probabilities in the two shapes OpenAI gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.scheduling.plan import TokenLogprobs
from app.text.processor import TextProcessor

_FLOOR = -9999.0  # stands for a probability of zero: JSON has no infinity


def token_name(text: TextProcessor, token: int) -> str:
    """A token's text; bytes that are no text of their own are written `bytes:\\x..`."""
    raw = text.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(float(logprob), _FLOOR)


def completion_logprobs(
    text: TextProcessor,
    entries: Sequence[tuple[TokenLogprobs, int]],
    prompt: Sequence[tuple[int, TokenLogprobs | None]] | None,
    num_top: int,
    offset: int,
) -> dict[str, Any]:
    """The four parallel lists of /v1/completions.

    prompt: (token, its log-probabilities) when the prompt is echoed; the first has none.
    offset: characters before the continuation's own text.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    if prompt is not None:
        detokenizer = text.detokenizer(skip_special_tokens=True)
        num_chars = 0
        for token, found in prompt:
            tokens.append(token_name(text, token))
            logprobs.append(None if found is None else _finite(found.logprob))
            tops.append(None if found is None else _top(text, found, num_top))
            offsets.append(num_chars)
            num_chars += len(detokenizer.push([token]))
    for found, start in entries:
        tokens.append(token_name(text, found.token))
        logprobs.append(_finite(found.logprob))
        tops.append(_top(text, found, num_top))
        offsets.append(offset + start)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def _top(text: TextProcessor, found: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The likeliest tokens, and the sampled one even where it is not among them."""
    top = {token_name(text, token): _finite(value) for token, value in found.top[:num_top]}
    top.setdefault(token_name(text, found.token), _finite(found.logprob))
    return top


def chat_logprobs(
    text: TextProcessor, entries: Sequence[tuple[TokenLogprobs, int]], num_top: int
) -> dict[str, Any]:
    """The `content` list of /v1/chat/completions."""
    return {
        "content": [
            {
                **_chat_entry(text, found.token, found.logprob),
                "top_logprobs": [
                    _chat_entry(text, token, value) for token, value in found.top[:num_top]
                ],
            }
            for found, _ in entries
        ],
        "refusal": None,
    }


def _chat_entry(text: TextProcessor, token: int, logprob: float) -> dict[str, Any]:
    raw = text.token_bytes(token)
    return {"token": token_name(text, token), "logprob": _finite(logprob), "bytes": list(raw)}
