"""Which tools the model may call, and the grammar that makes it call one."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from actors.scheduling.request import Grammar
from app.api.http.errors import ApiError, invalid
from app.api.http.options import ApiOptions
from app.api.sampling_params import dump
from app.api.schema.chat import (
    AllowedTools,
    AllowedToolSet,
    ChatRequest,
    CustomTool,
    FunctionSpec,
    GivenTool,
    GrammarInput,
    NamedCustomTool,
    NamedFunction,
    NamedTool,
    Tool,
)
from app.api.schema.common import InputGrammar
from app.text.output.json_text import INPUT
from app.text.output.pieces import Tools

_MAX_CALLS: Final = 16  # in one answer, since models tend to continue lists for ever
_FORMATS: Final = (  # of the text
    "response_format", "text.format", "output_config.format", "output_format"
)  # fmt: skip
_INPUT_HINT: Final = "The tool's whole input as text, also where its description rules JSON out."
_GRAMMARS: Final = {
    "lark": "The text of `input` follows this Lark grammar:",
    "regex": "The text of `input` matches this regular expression as a whole:",
}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """specs: the tools as the template shows them. tools: calls of these are parsed in the output.
    grammar: constrains the output to calls. chosen: names of the tools that it calls. parallel: an
    answer may hold several. custom: names of tools that take text. strict: of those whose calls
    keep to their schema.
    """

    specs: list[dict[str, Any]] | None = None
    tools: Tools = field(default_factory=dict)
    grammar: Grammar | None = None
    chosen: tuple[str, ...] = ()
    parallel: bool = True
    custom: frozenset[str] = frozenset()
    strict: frozenset[str] = frozenset()

    @property
    def most_calls(self) -> int:
        return _MAX_CALLS if self.parallel else 1

    def schemas(self) -> dict[str, str]:
        """Of the arguments of all tools, as JSON; of any object for a tool that is not strict."""
        return {
            name: json.dumps(_of_object(schema) if name in self.strict else {"type": "object"})
            for name, schema in self.tools.items()
        }

    def chosen_schemas(self) -> dict[str, str]:
        """Of the arguments of tools of which one has to be called, as JSON."""
        return {name: json.dumps(_of_object(self.tools[name])) for name in self.chosen}

    def constrain(self, grammar: Grammar | None, param: str) -> tuple[Grammar | None, str]:
        """The one constraint of the output, of the request's own and the tools', and the parameter
        that asks for it. An answer that has to call holds no text that a format could be of;
        400 where an extension constrains all of the output."""
        if self.grammar is None:
            return grammar, param if grammar is not None else "tools"
        if grammar is not None and param not in _FORMATS:
            raise invalid(f"tool_choice already constrains the output; drop '{param}'.", param)
        return self.grammar, "tools"


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """A tool as `/v1/chat/completions` declares it."""
    function = FunctionSpec(name=name, description=description, parameters=parameters)
    return Tool(type="function", function=function)


def custom_tool(name: str, description: str | None, grammar: InputGrammar | None) -> Tool:
    """A custom tool as the model sees it: a function of one text. Nothing keeps the text to its
    grammar, so the model is told of it."""
    told = [] if description is None else [description]
    if grammar is not None:
        told.append(f"{_GRAMMARS[grammar.syntax]}\n{grammar.definition}")
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": _INPUT_HINT}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return function_tool(name, "\n\n".join(told) or None, parameters)


def shown_tools(tools: Sequence[GivenTool]) -> list[dict[str, Any]]:
    """The tools of a chat as the template shows them."""
    return [_as_function(tool).model_dump(exclude_none=True) for tool in tools]


def _as_function(tool: GivenTool) -> Tool:
    if isinstance(tool, Tool):
        return tool
    custom = tool.custom
    grammar = custom.format.grammar if isinstance(custom.format, GrammarInput) else None
    return custom_tool(custom.name, custom.description, grammar)


def named_tool(name: str) -> NamedTool:
    """The choice of this tool, as `/v1/chat/completions` makes it."""
    return NamedTool(type="function", function=NamedFunction(name=name))


def allowed_tools(mode: Literal["auto", "required"], names: Sequence[str]) -> AllowedTools:
    """The choice among these tools, as `/v1/chat/completions` makes it."""
    allowed = AllowedToolSet(mode=mode, tools=[named_tool(name) for name in names])
    return AllowedTools(type="allowed_tools", allowed_tools=allowed)


def plan_tools(body: ChatRequest, options: ApiOptions) -> ToolPlan:
    """Decide how a request's tools are offered, constrained and parsed; raises 400."""
    tools, choice = body.tools, body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools.", "tool_choice")
        return ToolPlan()
    custom = [tool.custom.name for tool in tools if isinstance(tool, CustomTool)]
    strict = [t.function.name for t in tools if isinstance(t, Tool) and t.function.strict]
    parallel = body.parallel_tool_calls is not False
    functions = [_as_function(tool) for tool in tools]
    return plan_tool_calls(functions, choice, parallel, options, custom, strict)


