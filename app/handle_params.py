"""Parameters of a Python handle call, checked as strictly as HTTP's."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from actors.scheduling.request import Grammar, Objective, SamplingParams
from app.engine_client.client import ModelCard

_SAMPLING = {f.name for f in fields(SamplingParams)}
_OTHERS = {"slo", "priority", "tenant", "ignore_eos", "output"}


@dataclass(frozen=True, slots=True)
class HandleCall:
    sampling: SamplingParams
    tenant: str
    priority: int
    objective: Objective
    output: tuple[int, ...]


def parse_params(
    params: Mapping[str, Any],
    num_prompt_tokens: int,
    card: ModelCard,
    end_ids: Sequence[int] = (),
) -> HandleCall:
    """Raises ValueError naming an unknown or invalid parameter.

    end_ids: of the tokenizer; it may end answers with others than the model's config names.
    max_tokens defaults to the rest of the model's context, temperature to 0 (greedy), and the seed
    to a random one.
    """
    values = dict(params)
    unknown = sorted(set(values) - _SAMPLING - _OTHERS)
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]!r}; known: {sorted(_SAMPLING | _OTHERS)}")
    if num_prompt_tokens == 0:
        raise ValueError("prompt: must hold at least one token")
    room = card.max_model_len - num_prompt_tokens
    if room < 1:
        raise ValueError(
            f"prompt: {num_prompt_tokens} tokens leave no room in {card.max_model_len}"
        )
    slo = values.pop("slo", None) or {}
    priority = int(values.pop("priority", 0))
    tenant = str(values.pop("tenant", ""))
    output = tuple(int(t) for t in values.pop("output", ()))
    check_ids(output, card, "output")
    stop_ids = tuple(values.pop("stop_token_ids", ()))
    if not values.pop("ignore_eos", False):
        stop_ids = tuple(dict.fromkeys([*stop_ids, *card.eos_token_ids, *end_ids]))
    wanted = values.get("max_tokens")
    values["max_tokens"] = room if wanted is None else int(wanted)
    if not 1 <= values["max_tokens"] <= room:
        raise ValueError(
            f"max_tokens: must lie in [1, {room}], as the prompt has {num_prompt_tokens} of "
            f"{card.max_model_len} tokens"
        )
    if not 0 <= float(values.get("temperature", 0.0)) <= 100:
        raise ValueError("temperature: must lie in [0, 100]")
    if isinstance(values.get("grammar"), Mapping):
        values["grammar"] = Grammar(**values["grammar"])
    if "logit_bias" in values:
        bias = values["logit_bias"]
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        values["logit_bias"] = tuple((int(t), float(b)) for t, b in pairs)
    values.setdefault("seed", secrets.randbits(62))
    return HandleCall(
        SamplingParams(**values, stop_token_ids=stop_ids),
        tenant,
        priority,
        Objective(_seconds(slo.get("tbt_ms")), _seconds(slo.get("ttft_ms"))),
        output,
    )


def check_ids(tokens: Sequence[int], card: ModelCard, param: str) -> None:
    """Raises ValueError for a token id outside the vocabulary, which could crash a device."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < card.vocab_size:
            raise ValueError(f"{param}: token id {token} is outside the vocabulary")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else float(milliseconds) / 1000
