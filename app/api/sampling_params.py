"""A request's sampling parameters, checked against this model and this server's limits."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from actors.scheduling.request import Grammar, SamplingParams
from app.api.context import Context
from app.api.http.errors import ApiError, invalid
from app.api.http.options import ApiOptions
from app.api.schema.common import DEFAULTS, SamplingFields
from app.text.grammars import GrammarBusy, GrammarInvalid

SEEDS: Final = 2**63 - 4096  # continuations of a prompt use those that follow
LEAST_TOP_P: Final = 1e-6  # 0 means the likeliest token
_TOOLS_COUNT_AS: Final = 8  # grammars, in length; in some families fewer take GRAMMAR_LIMIT_S
_DRAWS: Final = ("top_k", "top_p", "min_p")  # matter where a token is drawn


def check_continuations(options: ApiOptions, count: int, param: str) -> None:
    """Raises 400 for more continuations of a prompt than this server gives."""
    name = "max_n" if options.max_n <= options.max_continuations else "max_continuations"
    limit = getattr(options, name)
    if count > limit:
        raise invalid(
            f"At most {limit} continuations of a prompt are allowed (setting api.{name}).", param
        )


def stop_strings(request: SamplingFields, context: Context, param: str = "stop") -> tuple[str, ...]:
    """The request's stop strings, empty ones and excess refused by the name of `param`."""
    if request.stop is None:
        return ()
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    options = context.options
    if len(stops) > options.max_stops:
        raise invalid(
            f"At most {options.max_stops} stop strings are allowed (setting api.max_stops).", param
        )
    for stop in stops:
        if not stop:
            raise invalid("A stop string is empty.", param)
        if len(stop) > options.max_stop_chars:
            raise invalid(
                f"A stop string is longer than {options.max_stop_chars} characters (setting "
                "api.max_stop_chars).",
                param,
            )
    return tuple(stops)


def stop_token_ids(request: SamplingFields, context: Context) -> tuple[int, ...]:
    """Token ids that end a continuation: the caller's, and the model's unless ignore_eos."""
    own = request.stop_token_ids or []
    if len(own) > context.options.max_stop_token_ids:
        raise invalid(
            f"At most {context.options.max_stop_token_ids} stop token ids are allowed (setting "
            "api.max_stop_token_ids).",
            "stop_token_ids",
        )
    context.check_ids(own, "stop_token_ids")
    if request.ignore_eos:
        return tuple(dict.fromkeys(own))
    return tuple(
        dict.fromkeys([*own, *context.engine.card.eos_token_ids, *context.text.eos_token_ids])
    )


