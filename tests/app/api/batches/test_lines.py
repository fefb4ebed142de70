"""Lines of an input, read in blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.api.batches.lines import MAX_ID_CHARS, LineError, numbered_lines, parse_line

URLS = ("/v1/completions", "/v1/embeddings")
GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x"},
}


def test_a_line_is_a_request() -> None:
    line = parse_line(json.dumps(GOOD), URLS)
    assert (line.custom_id, line.url, line.body) == ("a", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"custom_id": 3}, "custom_id", "missing_required_parameter"),
        ({"custom_id": "x" * (MAX_ID_CHARS + 1)}, "custom_id", "invalid_value"),
        ({"method": "GET"}, "method", "invalid_method"),
        ({"url": "/v1/responses"}, "url", "invalid_url"),
        ({"url": ["/v1/completions"]}, "url", "invalid_url"),
        ({"body": None}, "body", "missing_required_parameter"),
        ({"body": {"stream": True}}, "body.stream", "invalid_value"),
    ],
)
def test_a_wrong_line_is_refused_by_name(change: Any, param: str, code: str) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(json.dumps({**GOOD, **change}), URLS)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '"\xff"', b'"\xff"', "1" * 5000])
def test_what_is_no_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(text, URLS)
    assert caught.value.code == "invalid_json_line"


async def test_lines_are_numbered_with_the_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n\n  \r\nbb\nccc")
    assert [line async for line in numbered_lines(path, 3)] == [(1, b"a"), (4, b"bb"), (5, b"ccc")]
    path.write_bytes(b"a\nbb\nccc\ndd\n")
    assert [len(text) async for _, text in numbered_lines(path, 2)] == [1, 2, 3]  # the last
    path.write_bytes(b"x" * 10_000 + b"\nb\n")
    assert [(n, len(text)) async for n, text in numbered_lines(path, 100)] == [(1, 102)]
    path.write_bytes(b"y" * 99_999 + b"\n")
    path.write_bytes(path.read_bytes() * 7)
    assert [n async for n, _ in numbered_lines(path, 100_000)] == list(range(1, 8))
