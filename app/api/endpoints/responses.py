"""`POST /v1/responses`: the newer form of a chat, for text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.scheduling.request import Grammar
from app.api.context import Context, new_id
from app.api.endpoints.conversation import Prompt, generation_of, prompt_of, template_messages
from app.api.endpoints.logprobs import check_alternatives
from app.api.endpoints.output import plan_output, template_variables
from app.api.endpoints.response_writer import ResponseWriter
from app.api.endpoints.tool_choice import (
    ToolPlan,
    allowed_tools,
    custom_tool,
    function_tool,
    named_tool,
    plan_tool_calls,
)
from app.api.endpoints.truncation import longest_that_fits
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.sampling_params import (
    checked_grammar,
    dump,
    requested_grammar,
    sampling_params,
    schema_grammar,
)
from app.api.schema.chat import (
    AllowedTools,
    CustomCall,
    CustomToolCall,
    FunctionCall,
    GivenCall,
    Message,
    NamedTool,
    Tool,
    ToolCall,
)
from app.api.schema.response_tools import (
    AllowedFunctionTools,
    CallableTool,
    CustomTool,
    FunctionTool,
    GrammarInput,
    HostedTool,
    NamedFunctionTool,
    NamespaceTool,
    shown_name,
)
from app.api.schema.responses import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputMessage,
    InputReasoning,
    OutputPart,
    ResponseRequest,
)
from app.api.sse import stream_reply, whole_reply

_MOST_ENTRIES = 20_000  # log-probabilities: the whole answer is encoded at once


class Responses:
    """Handler of one request to `/v1/responses`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        body = await call.read_json(ResponseRequest)
        context = self._context.of(body.model)
        _check_repeated(body)
        tools = _plan(body, context)
        grammar, param = tools.constrain(*_grammar(body))
        effort = None if body.reasoning is None else body.reasoning.effort
        variables = template_variables(
            context, body.chat_template_kwargs, effort, "reasoning.effort"
        )

        async def render(messages: Sequence[Message]) -> Prompt:
            plain = template_messages(messages, context.options)
            return await prompt_of(context, plain, tools=tools.specs, variables=variables)

        messages = _messages(body)
        if body.truncation == "auto":
            most = context.engine.card.max_model_len - (body.max_output_tokens or 1)
            rendered = await longest_that_fits(messages, render, most)
        else:
            rendered = await render(messages)
        prompt = rendered.tokens
        context.check_prompt(prompt, "input")
        output = plan_output(context, tools, grammar, rendered.text)
        grammar = await checked_grammar(output.grammar, context, param, call.key_name)
        sampling = sampling_params(
            body,
            context,
            max_tokens=_max_tokens(body, context, len(prompt)),
            logprobs=body.num_alternatives,
            grammar=grammar,
        )
        response_id = new_id("resp").replace("-", "_")
        generation = generation_of(context, call, body, response_id, prompt, sampling, output)
        writer = ResponseWriter(context, body, response_id, generation, output)
        if body.stream:
            await stream_reply(call, generation, writer)
        else:
            await whole_reply(call, generation, writer, writer.response)


