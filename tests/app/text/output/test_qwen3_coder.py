"""What the format takes from a tool's schema, which comes from the client as it is."""

from __future__ import annotations

from typing import Any

import pytest

from app.text.output.qwen3_coder import Qwen3Coder
from app.text.output.registry import OutputFormats
from tests.app.text.output.reading import read

FORMATS = OutputFormats(Qwen3Coder, None)
CALL = "<function=add><parameter=a>1</parameter><parameter=b>x y</parameter></function>"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"]},
        {"properties": "a"},
        {"properties": {"a": 5, "b": []}},
        {"properties": {"a": {"type": 5}, "b": {"type": {}}}},
        {"properties": {"a": {"type": [["integer"], 5]}, "b": {"type": []}}},
        {"properties": {"a": {"anyOf": 5}, "b": {"anyOf": {"type": "string"}}}},
        {"properties": {"a": {"anyOf": [5, {"type": 5}]}, "b": {"anyOf": "string"}}},
    ],
)
def test_values_without_a_proper_schema_are_read_as_those_without_any(
    schema: dict[str, Any],
) -> None:
    calls = [("add", {"a": 1, "b": "x y"})]
    assert read(FORMATS, [CALL], tools={"add": schema}) == ("", "", calls)


def test_of_several_types_the_one_that_fits_is_taken() -> None:
    either = {"anyOf": [{"type": ["null", "integer"]}, {"type": "string"}]}
    schema = {"properties": {"a": {"type": "string"}, "b": either}}
    calls = [("add", {"a": "1", "b": "x y"})]
    assert read(FORMATS, [CALL], tools={"add": schema}) == ("", "", calls)
