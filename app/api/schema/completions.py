"""`/v1/completions`: request and answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from app.api.schema.common import SamplingFields, Usage

Token = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[Token], Field(fail_fast=True)]


def _none_if_empty(suffix: object) -> object:
    return None if suffix == "" else suffix


class CompletionRequest(SamplingFields):
    model: str
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Default 16, as in OpenAI."
    )
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[None, BeforeValidator(_none_if_empty)] = Field(
        default=None, description="Refused unless empty: no model here fills in the middle."
    )


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
