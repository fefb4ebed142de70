"""Builds the HTTP application from an engine, a text processor and options."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from app.api.context import Context
from app.api.endpoints.adapters import AdapterChanges
from app.api.endpoints.batches import BatchCalls, BatchesOf, no_batches
from app.api.endpoints.cache import PrefixCacheReset
from app.api.endpoints.chat import Chat
from app.api.endpoints.completions import Completions
from app.api.endpoints.embeddings import Embeddings
from app.api.endpoints.files import Files
from app.api.endpoints.messages import Messages
from app.api.endpoints.probes import Probes
from app.api.endpoints.quote import Quotes
from app.api.endpoints.responses import Responses
from app.api.endpoints.tokens import Tokens
from app.api.http.anthropic import PREFIX, AnthropicAdapter
from app.api.http.audit import Audit
from app.api.http.call import Call
from app.api.http.connections import StalledClients
from app.api.http.errors import ApiError, from_engine
from app.api.http.guard import Endpoint, Guard, Ingress, PageFile
from app.api.http.keys import KeyRing
from app.api.http.turns import Turns
from app.api.schema.openapi import document
from app.paths import version

_log = logging.getLogger("legato.api")


def build_api(
    context: Context,
    extra_routes: Sequence[BaseRoute] = (),
    batches: BatchesOf = no_batches,
) -> ASGIApp:
    """The application served by every replica.

    context: of the first model. extra_routes: further routes (metrics, console), with the
    same guard. batches: asked for them with every request to them.
    """
    options = context.options
    turns = Turns()
    probes = Probes(context)
    tokens = Tokens(context)
    messages = Messages(context)
    adapters = AdapterChanges(context)
    files = Files(batches)
    batch = BatchCalls(batches)

    def route(path: str, handler: Callable[[Call], Awaitable[None]], method: str) -> Route:
        endpoint = Endpoint(handler, options, _log, turns if method == "POST" else None)
        return Route(path, endpoint, methods=[method])

    routes: list[BaseRoute] = [
        route("/health", probes.health, "GET"),
        route("/live", probes.live, "GET"),
        route("/version", probes.version, "GET"),
        route("/v1/models", probes.models, "GET"),
        route("/v1/models/{model:path}", probes.model, "GET"),
        route("/v1/completions", Completions(context), "POST"),
        route("/v1/chat/completions", Chat(context), "POST"),
        route("/v1/responses", Responses(context), "POST"),
        route("/v1/messages", messages.create, "POST"),
        route("/v1/messages/count_tokens", messages.count_tokens, "POST"),
        route("/v1/embeddings", Embeddings(context), "POST"),
        route("/v1/slo/quote", Quotes(context), "POST"),
        route("/v1/load_lora_adapter", adapters.load, "POST"),
        route("/v1/unload_lora_adapter", adapters.unload, "POST"),
        route("/reset_prefix_cache", PrefixCacheReset(context), "POST"),
        route("/v1/files", files.create, "POST"),
        route("/v1/files", files.list, "GET"),
        route("/v1/files/{file_id}", files.retrieve, "GET"),
        route("/v1/files/{file_id}", files.delete, "DELETE"),
        route("/v1/files/{file_id}/content", files.content, "GET"),
        route("/v1/batches", batch.create, "POST"),
        route("/v1/batches", batch.list, "GET"),
        route("/v1/batches/{batch_id}", batch.retrieve, "GET"),
        route("/v1/batches/{batch_id}/cancel", batch.cancel, "POST"),
        route("/tokenize", tokens.tokenize, "POST"),
        route("/detokenize", tokens.detokenize, "POST"),
        route("/tokenizer_info", tokens.info, "GET"),
        route("/openapi.json", _document(context), "GET"),
        *extra_routes,
    ]
    keys = KeyRing(options.api_keys) if options.api_keys else None
    audit, errors = Audit(), context.running.errors
    page_files = frozenset(one.path for one in extra_routes if isinstance(one, PageFile))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, options, keys, audit, errors, page_files)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _crash},
    )
    app.router.redirect_slashes = False
    stalled = StalledClients(options.send_timeout_s)
    return Ingress(app, stalled, {PREFIX: AnthropicAdapter(app)})


def _document(context: Context) -> Callable[[Call], Awaitable[None]]:
    """The handler of /openapi.json."""

    async def handler(call: Call) -> None:
        name, with_keys = context.engine.card.name, bool(context.options.api_keys)
        prefix = str(call.scope.get("root_path", ""))
        await call.reply(200, _document_text(name, with_keys, prefix))

    return handler


@cache
def _document_text(model: str, with_keys: bool, prefix: str) -> bytes:
    """prefix: of Serve's, below which the paths are; "" is the whole address."""
    told = document(version(), model, with_keys=with_keys)
    return json.dumps(told | ({"servers": [{"url": prefix}]} if prefix else {})).encode()


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such path, wrong method) as OpenAI error objects."""
    if not isinstance(error, HTTPException):
        raise error
    path, query = request.scope["path"], request.url.query
    if error.status_code == 404 and path and path == request.scope.get("root_path"):
        # The address that Serve tells of: the page's files and calls are relative to /prefix/.
        return RedirectResponse(f"{path}/?{query}" if query else f"{path}/")
    found, root = request.url.path[:200], request.scope.get("root_path", "")
    messages = {
        404: f"There is nothing at {found}. GET {root}/openapi.json lists what there is.",
        405: f"{request.method} is not allowed here.",
    }
    message = messages.get(error.status_code, error.detail)
    return _response(request, ApiError(error.status_code, message, headers=error.headers or {}))


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _response(request, error)


async def _crash(request: Request, error: Exception) -> Response:
    return _response(request, from_engine(error))


def _response(request: Request, error: ApiError) -> Response:
    request.state.error = error.counted
    return Response(error.body(), error.status, error.all_headers(), "application/json")
