"""The errors that clients get, as OpenAI error objects."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from app.engine_client.client import EngineUnavailable, GenerationFailed, RequestRefused

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# What one API calls otherwise than another.
_SYNONYMS: Final = (
    frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"}),
    frozenset({"stop", "stop_sequences"}),
)


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal with its HTTP status. param: the request parameter at fault, by its path."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error")

    @property
    def counted(self) -> tuple[int, str]:
        """What it is counted by: its status, and its code if it has one, else its kind."""
        return self.status, self.code or self.kind

    def body(self) -> bytes:
        """The JSON error object."""
        return json.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            },
        ).encode()

    def all_headers(self) -> dict[str, str]:
        """Headers that go with it, Retry-After in whole seconds included."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param, code)


def unknown_parameter(param: str, known: Collection[str]) -> ApiError:
    """400: there is no such parameter. param: its path. known: the names it may be meant to be."""
    above, dot, name = param.rpartition(".")
    same = next((names for names in _SYNONYMS if name in names), frozenset[str]())
    close = sorted(same.intersection(known)) or difflib.get_close_matches(name, list(known), n=1)
    hint = f" Did you mean '{above}{dot}{close[0]}'?" if close else ""
    return invalid(f"Unknown parameter: '{param}'.{hint}", param, "unknown_parameter")


def from_engine(error: Exception) -> ApiError:
    """An engine's error, with the status for clients."""
    if isinstance(error, RequestRefused):
        message = _sentence(error, error.param)
        if error.retry_after_s is None:
            return ApiError(400, message, error.param)
        return ApiError(429, message, error.param, "overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineUnavailable):
        return ApiError(
            503, _sentence(error), code="engine_unavailable", retry_after_s=error.retry_after_s
        )
    if isinstance(error, GenerationFailed):
        return ApiError(500, _sentence(error), code="generation_failed")
    return ApiError(500, "The server had an error while processing the request.")


def _sentence(error: Exception, param: str | None = None) -> str:
    """An engine's message as the API's own are written: logs and handles put words before it. It
    may begin with the name of a parameter or a path, which stay as they are."""
    message = str(error)
    first = message.partition(" ")[0]
    if first.isalpha() and first != param:
        message = message[0].upper() + message[1:]
    return message if message.endswith((".", "!", "?")) else f"{message}."
