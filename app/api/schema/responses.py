"""`/v1/responses`: request and answer (text and tool calls)."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from app.api.schema.common import (
    ADDED,
    ReasoningEffort,
    SamplingFields,
    SentBack,
    Strict,
    TemplateVariables,
    UnreadMedium,
)
from app.api.schema.response_tools import (
    MAX_NAME_CHARS,
    AllowedFunctionTools,
    GivenTool,
    IgnoredObject,
    NamedFunctionTool,
    check_length,
)

_ENCRYPTED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"


class InputText(SentBack):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(default=None, description="Accepted and ignored.")
    logprobs: list[Any] | None = Field(default=None, description="Accepted and ignored.")
    parsed: Any = Field(default=None, description=ADDED)
    prompt_cache_breakpoint: IgnoredObject = None


class InputMessage(SentBack):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(fail_fast=True)]
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description=ADDED)
    id: str | None = None
    status: str | None = None


class _Call(SentBack):
    call_id: str = Field(max_length=128)
    name: str = Field(max_length=MAX_NAME_CHARS)
    namespace: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    caller: IgnoredObject = None
    id: str | None = None
    status: str | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        check_length(self.namespace, self.name)
        return self


class InputCall(_Call):
    type: Literal["function_call"]
    arguments: str
    parsed_arguments: Any = Field(default=None, description=ADDED)


class InputCustomCall(_Call):
    type: Literal["custom_tool_call"]
    input: str


class UnreadPart(UnreadMedium):
    type: Literal["input_image", "input_file"]


OutputPart = Annotated[InputText | UnreadPart, Field(discriminator="type")]


class InputCallOutput(SentBack):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(max_length=128)
    output: str | Annotated[list[OutputPart], Field(fail_fast=True)]
    name: str | None = Field(default=None, description=ADDED)
    namespace: str | None = Field(default=None, description=ADDED)
    caller: IgnoredObject = None
    id: str | None = None
    status: str | None = None


class ReasoningText(SentBack):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(SentBack):
    """Reasoning of an earlier answer, passed to the chat template."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: list[Any] | None = Field(default=None, description="Accepted and ignored.")
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = Field(
        default=None, description="Accepted and ignored: its own server alone can read it."
    )


class ReasoningSettings(Strict):
    effort: ReasoningEffort | None = Field(
        default=None, description="Refused where the chat template has no switch for it."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Accepted and ignored: reasoning is shown whole."
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        default=None, description="Accepted and ignored: the chat template chooses."
    )
    mode: Literal["standard"] | None = None
    generate_summary: None = None


def _kind(item: object) -> object:
    """A message may leave out its type."""
    return item.get("type", "message") if isinstance(item, dict) else "message"


# By their type, so that an error is of the kind that is meant.
InputItem = Annotated[
    Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputCallOutput, Tag("custom_tool_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputMessage, Tag("message")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="Input should be 'message', 'function_call', 'custom_tool_call', "
        "'function_call_output', 'custom_tool_call_output' or 'reasoning'",
    ),
]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Strict):
    format: TextFormat | None = None
    verbosity: None = None


def _known(included: object) -> object:
    known = (_ENCRYPTED, _LOGPROBS)
    if isinstance(included, list) and any(one not in known for one in included):
        raise ValueError(f"this server can include {_LOGPROBS} alone")
    return included


class ResponseRequest(SamplingFields):
    model: str
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    tools: Annotated[list[GivenTool], Field(fail_fast=True)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: TemplateVariables = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: a conversation that is too long loses its oldest turns."
    )
    background: Literal[False] | None = None
    include: Annotated[list[str], BeforeValidator(_known)] | None = Field(
        default=None, description=f"{_ENCRYPTED} is accepted and ignored: reasoning is text."
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description=f"Alternatives to each token; asks for {_LOGPROBS}, too."
    )
    client_metadata: IgnoredObject = None
    access_programs: IgnoredObject = None

    n: None = None
    response_format: None = None
    previous_response_id: None = Field(default=None, description="Refused: nothing is stored.")
    conversation: None = Field(default=None, description="Refused: nothing is stored.")
    prompt: None = None
    max_tool_calls: None = None
    context_management: None = None

    @property
    def num_alternatives(self) -> int | None:
        """To each token, with its log-probability; None: these are not asked for."""
        is_included = _LOGPROBS in (self.include or ())
        return self.top_logprobs or (0 if is_included else None)


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = Field(description="0: no prompt costs more for being cached.")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
