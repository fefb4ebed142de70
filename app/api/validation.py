"""Bytes of a body to a checked schema object, or one clear complaint that names the parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from app.api.errors import ApiError, invalid

_Model = TypeVar("_Model", bound=BaseModel)

_MAX_TOP_LEVEL_KEYS: Final = 128
_SCAN_BYTES: Final = 1 << 16
_TOKENS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def parse_body(model: type[_Model], body: bytes) -> _Model:
    """Parse JSON (depth at most 200, UTF-8) and validate it; raises ApiError 400.

    NaN and Infinity are read, to be refused where they stand, by name.
    """
    try:
        content = from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise _unreadable(body, str(error)) from None
    if not isinstance(content, dict):
        raise invalid("The body must be a JSON object.")
    if len(content) > _MAX_TOP_LEVEL_KEYS:
        known = model.model_fields.keys()
        stranger = next(key for key in content if key not in known)
        raise invalid(f"Unknown parameter: '{_brief(stranger)}'.", _brief(stranger))
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _complaint(error, content) from None


def _unreadable(body: bytes, reason: str) -> ApiError:
    param = _deep_parameter(body) if "recursion" in reason else None
    where = f" in '{param}'" if param else ""
    return invalid(f"The body is not readable JSON{where}: {reason}.", param, "invalid_json")


def _deep_parameter(body: bytes) -> str | None:
    """The top-level key whose value is nested too deeply (the scan itself is bounded)."""
    depth = 0
    key: bytes | None = None
    for found in _TOKENS.finditer(body[:_SCAN_BYTES]):
        token = found.group()
        if token in (b"{", b"["):
            depth += 1
            if depth > 100:
                break
        elif token in (b"}", b"]"):
            depth -= 1
        elif depth == 1:
            key = token[1:-1]
    return None if key is None else key[:64].decode("utf-8", "replace")


def _complaint(error: ValidationError, content: Any) -> ApiError:
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    kind, message = str(first["type"]), str(first["msg"])
    param = _path(first["loc"], content, is_missing=kind == "missing")
    if kind == "extra_forbidden":
        return invalid(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    if kind == "none_required":
        return invalid(
            f"'{param}' is not supported by this server.", param, "unsupported_parameter"
        )
    if kind == "missing":
        return invalid(f"Missing required parameter: '{param}'.", param, "missing_parameter")
    if kind == "value_error":
        message = _own_message(first.get("ctx", {}), message)
    return invalid(f"Invalid '{param}': {message}.".replace("..", "."), param, "invalid_value")


def _own_message(context: Mapping[str, Any], message: str) -> str:
    return str(context.get("error", message))


def _path(location: Sequence[Any], content: Any, *, is_missing: bool) -> str:
    """`messages.2.content` as the client wrote it: names of union branches are left out."""
    parts: list[str] = []
    for part in location:
        if not _holds(content, part):
            continue
        content = content[part]
        parts.append(_brief(part))
    if is_missing:
        parts.append(_brief(location[-1]))
    return ".".join(parts) or "body"


def _holds(content: Any, part: Any) -> bool:
    if isinstance(content, dict):
        return part in content
    return isinstance(content, list) and isinstance(part, int) and part < len(content)


def _brief(part: Any) -> str:
    text = str(part)
    return text if len(text) <= 64 else text[:61] + "..."
