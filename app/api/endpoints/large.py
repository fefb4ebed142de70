"""Writes large answers in parts, so that other streams of the process are not delayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

_SLICE: Final = 4000  # values written in one turn of the event loop


def whole(content: Mapping[str, Any], /, **written: Iterable[bytes]) -> Iterator[bytes]:
    """JSON of an object, some of whose members are already written."""
    yield json.dumps(content, allow_nan=False)[:-1].encode()
    for key, parts in written.items():
        yield f', "{key}": '.encode()
        yield from parts
    yield b"}"


def listed_wholes(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """JSON of a list whose items are already written."""
    opening = b"["
    for item in items:
        yield opening
        yield from item
        opening = b", "
    yield b"]" if opening != b"[" else b"[]"


async def listed(
    values: Sequence[Any], shown: Callable[[Any], Any] | None = None, per_slice: int = _SLICE
) -> list[bytes]:
    """JSON of a long list, written in several turns of the event loop. shown: maps each value."""
    parts = [b"["]
    for start in range(0, len(values), per_slice):
        part = values[start : start + per_slice]
        text = json.dumps(list(part) if shown is None else [shown(value) for value in part])
        parts.append((", " if start else "").encode() + text[1:-1].encode())
        await asyncio.sleep(0)
    parts.append(b"]")
    return parts
