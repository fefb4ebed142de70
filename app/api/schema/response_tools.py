"""The tools of a request to `/v1/responses`, and which of them is to be called."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from app.api.schema.chat import TOOL_NAME
from app.api.schema.common import InputGrammar, Strict, TextInput, by_type

MAX_NAME_CHARS: Final = 128
# Run by OpenAI's servers, and sent by coding agents whether or not a server has them.
_HOSTED: Final = re.compile(r"(?:web_search|tool_search|image_generation)(?:_\w+)?")
IgnoredObject = Annotated[dict[str, Any] | None, Field(description="Accepted and ignored.")]


def shown_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def check_length(namespace: str | None, name: str) -> None:
    """Raises ValueError for a name that is too long for the model's functions."""
    if len(shown_name(namespace, name)) > MAX_NAME_CHARS:
        raise ValueError(
            f"the names of namespace and function, as in '{shown_name('namespace', 'function')}', "
            f"have at most {MAX_NAME_CHARS} characters together"
        )


class FunctionTool(Strict):
    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = Field(
        default=None, description="Accepted and ignored: the model sees every function."
    )
    allowed_callers: Annotated[list[str] | None, Field(description="Accepted and ignored.")] = None
    output_schema: IgnoredObject = None


class GrammarInput(InputGrammar):
    type: Literal["grammar"]


InputFormat = Annotated[
    Annotated[TextInput, Tag("TextInput")] | Annotated[GrammarInput, Tag("GrammarInput")],
    by_type(text="TextInput", grammar="GrammarInput"),
]


class CustomTool(Strict):
    type: Literal["custom"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    format: InputFormat | None = None
    defer_loading: bool | None = Field(default=None, description="Accepted and ignored.")
    allowed_callers: Annotated[list[str] | None, Field(description="Accepted and ignored.")] = None


def _served(tool: object) -> object:
    kind = _tool_kind(tool)
    if kind == "other":
        named = str(tool["type"])[:64] if isinstance(tool, dict) else ""
        raise PydanticCustomError(
            "item_type",
            "the model calls only functions and custom tools here, not a tool of type '{named}'",
            {"named": named},
        )
    return tool


def _tool_kind(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if not isinstance(kind, str):
        return "function"
    if kind in ("function", "custom", "namespace"):
        return kind
    return "hosted" if _HOSTED.fullmatch(kind) else "other"


CallableTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[CustomTool, Tag("CustomTool")],
    by_type(function="FunctionTool", custom="CustomTool"),
    BeforeValidator(_served),
]


class NamespaceTool(Strict):
    """A named group of functions, as coding agents declare those of an MCP server."""

    type: Literal["namespace"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = Field(default=None, description="Accepted and ignored.")
    tools: Annotated[list[CallableTool], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _has_names(self) -> Self:
        for tool in self.tools:
            check_length(self.name, tool.name)
        self.description = self.description or ""  # OpenAI's type of the response needs one
        return self


class HostedTool(Strict):
    """Accepted with its settings, but the model does not see it."""

    model_config = ConfigDict(extra="ignore")
    type: str = Field(pattern=f"^{_HOSTED.pattern}$")


GivenTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
    BeforeValidator(_served),
]


class NamedFunctionTool(Strict):
    type: Literal["function", "custom"]
    name: str = Field(max_length=MAX_NAME_CHARS)


class AllowedFunctionTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(fail_fast=True, min_length=1)]