def sampling_params(
    request: SamplingFields,
    context: Context,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Parameters for the engine; raises 400 naming what is wrong.

    max_tokens is within what the context leaves. An unseeded request gets a random seed.
    """
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("stream_options needs stream: true.", "stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise invalid("continuous_usage_stats needs include_usage: true.", "stream_options")
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens is more than the {max_tokens} tokens allowed.", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=own_or_default("temperature", request, context),
        top_k=max(int(own_or_default("top_k", request, context)), 0),
        top_p=max(own_or_default("top_p", request, context), LEAST_TOP_P),
        min_p=own_or_default("min_p", request, context),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=own_or_default("repetition_penalty", request, context),
        seed=secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS,
        stop_token_ids=stop_token_ids(request, context),
        logit_bias=_logit_bias(request, context),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def own_or_default(name: str, request: SamplingFields, context: Context) -> float:
    """The request's value, else the one recommended for the model, else OpenAI's."""
    own: float | None = getattr(request, name)
    if own is not None:
        return own
    if name in _DRAWS and request.temperature == 0:  # they would only cost time
        return DEFAULTS[name]
    return context.text.sampling_defaults.get(name, DEFAULTS[name])


async def checked_grammar(
    grammar: Grammar | None, context: Context, param: str, key: str
) -> Grammar | None:
    """The grammar, once it is known to compile in time; raises 400, or 503 under a flood. key: the
    name of the request's API key."""
    if grammar is None:
        return None
    _check_length(grammar, context.options.max_grammar_chars, param)
    try:
        await context.text.grammars.check(grammar, key)
    except GrammarInvalid as error:
        raise invalid(f"Invalid '{param}': {error}.", param, "invalid_grammar") from None
    except GrammarBusy as error:
        raise ApiError(503, str(error), param, "grammar_busy", retry_after_s=1.0) from None
    return grammar


def _check_length(grammar: Grammar, most_chars: int, param: str) -> None:
    """Tools are many, and agents give them all to each request."""
    of_tools, of_text = grammar.num_held_chars, len(grammar.text)
    if param == "tools":
        of_tools, of_text = of_tools + of_text, 0
    if of_text > most_chars:
        raise invalid(
            f"The grammar is longer than {most_chars} characters (setting api.max_grammar_chars).",
            param,
        )
    if of_tools > _TOOLS_COUNT_AS * most_chars:
        raise invalid(
            f"The schemas of the tools are longer than {_TOOLS_COUNT_AS} times {most_chars} "
            "characters together (setting api.max_grammar_chars).",
            "tools",
        )


def requested_grammar(request: SamplingFields) -> tuple[Grammar | None, str]:
    """The constraint a request asks for and the parameter that asks; 400 for more than one."""
    found: list[tuple[Grammar, str]] = []
    if request.response_format is not None:
        grammar = _from_response_format(request)
        if grammar is not None:
            found.append((grammar, "response_format"))
    found += _given_as(
        "guided_",
        request.guided_json,
        request.guided_regex,
        request.guided_grammar,
        request.guided_choice,
    )
    if (one := request.structured_outputs) is not None:
        found += _given_as("structured_outputs.", one.json_, one.regex, one.grammar, one.choice)
    if len(found) > 1:
        raise invalid(
            f"'{found[0][1]}' and '{found[1][1]}' both constrain the output: give one.", found[1][1]
        )
    return found[0] if found else (None, "")


def _given_as(
    prefix: str,
    schema: Mapping[str, Any] | str | None,
    regex: str | None,
    grammar: str | None,
    choice: Sequence[str] | None,
) -> Iterator[tuple[Grammar, str]]:
    """The constraints that vLLM's parameters give, and their names, which begin with prefix."""
    if schema is not None:
        param = f"{prefix}json"
        text = schema if isinstance(schema, str) else dump(schema, param)
        yield Grammar("json_schema", text), param
    if regex is not None:
        yield Grammar("regex", regex), f"{prefix}regex"
    if grammar is not None:
        yield Grammar("ebnf", grammar), f"{prefix}grammar"
    if choice is not None:
        param = f"{prefix}choice"
        yield _choice(choice, param), param


def _from_response_format(request: SamplingFields) -> Grammar | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_object", "")
    if wanted.type == "json_schema":
        spec = _needed(wanted.json_schema, "json_schema")
        return schema_grammar(spec.schema_, spec.strict, "response_format.json_schema")
    if wanted.type == "regex":
        return Grammar("regex", _needed(wanted.pattern, "pattern"))
    if wanted.type == "grammar":
        return Grammar("ebnf", _needed(wanted.grammar, "grammar"))
    return _choice(_needed(wanted.choices, "choices"), "response_format.choices")


def schema_grammar(schema: Mapping[str, Any], strict: bool | None, param: str) -> Grammar:
    """The constraint of a schema within `param`."""
    kind = "strict_json_schema" if strict else "json_schema"
    return Grammar(kind, dump(schema, f"{param}.schema"))


def _needed(value: Any, name: str) -> Any:
    if value is None:
        param = f"response_format.{name}"
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_parameter")
    return value


def _choice(choices: Sequence[str], param: str) -> Grammar:
    if not choices or not all(choices):
        raise invalid("Give at least one choice, and no empty one.", param)
    return Grammar("choice", json.dumps(list(choices)))


def dump(value: Any, param: str) -> str:
    """Compact JSON text; 400 where it holds NaN or Infinity."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        raise invalid("NaN and Infinity are not JSON.", param) from None


def _logit_bias(request: SamplingFields, context: Context) -> tuple[tuple[int, float], ...]:
    if not request.logit_bias:
        return ()
    if len(request.logit_bias) > context.options.max_logit_bias:
        raise invalid(
            f"At most {context.options.max_logit_bias} biases (setting api.max_logit_bias).",
            "logit_bias",
        )
    bias: list[tuple[int, float]] = []
    for key, value in request.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise invalid(f"'{key[:32]}' is not a token id.", "logit_bias")
        bias.append((int(key), float(value)))
    context.check_ids([token for token, _ in bias], "logit_bias")
    return tuple(bias)


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)
