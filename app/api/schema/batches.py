"""Files and batches: requests and answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.api.schema.common import Strict

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class FileObject(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: None
    status_details: None


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchRequest(Strict):
    input_file_id: Annotated[str, Field(max_length=128)] = Field(
        description="A file of purpose batch: one request a line."
    )
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
    ] = Field(description="Which all of its requests name.")
    completion_window: Literal["24h"] = Field(description="What is left by then has expired.")
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: None = Field(
        default=None, description="Refused: files are kept until they are deleted."
    )


class BatchProblem(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(BaseModel):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(BaseModel):
    total: int
    completed: int = Field(description="Answered with status 200.")
    failed: int


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class BatchUsageObject(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None = Field(description="What was wrong with the input.")
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = Field(description="Answers with status 200.")
    error_file_id: str | None = Field(description="All others.")
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsageObject = Field(description="Of the answers with status 200 so far.")
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
