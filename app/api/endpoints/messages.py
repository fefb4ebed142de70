"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's form of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from actors.scheduling.request import Grammar
from app.api.context import Context, new_id, objective_of
from app.api.endpoints.conversation import Prompt, prompt_of, template_messages
from app.api.endpoints.message_writer import MessageWriter
from app.api.endpoints.output import (
    EFFORT,
    SWITCHES,
    known_efforts,
    plan_output,
    template_variables,
)
from app.api.endpoints.tool_choice import ToolPlan, function_tool, named_tool, plan_tool_calls
from app.api.generation import Generation
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.sampling_params import checked_grammar, dump, sampling_params, stop_strings
from app.api.schema.chat import (
    FunctionCall,
    GivenCall,
    Message,
    NamedTool,
    ToolCall,
)
from app.api.schema.common import ReasoningEffort, SamplingFields
from app.api.schema.messages import (
    Conversation,
    CountTokensRequest,
    GivenMessage,
    MessagesRequest,
    Metadata,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from app.api.sse import stream_reply, whole_reply
from app.engine_client.client import GenerationRequest

# Claude Code's account of itself at the head of `system`. A part of it is new in every request, and
# no prompt would be found in the cache.
_BILLING: Final = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_SESSION: Final = re.compile(r"(?<=_account_)([\w-]*?)_session_[\w-]+\Z")


class Messages:
    """Handlers of both routes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def count_tokens(self, call: Call) -> None:
        body = await call.read_json(CountTokensRequest)
        context = self._context.of(body.model)
        prompt = await _prompt(body, _plan(body, context), context)
        await call.reply_json({"input_tokens": len(prompt.tokens)})

    async def create(self, call: Call) -> None:
        body = await call.read_json(MessagesRequest)
        context = self._context.of(body.model)
        tools = _plan(body, context)
        prompt = await _prompt(body, tools, context)
        context.check_prompt(prompt.tokens, "messages")
        grammar, param = tools.constrain(*_format(body))
        output = plan_output(context, tools, grammar, prompt.text)
        grammar = await checked_grammar(output.grammar, context, param, call.key_name)
        fields = SamplingFields(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            stop=body.stop_sequences or None,
        )
        # Cut instead of refused: this API's clients have to send one, and many send a large one.
        room = context.engine.card.max_model_len - len(prompt.tokens)
        sampling = sampling_params(
            fields,
            context,
            max_tokens=min(body.max_tokens, room),
            logprobs=None,
            grammar=grammar,
        )
        message_id = new_id("msg").replace("-", "_")
        user = body.user or _user(body.metadata)
        request = GenerationRequest(
            request_id=message_id,
            prompt=tuple(prompt.tokens),
            sampling=sampling,
            tenant=call.tenant(user),
            cache_salt=call.cache_salt(user),
            priority=call.check_priority(body.priority),
            objective=objective_of(body),
        )
        stops = stop_strings(fields, context, "stop_sequences")
        rules = output.rules(stops, sampling, skip_special_tokens=True)
        call.admit_tokens(len(prompt.tokens))
        stream = bool(body.stream)
        generation = Generation(context, call, [request], rules, stream=stream)
        asked = body.thinking
        writer = MessageWriter(
            context,
            message_id,
            generation,
            output,
            stream=stream,
            shows_thinking=not (asked and (asked.type == "disabled" or asked.display == "omitted")),
            fills_context=room < body.max_tokens,
        )
        if stream:
            await stream_reply(call, generation, writer)
        else:
            await whole_reply(call, generation, writer, writer.message)


def _user(metadata: Metadata | None) -> str | None:
    """The user's id without the session, which Claude Code writes into it in one of two forms: all
    sessions of a user are one tenant, and share their cached prefixes."""
    given = metadata and metadata.user_id
    if not given:
        return None
    try:
        parts = json.loads(given)
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, dict) or "session_id" not in parts:
        return _SESSION.sub(r"\1", given)
    return json.dumps({name: parts[name] for name in sorted(parts) if name != "session_id"})


async def _prompt(body: Conversation, tools: ToolPlan, context: Context) -> Prompt:
    if body.messages[-1].role == "assistant":
        param = f"messages.{len(body.messages) - 1}.role"
        raise invalid("The last message must be the user's: answers are not begun.", param)
    messages = [message for given in _messages(body) for message in given]
    return await prompt_of(
        context,
        template_messages(messages, context.options),
        tools=tools.specs,
        variables=_thinking(body, context),
    )


def _format(body: Conversation) -> tuple[Grammar | None, str]:
    """What the request asks for, and the parameter that does."""
    wanted, param = body.output_config and body.output_config.format, "output_config.format"
    if body.output_format is not None:
        if wanted:
            raise invalid(f"Give either '{param}' or 'output_format'.", "output_format")
        wanted, param = body.output_format, "output_format"
    if not wanted:
        return None, param
    return Grammar("json_schema", dump(wanted.schema_, f"{param}.schema")), param


def _plan(body: Conversation, context: Context) -> ToolPlan:
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise invalid("tool_choice needs tools.", "tool_choice")
        return ToolPlan()
    tools = [function_tool(t.name, t.description, t.input_schema) for t in body.tools]
    strict = [tool.name for tool in body.tools if tool.strict]
    if choice is None:
        return plan_tool_calls(tools, "auto", True, context.options, strict=strict)
    if choice.type == "tool" and choice.name is None:
        param = "tool_choice.name"
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_parameter")
    wanted: str | NamedTool = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        wanted = named_tool(choice.name or "")
    parallel = not choice.disable_parallel_tool_use
    return plan_tool_calls(tools, wanted, parallel, context.options, strict=strict)


def _thinking(body: Conversation, context: Context) -> dict[str, Any]:
    """Template variables; raises 400 for what this model cannot do."""
    wanted = None if body.thinking is None else body.thinking.type
    given = body.output_config and body.output_config.effort
    thinks = context.text.formats.reasoning is not None
    if wanted == "enabled" and not thinks:
        raise invalid("This model does not write its thinking apart.", "thinking")
    reads = context.text.template.reads
    switch = next((name for name in SWITCHES if reads(name)), None)
    if wanted == "disabled" and thinks:  # whatever its effort would be
        own: dict[str, Any] = {} if switch is None else {switch: False}
        if switch is None and reads(EFFORT):  # it always thinks: as little as it can, and unseen
            own = {EFFORT: known_efforts(context.text.template)[0]}
        return own | template_variables(context, body.chat_template_kwargs, None)
    effort: ReasoningEffort | None = "high" if wanted == "enabled" and switch else None
    if given and (switch or reads(EFFORT)):  # a hint: taken as far as the template knows it
        known = known_efforts(context.text.template)
        effort = given if given in known else "high"
    return template_variables(context, body.chat_template_kwargs, effort, "thinking")


def _messages(body: Conversation) -> Iterator[list[Message]]:
    """As chat messages: results of tools are messages of their own, before their turn's text."""
    if system := _system(body.system or ""):
        yield [Message(role="system", content=system)]
    for number, given in enumerate(body.messages):
        yield _assistant(given, number) if given.role == "assistant" else _others(given, number)


def _system(given: str | Sequence[TextBlock]) -> str:
    texts = [given] if isinstance(given, str) else [block.text for block in given]
    return "".join(_BILLING.sub("", text) for text in texts)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _result(content: str | Sequence[ResultBlock]) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        f"{block.tool_name}\n" if isinstance(block, ToolReferenceBlock) else block.text
        for block in content
    )


