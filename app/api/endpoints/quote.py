"""`POST /v1/slo/quote`: whether these tokens could be served now under this objective."""

from __future__ import annotations

from typing import Any

from actors.scheduling.interfaces import Quote, QuoteRequest
from app.api.context import Context, objective_of, tokenized
from app.api.endpoints.conversation import prompt_of, template_messages
from app.api.endpoints.tool_choice import shown_tools
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.schema.other import SloQuoteRequest


class Quotes:
    """Handler of a quote; it reserves nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        body = await call.read_json(SloQuoteRequest)
        context = self._context.of(body.model)
        num_tokens, param = await _count(body, context)
        context.check_num_prompt_tokens(num_tokens, param)
        card = context.engine.card
        max_tokens = min(body.max_tokens, card.max_model_len - num_tokens)
        objective, tenant = objective_of(body), call.tenant(body.user)
        asked = QuoteRequest(num_tokens, max_tokens, objective, tenant, body.priority)
        quote = await context.engine.quote(asked)
        found = {
            "object": "slo.quote",
            "model": card.name,
            "prompt_tokens": num_tokens,
            "max_tokens": max_tokens,
        }
        await call.reply_json({**found, **answer_of(quote)})


async def _count(body: SloQuoteRequest, context: Context) -> tuple[int, str]:
    """The prompt's tokens, and the parameter that gave them."""
    names = ("prompt_tokens", "prompt", "messages")
    params = [name for name in names if getattr(body, name) is not None]
    if len(params) != 1:
        raise invalid("Give one of prompt_tokens, prompt and messages.", "prompt_tokens")
    if body.tools is not None and body.messages is None:
        raise invalid("tools go with messages.", "tools")
    if body.prompt_tokens is not None:
        return body.prompt_tokens, params[0]
    if body.prompt is not None:
        (tokens,) = await tokenized([body.prompt], context, "prompt")
    else:
        prompt = await prompt_of(
            context,
            template_messages(body.messages or [], context.options),
            tools=shown_tools(body.tools or []),
            add_generation_prompt=True,
        )
        tokens = prompt.tokens
    return len(tokens), params[0]


def answer_of(quote: Quote) -> dict[str, Any]:
    """The engine's quote, in milliseconds."""
    predicted = attainable = None
    if quote.ttft_s is not None:
        predicted = {
            "ttft_ms": _ms(quote.ttft_s),
            "ttft_bound_ms": _ms(quote.ttft_bound_s),
            "tbt_bound_ms": _ms(quote.tbt_bound_s),
        }
        attainable = {"ttft_ms": _ms(quote.least_ttft_s), "tbt_ms": _ms(quote.least_tbt_s)}
    return {
        "can_serve_now": quote.can_serve_now,
        "predicted": predicted,
        "attainable": attainable,
        "retry_after_s": quote.retry_after_s,
        "reason": quote.message,
        "param": quote.param,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
