"""Embeddings, tokens, models and probes: requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.api.schema.chat import GivenTool, Message
from app.api.schema.common import ScheduleFields, ServedName, Slo, Strict
from app.api.schema.completions import TokenIds


class EmbeddingRequest(ScheduleFields):
    model: str
    input: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = Field(default=None, description="Refused: vectors are given whole.")
    pooling: Literal["mean", "last"] | None = Field(
        default=None,
        description="How token states become one vector; default as the model's folder says, else "
        "mean (extension).",
    )
    normalize: bool | None = Field(
        default=None, description="To length 1; default true (extension)."
    )


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    tools: Annotated[list[GivenTool], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = Field(
        default=True, description="For prompt; templates write their own."
    )
    add_generation_prompt: bool = Field(default=True, description="For messages.")
    return_token_strs: bool = False


class TokenizeResponse(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """With special tokens by their roles (`bos_token`, `eos_token`, ...), where it has them."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | dict[str, str] | None = Field(
        description="By name if none is the default."
    )
    model_max_length: int


class SloQuoteRequest(Strict):
    """A quote's request: its size as a number of tokens or as the content to send."""

    model: str | None = None
    prompt_tokens: Annotated[int, Field(ge=1, description="Their number.")] | None = None
    prompt: str | TokenIds | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    tools: Annotated[list[GivenTool], Field(fail_fast=True)] | None = Field(
        default=None, description="With messages."
    )
    max_tokens: Annotated[int, Field(ge=1)]
    slo: Slo | None = Field(default=None, description="Default: the deployment's.")
    user: str | None = Field(default=None, max_length=256, description="Tenant.")
    priority: int = Field(
        default=0,
        ge=-1000,
        le=0,
        description="Below 0: whether half of all objectives would be left to others.",
    )


class Prediction(BaseModel):
    """ttft_ms: expected. ttft_bound_ms, tbt_bound_ms: what decisions are made by."""

    ttft_ms: float
    ttft_bound_ms: float
    tbt_bound_ms: float


class Attainable(BaseModel):
    """Times on an otherwise idle engine, without a cached prompt."""

    ttft_ms: float
    tbt_ms: float


class SloQuoteResponse(BaseModel):
    object: Literal["slo.quote"]
    model: str
    prompt_tokens: int
    max_tokens: int
    can_serve_now: bool | None = Field(
        description="Null: nothing to predict by, no cost model or no engine awake."
    )
    predicted: Prediction | None
    attainable: Attainable | None
    retry_after_s: float | None = Field(description="Null with a reason: waiting does not help.")
    reason: str | None
    param: str | None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_model_len: int
    max_input_tokens: int = Field(description="What Anthropic's clients call the same.")
    supports_embeddings: bool
    parent: str | None = Field(default=None, description="Of an adapter: the model it changes.")


class LoadAdapterRequest(Strict):
    lora_name: ServedName = Field(description="By which requests name it as their model.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A folder of the server, as peft saves it."
    )
    base_model_name: str | None = Field(
        default=None,
        max_length=4096,
        description="The model it changes; required where several have slots for adapters.",
    )


class UnloadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(min_length=1, max_length=128)]


class UnloadAdapterResponse(BaseModel):
    id: str
    num_running: int = Field(description="Requests that run on it still.")


class PrefixCacheResetResponse(BaseModel):
    models: list[str] = Field(description="Of which nothing is cached now.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Status(BaseModel):
    status: Literal["ready", "live"]


class Version(BaseModel):
    version: str


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


class Document(BaseModel):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