def plan_tool_calls(
    tools: Sequence[Tool],
    choice: str | NamedTool | NamedCustomTool | AllowedTools | None,
    parallel: bool,
    options: ApiOptions,
    custom: Collection[str] = (),
    strict: Collection[str] = (),
) -> ToolPlan:
    """The plan for a non-empty list of tools. custom: the names of those that take text. strict: of
    those whose calls are to keep to their schema, also where none has to be called."""
    if len(tools) > options.max_tools:
        raise invalid(
            f"At most {options.max_tools} tools are allowed (setting api.max_tools).", "tools"
        )
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise invalid("Two tools have the same name.", "tools")
    if isinstance(choice, AllowedTools):
        # The model sees no others: it could call them where nothing constrains its answer.
        wanted = {_named(tool) for tool in choice.allowed_tools.tools}
        for name in sorted(wanted.difference(names)):
            raise _unknown(name)
        tools = [tool for tool in tools if tool.function.name in wanted]
        choice = choice.allowed_tools.mode
    specs = [tool.model_dump(exclude_none=True) for tool in tools]
    dump(specs, "tools")  # refuses NaN before it meets the template
    if choice == "none":
        return ToolPlan()
    declared = {tool.function.name: tool.function.parameters or {} for tool in tools}
    if choice in (None, "auto"):
        strict = frozenset(strict) & set(declared)
        return ToolPlan(specs, declared, None, (), parallel, frozenset(custom), strict)
    if isinstance(choice, NamedTool | NamedCustomTool):
        name = _named(choice)
        chosen = [tool for tool in tools if tool.function.name == name]
        if not chosen:
            raise _unknown(name)
        tools, parallel = chosen, False
    schema = _calls_schema(tools, several=parallel)
    grammar = Grammar("json_schema", json.dumps(schema, separators=(",", ":")))
    called = tuple(tool.function.name for tool in tools)
    return ToolPlan(specs, declared, grammar, called, parallel, frozenset(custom))


def _named(choice: NamedTool | NamedCustomTool) -> str:
    return choice.function.name if isinstance(choice, NamedTool) else choice.custom.name


def _unknown(name: str) -> ApiError:
    return invalid(f"tool_choice names '{name}', which is not among the tools.", "tool_choice")


def _calls_schema(tools: Sequence[Tool], *, several: bool) -> dict[str, Any]:
    """JSON schema of one call, or of a list of at least one."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, definitions) for tool in tools]
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = (
        {"type": "array", "minItems": 1, "maxItems": _MAX_CALLS, "items": one} if several else one
    )
    return {**schema, "$defs": definitions} if definitions else schema


def _of_object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object also where it does not say so."""
    if parameters and not ("properties" in parameters and "type" not in parameters):
        return dict(parameters)
    return {"type": "object", "properties": {}, **parameters}


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    name = tool.function.name
    parameters = copy.deepcopy(_of_object(tool.function.parameters or {}))
    own: dict[str, Any] = {}
    for key in ("$defs", "definitions"):  # move to the root, under names of this tool's own
        given = parameters.pop(key, None) or {}
        if not isinstance(given, dict):
            raise invalid(f"The parameters of tool '{name}': '{key}' is no object.", "tools")
        for inner, definition in given.items():
            own[f"{name}.{inner}"] = _moved(definition, name)
    arguments = _moved(parameters, name)
    whole, text = f"#/$defs/{name}", json.dumps([arguments, own])
    if f'"{whole}"' in text or f'"{whole}/' in text:  # it refers to itself
        own[name] = arguments
        arguments = {"$ref": whole}
    definitions.update(own)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, name: str) -> Any:
    """The schema with its local references following the definitions to the root."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, name) for key, value in schema.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str):
            for start in ("#/$defs/", "#/definitions/"):
                if reference.startswith(start):
                    moved["$ref"] = f"#/$defs/{name}.{reference[len(start) :]}"
                    return moved
            if reference == "#" or reference.startswith("#/"):  # the tool's own root
                moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
        return moved
    if isinstance(schema, list):
        return [_moved(value, name) for value in schema]
    return schema
