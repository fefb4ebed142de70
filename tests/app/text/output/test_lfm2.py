"""LFM2 and MiniCPM3: their templates, and calls that break off, are held or have to be made."""

from __future__ import annotations

import json

import pytest

from actors.scheduling.request import Frame
from app.text.output.lfm2 import Lfm2, MiniCPM3, MiniCPM3Think
from app.text.output.registry import TOOL_FORMATS, OutputFormats, choose_formats
from app.text.output.thinking import Think
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import END, SCHEMAS, compiler, takes, tokens_of

BEGIN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
FORMATS = OutputFormats(Lfm2, Think)
MINICPM3 = "{{ '<|thought_start|>\\n' + t }}{{ '<|tool_call_start|>\\n```python\\n' + call }}"
ADDED = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("{{ 'List of tools: <|tool_list_start|>[' }}", OutputFormats(Lfm2, None)),
        ("{% if not keep_past_thinking and '</think>' in content %}{% endif %}", FORMATS),
        ("{{ '<think>' + m.thinking }}{{ '<|tool_call_start|>[' + calls }}", FORMATS),
        (MINICPM3, OutputFormats(MiniCPM3, MiniCPM3Think)),
    ],
)
def test_their_templates_show_them(template: str, formats: OutputFormats) -> None:
    assert choose_formats([template]) == formats


def test_reasoning_and_calls_of_minicpm3() -> None:
    answer = (
        "<|thought_start|>\nI add.\n<|thought_end|>\n"
        f'{BEGIN}\n```python\nadd(a=1,b="x")\nnow()\n```\n{CLOSE}\nWait.'
    )
    wanted = ("Wait.", "I add.", [("add", {"a": 1, "b": "x"}), ("now", {})])
    assert read(choose_formats([MINICPM3]), list(answer)) == wanted


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = f"<think>Hm.</think>{BEGIN}[now(), add(a=1, b=c)]{CLOSE}Hm."
    assert read(FORMATS, list(answer)) == ("Hm.", "Hm.", [("now", {}), ("add", {"a": 1})])


@pytest.mark.parametrize("special", [True, False])
def test_calls_between_the_marks_are_held(special: bool) -> None:
    for taken in ("[add()]", f"{BEGIN}[now(),add(a=1)]{CLOSE}So.", f"{BEGIN}[{ADDED}]{CLOSE}"):
        assert takes("lfm2", taken, special=special)
    assert takes("lfm2", f"{BEGIN}[plot(grid=true, title=None)]{CLOSE}", special=special)
    assert takes("minicpm3", f"{BEGIN}\n```python\nadd(a=1)\n```\n{CLOSE}", special=special)
    for refused in ("[add()]", "[rm()]", "add(a=1)", '[{"name": "rm"', "[add(a='x')]", "So."):
        assert not takes("lfm2", f"{BEGIN}{refused}{CLOSE}", special=special)
    for refused in ("add()", "rm()", "[add(a=1)]", "add(a=1), now()", "So."):
        code = f"\n```python\n{refused}\n```\n"
        assert not takes("minicpm3", f"{BEGIN}{code}{CLOSE}", special=special)


@pytest.mark.parametrize(
    ("name", "own"),
    [("lfm2", "[add(a=1)]"), ("minicpm3", "\n```python\nadd(a=1)\n```\n")],
)
def test_json_keeps_to_a_schema_that_the_syntax_of_python_cannot(name: str, own: str) -> None:
    odd = {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}}
    schemas = {"add": SCHEMAS["add"], "now": json.dumps({**odd, "additionalProperties": False})}
    for taken in (own, '[{"name": "now", "arguments": {"x_1": 2}}]', f"[{ADDED}]"):
        answer = f"{BEGIN}{taken}{CLOSE}"
        assert takes(name, answer, special=True, schemas=schemas)
        assert len(read(OutputFormats(TOOL_FORMATS[name], None), list(answer))[2]) == 1
    for refused in ("[now(x_1=2)]", '[{"name": "now", "arguments": {"y": 2}}]'):
        assert not takes(name, f"{BEGIN}{refused}{CLOSE}", special=True, schemas=schemas)


def test_calls_that_have_to_be_made_are_json_between_the_marks() -> None:
    names = (CLOSE, BEGIN, "</think>", "<think>")
    frame = Frame(Think.marks(""), held=Lfm2.forced(SCHEMAS), most_calls=2)

    def made(text: str) -> bool:
        matcher = compiler(names).compile("text", "", frame)()
        tokens = tokens_of(text, names)
        return all(map(matcher.take, tokens)) and (matcher.is_over or matcher.take(END))

    answer = f"<think>Hm.</think>{BEGIN}[{ADDED}, {ADDED}]{CLOSE}"
    assert made(answer)
    assert read(FORMATS, list(answer)) == ("", "Hm.", [("add", {"a": 1})] * 2)
    assert not any(map(made, ("So.", f"{BEGIN}[add(a=1)]{CLOSE}", ADDED)))
