"""Errors of request bodies: one clear message that names the parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import NoneType
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from app.api.http.errors import ApiError, invalid, unknown_parameter

_MAX_DEPTH: Final = 199  # the parser's own limit
_MAX_SCANNED: Final = 100_000
_MAX_COMPARED: Final = 1000  # errors of one body: each takes microseconds, and a body may have many
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_TOKEN: Final = re.compile(_STRING.pattern + rb"|[\[\]{}:]", re.DOTALL)
_MEDIUM: Final = re.compile("image|audio|video|document|file")
# The parser's words for what is wrong within a string
_IN_STRING: Final = re.compile(r"(?:escape|code point) at line (\d+) column (\d+)$")


def check_size(body: bytes, max_nodes: int) -> None:
    """Raises ApiError 400 if a body holds more than `max_nodes` objects, lists and members."""
    bare = _STRING.sub(b"", body)
    if bare.count(b"{") + bare.count(b"[") + bare.count(b":") > max_nodes:
        param = _parameter_at(body, max_nodes=max_nodes)
        where = f" up to '{param}'" if param else ""
        raise invalid(
            f"More than {max_nodes} objects, lists and members{where} (setting "
            "api.max_json_nodes).",
            param,
        )


def unreadable(body: bytes, reason: str) -> ApiError:
    """The error for a body that is not JSON. reason: the parser's message."""
    param = None
    if "recursion" in reason:
        param = _parameter_at(body, max_depth=_MAX_DEPTH)
        reason = f"objects and lists may be nested {_MAX_DEPTH + 1} deep, which no setting changes"
    elif place := _IN_STRING.search(reason):
        line, column = map(int, place.groups())
        before = b"\n".join(body.split(b"\n")[: line - 1])
        param = _parameter_at(body, end=len(before) + column)
    where = f" in '{param}'" if param else ""
    return invalid(f"The body is not readable JSON{where}: {reason}.", param, "invalid_json")


def _parameter_at(
    body: bytes,
    *,
    max_depth: int = _MAX_SCANNED,
    max_nodes: int = _MAX_SCANNED,
    end: float = math.inf,
) -> str | None:
    """The top-level key in whose value a limit is passed (the scan itself is bounded).

    end: where to stop, in bytes."""
    depth = num_nodes = 0
    string = key = b""
    for found in islice(_TOKEN.finditer(body), _MAX_SCANNED):
        if found.start() >= end:
            break
        token = found.group()
        if token in (b"{", b"["):
            depth += 1
            num_nodes += 1
        elif token in (b"}", b"]"):
            depth -= 1
        elif token == b":":
            num_nodes += 1
            if depth == 1:
                key = string
        elif depth == 1:
            string = token[1:-1]
        if depth > max_depth or num_nodes > max_nodes:
            break
    return _brief(key.decode("utf-8", "replace")) if key else None


def complaint(error: ValidationError, content: Any, model: type[BaseModel]) -> ApiError:
    """The error for content that the schema, `model`, rejects."""
    found = error.errors(include_url=False, include_context=True, include_input=False)
    compared = found[:_MAX_COMPARED]
    first = max(compared, key=lambda one: _progress(one, found[0]["loc"], content))
    kind, message = str(first["type"]), str(first["msg"])
    param = _path(first["loc"], content, is_missing=kind == "missing")
    if kind == "extra_forbidden":
        return unknown_parameter(param, _known_names(model, first["loc"]))
    if kind == "none_required":
        return invalid(
            f"'{param}' is not supported by this server.", param, "unsupported_parameter"
        )
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_parameter")
    if kind == "item_type":  # of a union whose member is told by its type
        param += ".type"
    if kind == "model_type":
        message = "Input should be an object"
    if kind == "value_error":
        message = _own_message(first.get("ctx", {}), message)
    if kind in ("literal_error", "union_tag_invalid") and _is_medium(first["loc"], content):
        message += "; the models here take text only"
    return invalid(f"Invalid '{param}': {message}.".replace("..", "."), param, "invalid_value")


def _is_medium(location: Sequence[Any], content: Any) -> bool:
    """Whether a part of a message, or the type of one, is of something else than text."""
    for part in _known_parts(location, content):
        content = content[part]
    kind = content.get("type") if isinstance(content, dict) else content
    return isinstance(kind, str) and _MEDIUM.search(kind) is not None


def _known_names(model: type[BaseModel], location: Sequence[Any]) -> set[str]:
    """Names of the parameters beside the last part of a location, of all branches of a union that
    could be meant; without those that are always refused, as the last part itself is here."""
    models = [model]
    for part in location[:-1]:
        inner = [found for one in models for found in _models_in(_fields(one).get(part))]
        # Other parts are list indices and names of branches.
        models = inner or [one for one in models if one.__name__ == part] or models
    known = {name for one in models for name, kind in _fields(one).items() if kind is not NoneType}
    return known - {location[-1]}


def _fields(model: type[BaseModel]) -> dict[Any, Any]:
    """The types of a model's fields, by the names that clients give."""
    return {f.alias or name: f.annotation for name, f in model.model_fields.items()}


def _models_in(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in get_args(kind):
        yield from _models_in(argument)


def _progress(error: Any, first: Sequence[Any], content: Any) -> tuple[Any, ...]:
    """How far the validator got on this branch of a union: the furthest is what was meant, and of
    equals the one whose type is right."""
    if error["loc"][:1] != first[:1]:
        return ()
    parts = _known_parts(error["loc"], content)
    indices = tuple(part for part in parts if isinstance(part, int))
    return len(parts), indices, not error["type"].endswith("_type")


def _own_message(context: Mapping[str, Any], message: str) -> str:
    return str(context.get("error", message))


def _path(location: Sequence[Any], content: Any, *, is_missing: bool) -> str:
    """`messages.2.content` as the client wrote it."""
    parts = [_brief(part) for part in _known_parts(location, content)]
    if is_missing:
        parts.append(_brief(location[-1]))
    return ".".join(parts) if parts else "body"


def _known_parts(location: Sequence[Any], content: Any) -> list[Any]:
    """A location without the names of union branches, which are nowhere in the content."""
    parts: list[Any] = []
    for part in location:
        if _holds(content, part):
            content = content[part]
            parts.append(part)
    return parts


def _holds(content: Any, part: Any) -> bool:
    if isinstance(content, dict):
        return part in content
    return isinstance(content, list) and isinstance(part, int) and part < len(content)


def _brief(part: Any) -> str:
    text = str(part)
    return text if len(text) <= 64 else text[:61] + "..."
