"""Parameters of a Python handle call, checked as strictly as HTTP's."""

from __future__ import annotations

import numbers
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from actors.scheduling.request import Grammar, Objective, SamplingParams
from app.api.sampling_params import LEAST_TOP_P, SEEDS
from app.api.schema.common import SamplingFields, ScheduleFields, Slo, Strict
from app.engine_client.client import ModelCard

_Fields = TypeVar("_Fields", bound=BaseModel)
_SAMPLING = {f.name for f in fields(SamplingParams)}
# Those whose ranges are HTTP's. Temperatures go further here, and lengths are the prompt's matter.
_LIMITED = {
    "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens",
}  # fmt: skip


class _GrammarFields(Strict):
    kind: Literal["json_object", "json_schema", "strict_json_schema", "regex", "ebnf", "choice"]
    text: str


class _OtherFields(ScheduleFields):
    """Those that HTTP names otherwise, or limits otherwise."""

    max_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    grammar: _GrammarFields | None = None
    tenant: str | None = None
    ignore_eos: bool | None = None


_KNOWN = sorted({*_SAMPLING, *_OtherFields.model_fields, "output"} - {"user"})


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
    unknown = sorted(set(values) - set(_KNOWN))
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]!r}; known: {_KNOWN}")
    if num_prompt_tokens == 0:
        raise ValueError("prompt: must hold at least one token")
    room = card.max_model_len - num_prompt_tokens
    if room < 1:
        raise ValueError(
            f"prompt: {num_prompt_tokens} tokens leave no room in {card.max_model_len}"
        )
    output = checked_ids(values.pop("output", None), card, "output")
    stop_ids = checked_ids(values.pop("stop_token_ids", None), card, "stop_token_ids")
    if isinstance(grammar := values.get("grammar"), Grammar):
        values["grammar"] = {"kind": grammar.kind, "text": grammar.text}
    others = _valid(
        _OtherFields, {n: values.pop(n) for n in _OtherFields.model_fields if n in values}
    )
    if not others.ignore_eos:
        stop_ids = tuple(dict.fromkeys([*stop_ids, *card.eos_token_ids, *end_ids]))
    values["max_tokens"] = room if others.max_tokens is None else others.max_tokens
    if not 1 <= values["max_tokens"] <= room:
        raise ValueError(
            f"max_tokens: must lie in [1, {room}], as the prompt has {num_prompt_tokens} of "
            f"{card.max_model_len} tokens"
        )
    for name in ("logprobs", "prompt_logprobs"):
        values[name] = getattr(others, name)
        if (values[name] or 0) > card.vocab_size:
            raise ValueError(f"{name}: more than the {card.vocab_size} tokens of the vocabulary")
    values["temperature"] = others.temperature or 0.0
    if others.grammar is not None:
        values["grammar"] = Grammar(others.grammar.kind, others.grammar.text)
    bias = values.pop("logit_bias", None) or ()
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    try:
        biases = {str(int(t)): float(b) for t, b in pairs}
    except (TypeError, ValueError):
        raise ValueError("logit_bias: must map token ids to numbers") from None
    limited = {name: values.pop(name) for name in _LIMITED & set(values)}
    # One beyond HTTP's ranges would fail a step, others' requests with it.
    limits = _valid(SamplingFields, {**limited, "logit_bias": biases})
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
    checked_ids([t for t, _ in values["logit_bias"]], card, "logit_bias")
    slo = others.slo or Slo()
    return HandleCall(
        SamplingParams(**values, stop_token_ids=stop_ids),
        others.tenant or "",
        others.priority or 0,
        Objective(_seconds(slo.tbt_ms), _seconds(slo.ttft_ms)),
        output,
    )


def _valid(kind: type[_Fields], given: Mapping[str, Any]) -> _Fields:
    try:
        return kind.model_validate({name: _plain(value) for name, value in given.items()})
    except ValidationError as bad:
        first = bad.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"{name}: {first['msg']}, not {str(first['input'])[:80]}") from None


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, which alone the limits know."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def checked_ids(tokens: Iterable[Any] | None, card: ModelCard, param: str) -> tuple[int, ...]:
    """Token ids as Python's integers. Raises ValueError for what is none, which the scheduler could
    not read, or is outside the vocabulary, which could crash a device."""
    try:
        ids = tuple([operator.index(token) for token in (() if tokens is None else tokens)])
    except TypeError:
        raise ValueError(f"{param}: must be token ids, whole numbers") from None
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < card.vocab_size:
            raise ValueError(f"{param}: token id {token} is outside the vocabulary")
    return ids


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else float(milliseconds) / 1000
