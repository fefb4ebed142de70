"""xLAM: its template, and lists that are calls, are held or are no calls."""

from __future__ import annotations

import json

from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.xlam import XLam
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes

SHOWN = '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...]'
ADD = '{"name": "add", "arguments": {"a": 1}}'
FORMATS = OutputFormats(XLam, None)


def test_its_template_shows_the_list() -> None:
    for template in (SHOWN, json.dumps(SHOWN)):
        assert choose_formats([template]).tools is XLam


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = f'[{ADD}, {{"name": "add", "arguments": {{"a": 2, }}}}]'
    assert read(FORMATS, list(answer))[2] == [("add", {"a": 1}), ("add", {"a": 2})]


def test_a_list_that_begins_as_a_call_is_held() -> None:
    for taken in (f"[{ADD}]", f"[ {ADD},{ADD}]", '[{"name": "Ann"}]', "[1, 2]", f"So: [{ADD}"):
        assert takes("xlam", taken, special=False)
    for refused in (f"[{ADD}", f"[{ADD}, 1]", '[{"name": "add", "arguments": {"b"'):
        assert not takes("xlam", refused, special=False)
