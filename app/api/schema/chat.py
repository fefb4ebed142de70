"""`/v1/chat/completions`: request and answer."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, Tag

from app.api.schema.common import (
    ADDED,
    InputGrammar,
    ReasoningEffort,
    SamplingFields,
    SentBack,
    Strict,
    TemplateVariables,
    TextInput,
    Usage,
    by_type,
)

TOOL_NAME: Final = r"^[A-Za-z0-9_\-]{1,128}$"


class TextPart(Strict):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = Field(
        default=None, description="Accepted and ignored: prefixes are cached anyway."
    )


class Answered(SentBack):
    """A part of an answer, as litellm's classes keep it."""

    provider_specific_fields: Any = Field(default=None, description=ADDED)


class FunctionCall(Answered):
    name: str = Field(max_length=128)
    arguments: str | None
    parsed_arguments: Any = Field(default=None, description=ADDED)


class ToolCall(Answered):
    id: str = Field(max_length=128)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(default=None, description=ADDED)


class CustomCall(Answered):
    name: str = Field(max_length=128)
    input: str


class CustomToolCall(Answered):
    id: str = Field(max_length=128)
    type: Literal["custom"]
    custom: CustomCall
    index: int | None = Field(default=None, description=ADDED)


GivenCall = Annotated[
    Annotated[ToolCall, Tag("ToolCall")] | Annotated[CustomToolCall, Tag("CustomToolCall")],
    by_type(function="ToolCall", custom="CustomToolCall"),
]


class Message(Answered):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    type: Literal["text", "message"] | None = Field(
        default=None, description="Accepted and ignored: lm-eval writes text."
    )
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: Annotated[list[GivenCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=128)
    refusal: str | None = None
    annotations: list[Any] | None = Field(
        default=None, description="Accepted and ignored: answers carry it, and are sent back."
    )
    reasoning_content: str | None = Field(default=None, description="Given to the chat template.")
    # Of litellm: what it has in reasoning_content too, in other APIs' shapes.
    thinking_blocks: list[Any] | None = Field(default=None, description=ADDED)
    reasoning_items: list[Any] | None = Field(default=None, description=ADDED)
    parsed: Any = Field(default=None, description=ADDED)
    audio: None = None
    function_call: None = None


class FunctionSpec(Strict):
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionSpec


class GrammarInput(Strict):
    """A custom tool's input has a grammar, of which the model is told."""

    type: Literal["grammar"]
    grammar: InputGrammar


InputFormat = Annotated[
    Annotated[TextInput, Tag("TextInput")] | Annotated[GrammarInput, Tag("GrammarInput")],
    by_type(text="TextInput", grammar="GrammarInput"),
]


class CustomSpec(Strict):
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(Strict):
    """A tool whose input is text."""

    type: Literal["custom"]
    custom: CustomSpec


GivenTool = Annotated[
    Annotated[Tool, Tag("Tool")] | Annotated[CustomTool, Tag("CustomTool")],
    by_type(function="Tool", custom="CustomTool"),
]


class NamedFunction(Strict):
    name: str = Field(max_length=128)


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomTool(Strict):
    type: Literal["custom"]
    custom: NamedFunction


GivenName = Annotated[
    Annotated[NamedTool, Tag("NamedTool")] | Annotated[NamedCustomTool, Tag("NamedCustomTool")],
    by_type(function="NamedTool", custom="NamedCustomTool"),
]


class AllowedToolSet(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[GivenName], Field(fail_fast=True, min_length=1)]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


class ChatRequest(SamplingFields):
    model: str
    messages: Annotated[list[Message], Field(fail_fast=True), Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Older name of max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Default: whatever the context leaves."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[list[GivenTool], Field(fail_fast=True)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="Refused where the chat template has no switch for it."
    )
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = Field(
        default=None, description="Accepted and ignored: a hint."
    )

    audio: None = None
    functions: None = None
    function_call: None = None
    moderation: None = None
    verbosity: None = None
    web_search_options: None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ContentLogprob]
    refusal: None = None


class AnswerFunction(BaseModel):
    name: str
    arguments: str


class AnswerCall(BaseModel):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerInput(BaseModel):
    name: str
    input: str


class AnswerCustomCall(BaseModel):
    id: str
    type: Literal["custom"]
    custom: AnswerInput


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    annotations: list[dict[str, Any]] = Field(default_factory=list, max_length=0)
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall | AnswerCustomCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
