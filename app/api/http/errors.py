"""The errors that clients get, as OpenAI error objects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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


def from_engine(error: Exception) -> ApiError:
    """An engine's error, with the status for clients."""
    if isinstance(error, RequestRefused):
        if error.retry_after_s is None:
            return ApiError(400, str(error), error.param)
        return ApiError(
            429, str(error), error.param, "overloaded", retry_after_s=error.retry_after_s
        )
    if isinstance(error, EngineUnavailable):
        return ApiError(
            503, str(error), code="engine_unavailable", retry_after_s=error.retry_after_s
        )
    if isinstance(error, GenerationFailed):
        return ApiError(500, str(error), code="generation_failed")
    return ApiError(500, "The server had an error while processing the request.")
