"""The lines of a batch's input, in OpenAI's form: one request each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

MAX_ID_CHARS: Final = 512
_BLOCK_BYTES: Final = 1 << 18  # read at a time


@dataclass(frozen=True, slots=True)
class Line:
    """One request."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


class LineError(ValueError):
    """A line that is no request. param: the key at fault, None if there are no keys to name."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message if param is None else f"{param}: {message}")
        self.param = param
        self.code = code


def parse_line(text: str | bytes, urls: Collection[str]) -> Line:
    """Read one line. urls: those it may name."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}", code="invalid_json_line") from None
    if not isinstance(found, dict):
        raise LineError("not an object", code="invalid_json_line")
    custom_id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("a text is wanted", "custom_id", "missing_required_parameter")
    if len(custom_id) > MAX_ID_CHARS:
        raise LineError(f"longer than {MAX_ID_CHARS} characters", "custom_id")
    if found.get("method", "POST") != "POST":
        raise LineError("only POST is known", "method", "invalid_method")
    if not isinstance(url, str) or url not in urls:
        shown = json.dumps(url)[:100]
        raise LineError(f"{shown} is none of {', '.join(urls)}", "url", "invalid_url")
    if not isinstance(body, dict):
        raise LineError("an object is wanted", "body", "missing_required_parameter")
    if body.get("stream"):
        raise LineError("a batch is not streamed", "body.stream")
    return Line(custom_id, url, body)


async def numbered_lines(
    path: Path, max_line_bytes: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """(number from 1, text) of every line that is not blank, read beside the event loop.

    A longer line comes cut, still longer than that, and is the last.
    """
    number = 0
    with path.open("rb") as file:
        while texts := await asyncio.to_thread(_next_lines, file, max_line_bytes):
            for text in texts:
                number += 1
                if text.strip():
                    yield number, text
                if len(text) > max_line_bytes:
                    return


def _next_lines(file: BinaryIO, max_line_bytes: int) -> list[bytes]:
    """The next block of lines, without their ends; empty at the file's end."""
    texts: list[bytes] = []
    num_bytes = 0
    while num_bytes < _BLOCK_BYTES:
        text = file.readline(max_line_bytes + 2)
        if not text:
            break
        num_bytes += len(text)
        texts.append(text.removesuffix(b"\n"))
        if len(texts[-1]) > max_line_bytes:
            break
    return texts
