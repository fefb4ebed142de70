"""`/openapi.json`, made from the schemas that requests are checked with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from app.api.schema.batches import (
    BatchList,
    BatchObject,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
)
from app.api.schema.chat import ChatRequest, ChatResponse
from app.api.schema.completions import CompletionRequest, CompletionResponse
from app.api.schema.messages import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesErrorResponse,
    MessagesRequest,
    MessagesResponse,
)
from app.api.schema.other import (
    DetokenizeRequest,
    DetokenizeResponse,
    Document,
    EmbeddingRequest,
    EmbeddingResponse,
    ErrorResponse,
    LoadAdapterRequest,
    Model,
    ModelList,
    PrefixCacheResetResponse,
    SloQuoteRequest,
    SloQuoteResponse,
    Status,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    UnloadAdapterRequest,
    UnloadAdapterResponse,
    Version,
)
from app.api.schema.responses import ResponseObject, ResponseRequest

_REASONS: Final[Mapping[int, str]] = {
    400: "The request is wrong; `param` names the parameter.",
    401: "No valid API key.",
    403: "The browser origin or host name is not allowed.",
    404: "No such model, file, batch or path.",
    405: "No such method on this path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as what is wanted: JSON, or a form.",
    429: "Too much load, or a key's limit is reached: see Retry-After.",
    431: "The headers are too large.",
    500: "The generation failed.",
    503: "The engine is not ready: see Retry-After.",
}
_ALWAYS: Final = (401, 403, 404, 405, 429, 431, 500)
_WITH_BODY: Final = (400, 408, 413, 415)
_FORM: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
    "required": ["purpose", "file"],
    "additionalProperties": False,
}
_References = Mapping[tuple[Any, JsonSchemaMode], Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One documented route. is_form: it takes an upload. gives_file: it answers with one."""

    path: str
    method: Literal["get", "post", "delete"]
    summary: str
    answer: type[BaseModel]
    request: type[BaseModel] | None = None
    streams: bool = False
    path_parameter: str | None = None
    query: tuple[str, ...] = ()
    is_form: bool = False
    gives_file: bool = False
    may_be_refused: bool = False  # with 400, though it has no body
    may_be_unavailable: bool = True
    error: type[BaseModel] = ErrorResponse


FILES: Final = tuple(
    replace(operation, may_be_refused=True)
    for operation in (
        Operation("/v1/files", "post", "Keep a file.", FileObject, is_form=True),
        Operation(
            "/v1/files", "get", "The files.", FileList, query=("after", "limit", "order", "purpose")
        ),
        Operation("/v1/files/{file_id}", "get", "One file.", FileObject, path_parameter="file_id"),
        Operation(
            "/v1/files/{file_id}", "delete", "Delete it.", FileDeleted, path_parameter="file_id"
        ),
        Operation(
            "/v1/files/{file_id}/content",
            "get",
            "What it holds.",
            FileObject,
            path_parameter="file_id",
            gives_file=True,
        ),
    )
)
BATCHES: Final = tuple(
    replace(operation, may_be_refused=True)
    for operation in (
        Operation("/v1/batches", "post", "Begin a batch.", BatchObject, BatchRequest),
        Operation("/v1/batches", "get", "The batches.", BatchList, query=("after", "limit")),
        Operation(
            "/v1/batches/{batch_id}", "get", "One batch.", BatchObject, path_parameter="batch_id"
        ),
        Operation(
            "/v1/batches/{batch_id}/cancel",
            "post",
            "End a batch early.",
            BatchObject,
            path_parameter="batch_id",
        ),
    )
)
OPERATIONS: Final = (
    Operation(
        "/v1/completions",
        "post",
        "Continue a prompt.",
        CompletionResponse,
        CompletionRequest,
        streams=True,
    ),
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a conversation.",
        ChatResponse,
        ChatRequest,
        streams=True,
    ),
    Operation(
        "/v1/responses",
        "post",
        "Answer an input (text and tool calls).",
        ResponseObject,
        ResponseRequest,
        streams=True,
    ),
    Operation(
        "/v1/messages",
        "post",
        "Answer a conversation, in Anthropic's form.",
        MessagesResponse,
        MessagesRequest,
        streams=True,
        error=MessagesErrorResponse,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "How many tokens a conversation has.",
        CountTokensResponse,
        CountTokensRequest,
        error=MessagesErrorResponse,
    ),
    Operation("/v1/embeddings", "post", "Vectors of texts.", EmbeddingResponse, EmbeddingRequest),
    Operation("/tokenize", "post", "Token ids of a text.", TokenizeResponse, TokenizeRequest),
    Operation("/detokenize", "post", "Text of token ids.", DetokenizeResponse, DetokenizeRequest),
    Operation("/tokenizer_info", "get", "Chat template and special tokens.", TokenizerInfo),
    Operation(
        "/v1/slo/quote",
        "post",
        "Whether and when tokens could be served under an objective.",
        SloQuoteResponse,
        SloQuoteRequest,
    ),
    Operation("/v1/models", "get", "The models served here.", ModelList),
    Operation("/v1/models/{model}", "get", "One model.", Model, path_parameter="model"),
    *FILES,
    *BATCHES,
    Operation("/v1/load_lora_adapter", "post", "Load an adapter.", Model, LoadAdapterRequest),
    Operation(
        "/v1/unload_lora_adapter",
        "post",
        "Unload an adapter.",
        UnloadAdapterResponse,
        UnloadAdapterRequest,
    ),
    Operation(
        "/reset_prefix_cache",
        "post",
        "Forget all cached KV.",
        PrefixCacheResetResponse,
        query=("model",),
    ),
    Operation("/health", "get", "Whether tokens can be generated.", Status),
    Operation("/live", "get", "Whether the process answers.", Status, may_be_unavailable=False),
    Operation("/version", "get", "Legato's version.", Version, may_be_unavailable=False),
    Operation("/openapi.json", "get", "This document.", Document, may_be_unavailable=False),
)