def _max_tokens(body: ResponseRequest, context: Context, num_prompt_tokens: int) -> int:
    """Most tokens to generate: those asked for, else what context and log-probabilities allow: the
    last event holds all of them, also of a stream."""
    given = body.max_output_tokens
    most = context.new_tokens(num_prompt_tokens, given, "max_output_tokens")
    if body.num_alternatives is None:
        return most
    check_alternatives(context.options, body.num_alternatives, "top_logprobs")
    per_token = 1 + body.num_alternatives
    limit = min(context.options.max_logprob_entries, _MOST_ENTRIES)
    if given is not None and per_token * given > limit:
        raise invalid(
            f"The answer may hold {per_token * given} log-probabilities (tokens, and alternatives "
            f"of each); at most {limit} are given here: ask for fewer.",
            "top_logprobs",
            "too_many_logprobs",
        )
    return min(most, max(1, limit // per_token))


def _check_repeated(body: ResponseRequest) -> None:
    """Raises 400 for what the answer could not repeat: numbers that JSON does not have."""
    dump([tool.model_dump() for tool in body.tools or []], "tools")
    if body.text is not None and body.text.format is not None:
        dump(body.text.format.schema_, "text.format.schema")


def _grammar(body: ResponseRequest) -> tuple[Grammar | None, str]:
    """The constraint of `text.format`, or of an extension."""
    extension, param = requested_grammar(body)
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return extension, param
    if extension is not None:
        raise invalid(f"'text.format' and '{param}' both constrain the output: give one.", param)
    if wanted.type == "json_object":
        return Grammar("json_object", ""), "text.format"
    if wanted.schema_ is None:
        param = "text.format.schema"
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_parameter")
    return schema_grammar(wanted.schema_, wanted.strict, "text.format"), "text.format"


def _plan(body: ResponseRequest, context: Context) -> ToolPlan:
    callable_tools = list(_callable_tools(body))
    if not callable_tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools.", "tool_choice")
        return ToolPlan()
    tools = [_shown(name, tool) for name, tool in callable_tools]
    custom = [name for name, tool in callable_tools if isinstance(tool, CustomTool)]
    strict = [
        name for name, tool in callable_tools if isinstance(tool, FunctionTool) and tool.strict
    ]
    parallel = body.parallel_tool_calls is not False
    given = body.tool_choice
    choice: str | NamedTool | AllowedTools | None
    if isinstance(given, NamedFunctionTool):
        choice, parallel = named_tool(given.name), False
    elif isinstance(given, AllowedFunctionTools):
        choice = allowed_tools(given.mode, [tool.name for tool in given.tools])
    else:
        choice = given
    return plan_tool_calls(tools, choice, parallel, context.options, custom, strict)


def _callable_tools(body: ResponseRequest) -> Iterator[tuple[str, CallableTool]]:
    """What the model may call, by the names that it sees: hosted tools are left out."""
    for tool in body.tools or []:
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                yield shown_name(tool.name, inner.name), inner
        elif not isinstance(tool, HostedTool):
            yield tool.name, tool


def _shown(name: str, tool: CallableTool) -> Tool:
    if isinstance(tool, CustomTool):
        grammar = tool.format if isinstance(tool.format, GrammarInput) else None
        return custom_tool(name, tool.description, grammar)
    return function_tool(name, tool.description, tool.parameters)


def _messages(body: ResponseRequest) -> list[Message]:
    """The input as chat messages; calls that follow each other are one assistant's turn."""
    messages: list[Message] = []
    if body.instructions:
        messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    thoughts: list[str] = []  # of the assistant's turn that follows
    for item in body.input:
        if isinstance(item, InputReasoning):
            thoughts.append("".join(part.text for part in item.content or []))
            continue
        if isinstance(item, InputMessage):
            messages.append(Message(role=item.role, content=_text(item.content)))
        elif isinstance(item, InputCallOutput):
            output = _text(item.output)
            messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
        else:
            calls = [_tool_call(item)]
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                last.tool_calls = [*(last.tool_calls or []), *calls]
            else:
                messages.append(Message(role="assistant", tool_calls=calls))
        last = messages[-1]
        if last.role == "assistant":
            parts = filter(None, [last.reasoning_content, *thoughts])
            last.reasoning_content = "\n".join(parts) or None
        thoughts.clear()
    if not messages:
        raise invalid("The input holds no message.", "input")
    return messages


def _text(content: str | Sequence[OutputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool_call(item: InputCall | InputCustomCall) -> GivenCall:
    name = shown_name(item.namespace, item.name)
    if isinstance(item, InputCustomCall):
        custom = CustomCall(name=name, input=item.input)
        return CustomToolCall(id=item.call_id, type="custom", custom=custom)
    return ToolCall(id=item.call_id, function=FunctionCall(name=name, arguments=item.arguments))
