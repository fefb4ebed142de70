"""`/v1/messages`: Anthropic's form of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.api.schema.common import (
    MAX_INT64,
    ScheduleFields,
    SentBack,
    Strict,
    TemplateVariables,
    UnreadMedium,
)


class Block(SentBack):
    """cache_control: accepted and ignored, as prefixes are cached anyway."""

    cache_control: dict[str, Any] | None = Field(default=None, description="Accepted and ignored.")


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(default=None, description="Accepted and ignored.")


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(max_length=128)
    name: str = Field(max_length=128)
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(default=None, description="Accepted and ignored.")
    toolset_name: str | None = Field(default=None, description="Accepted and ignored.")


class ToolReferenceBlock(Block):
    """A tool that a search has found: the model reads its name."""

    type: Literal["tool_reference"]
    tool_name: str = Field(max_length=128)


class UnreadBlock(UnreadMedium):
    type: Literal["image", "document"]


ResultBlock = Annotated[TextBlock | ToolReferenceBlock | UnreadBlock, Field(discriminator="type")]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=128)
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = Field(default=None, description="Told to the model as 'Error: ...'.")
    toolset_name: str | None = Field(default=None, description="Accepted and ignored.")


class ThinkingBlock(SentBack):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Accepted and ignored.")


class RedactedThinkingBlock(SentBack):
    """Of another server's model, and readable there alone: left out."""

    type: Literal["redacted_thinking"]
    data: str


GivenBlock = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class GivenMessage(SentBack):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[GivenBlock], Field(fail_fast=True)]


class GivenTool(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_\-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = Field(default=None, description="Accepted and ignored.")
    strict: bool | None = None
    eager_input_streaming: bool | None = Field(
        default=None, description="Accepted and ignored: arguments are streamed as they come."
    )
    defer_loading: bool | None = Field(
        default=None, description="Accepted and ignored: the model sees every tool."
    )
    input_examples: list[Any] | None = Field(default=None, description="Accepted and ignored.")
    allowed_callers: list[str] | None = Field(
        default=None, description="Accepted and ignored: only the model calls."
    )


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=128, description="For type tool.")
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Accepted and ignored: a hint."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="summarized: it is shown whole."
    )


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="A hint: ignored where the chat template has no switch for it."
    )
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = Field(
        default=None, description="Accepted and ignored: a hint."
    )


class ContextEdit(Strict):
    """One that would shorten the prompt: nothing is cleared, and its settings are ignored."""

    model_config = ConfigDict(extra="ignore")
    type: str = Field(pattern=r"^clear_(tool_uses|thinking)_\d+$")


class ContextManagement(Strict):
    edits: Annotated[list[ContextEdit], Field(fail_fast=True)] | None = None


class Metadata(Strict):
    user_id: str | None = Field(
        default=None, max_length=256, description="Tenant, without the session that is part of it."
    )


class Conversation(ScheduleFields):
    """The conversation to answer."""

    model: str
    messages: Annotated[list[GivenMessage], Field(fail_fast=True, min_length=1)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[GivenTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateVariables = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        default=None, description="The earlier name of output_config.format."
    )
    cache_control: dict[str, Any] | None = Field(default=None, description="Accepted and ignored.")
    context_management: ContextManagement | None = Field(
        default=None, description="Accepted and ignored: the prompt stays whole."
    )
    speed: Literal["standard", "fast"] | None = Field(
        default=None, description="Accepted and ignored."
    )
    inference_geo: str | None = Field(default=None, description="Accepted and ignored.")
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class CountTokensRequest(Conversation):
    """The conversation whose tokens are counted."""


class MessagesRequest(Conversation):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    metadata: Metadata | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = Field(
        default=None, description="Extension."
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="Accepted and ignored."
    )
    diagnostics: dict[str, Any] | None = Field(default=None, description="Accepted and ignored.")
    container: None = None
    thread: None = None


class MessagesUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: (
        Literal[
            "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
        ]
        | None
    )
    stop_sequence: str | None
    usage: MessagesUsage


class CountTokensResponse(BaseModel):
    input_tokens: int


class MessagesError(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = Field(
        default=None, description="Only where clients do without what is refused."
    )


class MessagesErrorResponse(BaseModel):
    type: Literal["error"]
    error: MessagesError
    request_id: str | None