def document(version: str, model: str, *, with_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. model: the served one's name. with_keys: requests need a key."""
    requests = [operation.request for operation in OPERATIONS if operation.request is not None]
    answers: list[type[BaseModel]] = [operation.answer for operation in OPERATIONS]
    answers += [ErrorResponse, MessagesErrorResponse]
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = []
    models += [(model, "validation") for model in requests]
    models += [(model, "serialization") for model in answers]
    references, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    for request in requests:
        own = schemas["$defs"][request.__name__]
        if "model" not in own["properties"]:
            continue
        names = [model] if "model" in own.get("required", ()) else [model, None]
        own["properties"]["model"] = {"title": "Model", "enum": names}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, references)
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Legato", "version": version},
        "paths": paths,
        "components": components,
    }
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(operation: Operation, references: _References) -> dict[str, Any]:
    content: dict[str, Any] = {
        "application/json": {"schema": references[operation.answer, "serialization"]}
    }
    if operation.gives_file:
        content = {"application/octet-stream": {}}
    if operation.streams:
        # No type: tools disagree on whether it is the whole text's or an event's.
        content["text/event-stream"] = {"schema": {"title": "Server-sent events"}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    statuses = {*_ALWAYS, *(_WITH_BODY if operation.request or operation.is_form else ())}
    if operation.may_be_refused:
        statuses.add(400)
    if operation.may_be_unavailable:
        statuses.add(503)
    for status in sorted(statuses):
        responses[str(status)] = _error(status, references[operation.error, "serialization"])
    found: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.replace("/", "_").strip("_"),
        "responses": responses,
    }
    if operation.request is not None:
        body = {"application/json": {"schema": references[operation.request, "validation"]}}
        found["requestBody"] = {"required": True, "content": body}
    if operation.is_form:
        form = {"multipart/form-data": {"schema": _FORM}}
        found["requestBody"] = {"required": True, "content": form}
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in operation.query
    ]
    if operation.path_parameter is not None:
        parameters.append(
            {
                "name": operation.path_parameter,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        )
    if parameters:
        found["parameters"] = parameters
    return found


def _error(status: int, schema: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _REASONS[status],
        "content": {"application/json": {"schema": schema}},
    }
    if status in (429, 503):
        found["headers"] = {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}
        }
    return found
