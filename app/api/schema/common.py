"""Parameters that several endpoints share, with their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator

MAX_INT64 = 2**63 - 1
ADDED: Final = "Accepted and ignored: clients add it to answers, which are sent back."
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateVariables = Annotated[
    dict[str, Any] | None, Field(description="Variables for the chat template (extension).")
]


def _plain(name: str) -> str:
    """Slashes are fine: /v1/models/{id} takes them."""
    if not name.isprintable() or name != name.strip():
        raise ValueError("write printable characters, and no white space at either end")
    return name


# By which requests name an adapter as their model.
ServedName = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_plain)]


class Strict(BaseModel):
    """Types are not coerced, unknown parameters are refused, NaN and Infinity too."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SentBack(Strict):
    """Of the conversation so far: an answer comes back with a null for all that the client's own
    type of it, which may be newer, has besides."""

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: object) -> object:
        if not isinstance(given, dict) or None not in given.values():
            return given
        known = cls.model_fields
        return {name: value for name, value in given.items() if value is not None or name in known}


class UnreadMedium(Strict):
    """What a tool has read beside text: the model is told of it, as its agent could not go on with
    a conversation that is refused ever after."""

    model_config = ConfigDict(extra="ignore")
    type: str

    @property
    def text(self) -> str:
        return f"[{self.type.removeprefix('input_')} left out: the model takes text only]\n"


def by_type(**members: str) -> Discriminator:
    """Tells which member of a union is meant: type -> tag. The first where no type is given.

    The tags are the members' class names, which no parameter has.
    """
    first = next(iter(members.values()))

    def member(given: object) -> str | None:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return members.get(kind) if isinstance(kind, str) else first

    *others, last = (f"'{kind}'" for kind in members)
    message = f"Input should be {', '.join(others)} or {last}"
    return Discriminator(member, custom_error_type="item_type", custom_error_message=message)


class TextInput(Strict):
    """A custom tool's input is any text."""

    type: Literal["text"]


class InputGrammar(Strict):
    syntax: Literal["lark", "regex"]
    definition: str


class StreamOptions(Strict):
    """Reports that a stream sends besides its tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        default=False,
        description="With include_usage: the usage so far in each event of completions and chats "
        "(extension, as in vLLM).",
    )
    include_timing: bool = Field(
        default=False,
        description="In the last event, `timing`: queue_ms, ttft_ms, max_tbt_ms, objective_kept "
        "(extension).",
    )
    include_obfuscation: bool = Field(default=False, description="Accepted and ignored.")


class Slo(Strict):
    """Latency asked of this one request (extension)."""

    tbt_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    ttft_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None


class JsonSchemaSpec(Strict):
    name: str = Field(default="schema", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`text`, `json_object` and `json_schema` as in OpenAI; the others are extensions."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchemaSpec | None = None
    pattern: str | None = Field(default=None, description="For type regex.")
    grammar: str | None = Field(
        default=None, description="For type grammar: GBNF with a rule `root`."
    )
    choices: list[str] | None = Field(default=None, description="For type choice.")


class StructuredOutputs(Strict):
    """What the output must be, as in vLLM (extension)."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="A schema.")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = Field(default=None, description="GBNF with a rule `root`.")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.json_, self.regex, self.choice, self.grammar).count(None) != 3:
            raise ValueError("give exactly one of json, regex, choice and grammar")
        return self


class ScheduleFields(Strict):
    """A request's priority and objectives (extensions, except `user`)."""

    user: str | None = Field(default=None, max_length=256, description="Tenant, for fair sharing.")
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = Field(
        default=None, description="Higher goes first (extension)."
    )
    slo: Slo | None = None


# Sampling where neither the request nor the model's folder says, as in OpenAI; the rest is off.
DEFAULTS: Mapping[str, float] = MappingProxyType(
    {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
)


class PromptCacheOptions(Strict):
    """Accepted and ignored: prefixes are cached anyway."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None
    prewarm: Literal[False] | None = Field(default=None, description="true: refused.")


class SamplingFields(ScheduleFields):
    """How tokens are drawn and when to stop."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = Field(
        default=None, description="0 and -1: off (extension)."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Extension."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = Field(
        default=None, description="Extension."
    )
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] | None = (
        Field(default=None, description="Extension.")
    )
    ignore_eos: bool | None = Field(default=None, description="Extension.")
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Extension.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = Field(default=None, description="Extension.")

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(default=None, description="Extension.")
    guided_json: dict[str, Any] | str | None = Field(default=None, description="Extension.")
    guided_regex: str | None = Field(default=None, description="Extension.")
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        default=None, description="Extension."
    )
    guided_grammar: str | None = Field(default=None, description="Extension.")

    # OpenAI's bookkeeping: accepted, without effect on the answer.
    metadata: dict[str, str] | None = Field(default=None, description="Accepted and ignored.")
    store: bool | None = Field(default=None, description="Accepted and ignored: nothing is stored.")
    service_tier: str | None = Field(default=None, description="Accepted and ignored.")
    safety_identifier: str | None = Field(default=None, description="Accepted and ignored.")
    prompt_cache_key: str | None = Field(
        default=None,
        max_length=256,
        description="Accepted and ignored: prefixes are cached anyway.",
    )
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = Field(default=None, description="Accepted and ignored.")


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