def _others(given: GivenMessage, number: int) -> list[Message]:
    """A message of the user's or the system's."""
    if isinstance(given.content, str):
        return [Message(role=given.role, content=given.content)]
    results: list[Message] = []
    texts: list[TextBlock] = []
    for place, block in enumerate(given.content):
        if isinstance(block, ToolResultBlock) and given.role == "user":
            text = ("Error: " if block.is_error else "") + _result(block.content or "")
            results.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
        elif isinstance(block, TextBlock):
            texts.append(block)
        else:
            raise invalid(
                f"A {given.role}'s message holds no {block.type}.",
                f"messages.{number}.content.{place}.type",
            )
    if texts or not results:
        results.append(Message(role=given.role, content=_text(texts)))
    return results


def _assistant(given: GivenMessage, number: int) -> list[Message]:
    if isinstance(given.content, str):
        return [Message(role="assistant", content=given.content)]
    message = Message(role="assistant", content="")
    calls: list[GivenCall] = []
    thoughts: list[str] = []
    for place, block in enumerate(given.content):
        if isinstance(block, TextBlock):
            message.content = f"{message.content}{block.text}"
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = FunctionCall(name=block.name, arguments=json.dumps(block.input))
            calls.append(ToolCall(id=block.id, function=function))
        elif not isinstance(block, RedactedThinkingBlock):
            raise invalid(
                f"An assistant's message holds no {block.type}.",
                f"messages.{number}.content.{place}.type",
            )
    message.tool_calls = calls or None
    message.reasoning_content = "\n".join(thoughts) or None
    return [message]
