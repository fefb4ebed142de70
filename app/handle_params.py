"""Parameters of a Python handle call, checked as strictly as HTTP's."""

from __future__ import annotations

import numbers
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from actors.scheduling.request import Grammar, Objective, SamplingParams
from app.api.sampling_params import LEAST_TOP_P, SEEDS
from app.api.schema.common import SamplingFields
from app.engine_client.client import ModelCard

_SAMPLING = {f.name for f in fields(SamplingParams)}
# Those whose ranges are HTTP's. Temperatures go further here, and lengths are the prompt's matter.
_LIMITED = {
    "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens",
}  # fmt: skip
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
    check_ids(stop_ids, card, "stop_token_ids")
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
    bias = values.pop("logit_bias", None) or ()
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    biases = {str(int(t)): float(b) for t, b in pairs}
    limited = {name: values.pop(name) for name in _LIMITED & set(values)}
    limits = _within_limits({**limited, "logit_bias": biases})
    if (limits.min_tokens or 0) > values["max_tokens"]:
        raise ValueError(f"min_tokens: more than the {values['max_tokens']} tokens allowed")
    values |= {name: value for name in limited if (value := getattr(limits, name)) is not None}
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)  # -1 and 0: off
    if "top_p" in values:
        values["top_p"] = max(values["top_p"], LEAST_TOP_P)
    seed = values.get("seed")
    values["seed"] = secrets.randbelow(SEEDS) if seed is None else seed % SEEDS
    values["logit_bias"] = tuple((int(t), b) for t, b in biases.items())
    check_ids([t for t, _ in values["logit_bias"]], card, "logit_bias")
    return HandleCall(
        SamplingParams(**values, stop_token_ids=stop_ids),
        tenant,
        priority,
        Objective(_seconds(slo.get("tbt_ms")), _seconds(slo.get("ttft_ms"))),
        output,
    )


def _within_limits(given: Mapping[str, Any]) -> SamplingFields:
    """HTTP's parameters: one beyond their range would fail a step, others' requests with it."""
    plain = {name: _plain(value) for name, value in given.items()}
    try:
        return SamplingFields.model_validate(plain)
    except ValidationError as bad:
        first = bad.errors()[0]
        value = str(first["input"])[:80]
        raise ValueError(f"{first['loc'][0]}: {first['msg']}, not {value}") from None


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which alone the limits know."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def check_ids(tokens: Sequence[int], card: ModelCard, param: str) -> None:
    """Raises ValueError for a token id outside the vocabulary, which could crash a device."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < card.vocab_size:
            raise ValueError(f"{param}: token id {token} is outside the vocabulary")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else float(milliseconds) / 1000
