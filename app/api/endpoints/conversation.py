"""Renders a conversation by the model's chat template, and generates the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.scheduling.request import SamplingParams
from app.api.context import Context
from app.api.endpoints.output import OutputPlan
from app.api.generation import Generation, generation_request
from app.api.http.call import Call
from app.api.http.errors import ApiError, invalid
from app.api.http.options import ApiOptions
from app.api.sampling_params import stop_strings
from app.api.schema.chat import CustomToolCall, GivenCall, Message
from app.api.schema.common import SamplingFields
from app.text.chat_template import (
    TemplateBroken,
    TemplateBusy,
    TemplateError,
    TemplateHostile,
    TemplateMissing,
)
from app.text.output.json_text import INPUT


def template_messages(messages: Sequence[Message], options: ApiOptions) -> list[dict[str, Any]]:
    """Plain data for the template: parts joined to text, a call's arguments as an object."""
    if len(messages) > options.max_messages:
        raise invalid(
            f"At most {options.max_messages} messages are allowed (setting api.max_messages).",
            "messages",
        )
    return [_plain(message, number) for number, message in enumerate(messages)]


def _plain(message: Message, number: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message)}
    if message.content is None and not _is_answer(message):
        param = f"messages.{number}.content"
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_parameter")
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    elif message.role == "tool":
        param = f"messages.{number}.tool_call_id"
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_parameter")
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call)}
            for call in message.tool_calls
        ]
    return plain


def _function(call: GivenCall) -> dict[str, Any]:
    """The called function as templates show it; a custom tool is one of one argument."""
    if isinstance(call, CustomToolCall):
        return {"name": call.custom.name, "arguments": {INPUT: call.custom.input}}
    name, arguments = call.function.name, call.function.arguments
    return {"name": name, "arguments": _arguments(arguments)}


def _is_answer(message: Message) -> bool:
    """Whether a message is an answer sent back: one that says nothing has a content of null."""
    said = message.tool_calls or message.reasoning_content or message.refusal
    return message.role == "assistant" and bool(said or "content" in message.model_fields_set)


def _text(message: Message) -> str:
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)


def _arguments(text: str | None) -> Any:
    """Arguments as an object, as templates expect; anything else is passed on unchanged, also an
    escaped half of a surrogate pair, which is no text. No text is no arguments."""
    if text is None or not text.strip():
        return {}
    try:
        found = json.loads(text)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the template writes it, and its token ids."""

    text: str
    tokens: list[int]


async def prompt_of(
    context: Context,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> Prompt:
    """The prompt of a conversation; raises 400, or 500 where the template itself is at fault."""
    # What is refused in any case must not hold up others' chats.
    context.check_length(sum(len(message["content"]) for message in messages), "messages")
    try:
        text = await context.text.render_chat(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
        )
    except TemplateMissing as error:
        raise invalid(f"{error}.", "messages", "no_chat_template") from None
    except TemplateBusy as busy:
        raise ApiError(503, f"{busy}.", "messages", "template_busy", retry_after_s=1.0) from None
    except (TemplateBroken, TemplateHostile) as error:
        raise ApiError(500, f"{error}.", "messages", "chat_template_failed") from None
    except TemplateError as error:
        raise invalid(f"{error}.", "messages", "invalid_messages") from None
    context.check_length(len(text), "messages")
    # The template writes its own special tokens.
    return Prompt(text, await context.text.encode(text, add_special_tokens=False))


def generation_of(
    context: Context,
    call: Call,
    body: SamplingFields,
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    output: OutputPlan,
    n: int = 1,
) -> Generation:
    """The answer, generated as it is read. Raises 403 for a priority above the key's and 429 past
    the key's tokens."""
    request = generation_request(call, body, request_id, prompt, sampling, n)
    skip_special_tokens = body.skip_special_tokens is not False
    rules = output.rules(stop_strings(body, context), sampling, skip_special_tokens)
    call.admit_tokens(len(prompt))
    return Generation(context, call, [request], rules, stream=bool(body.stream))
