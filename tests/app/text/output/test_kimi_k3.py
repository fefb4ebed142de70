"""Kimi K3: tags of three tokens around reasoning, text, calls and arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from actors.scheduling.request import Frame
from app.text.output.kimi_k3 import KimiK3, KimiK3Think
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.reading import CUTS, TOOLS, Read, cut, read
from tests.app.text.output.test_held_calls import END, SCHEMAS, compiler, takes, tokens_of

FORMATS = OutputFormats(KimiK3, KimiK3Think)
ALL, ALL_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
RESPONSE, RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
MESSAGE_END = "<|close|>message<|sep|>"
THOUGHT = "<|open|>think<|sep|>I add.<|close|>think<|sep|>"
ADDED, NOW = ("add", {"a": 1}), ("now", {})


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def call(*arguments: str, name: str = "add", index: str = ' index="1"') -> str:
    inner = "".join(arguments)
    return f'<|open|>call tool="{name}"{index}<|sep|>{inner}<|close|>call<|sep|>'


ADD = call(argument("a", "number", "1"))
BLOCK = '<|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'


def test_its_template_shows_both() -> None:
    assert choose_formats([f"{RESPONSE}{ALL}"]) == FORMATS


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            f"{THOUGHT}{RESPONSE}So:{RESPONSE_END}{ALL}{ADD}{ADD}{ALL_END}{MESSAGE_END}",
            ("So:", "I add.", [ADDED, ADDED]),
        ),
        (f"{THOUGHT}{RESPONSE}1 < 2{RESPONSE_END}{MESSAGE_END}", ("1 < 2", "I add.", [])),
        (f"{ALL}\n{call(name='now', index='')}\n{ALL_END[:9]}", ("", "", [NOW])),
        (f"{ALL}{call(BLOCK)}{ALL_END}", ("", "", [ADDED])),
        (
            f"{ALL}{call(argument('b', 'string', '1'), argument('a', 'integer', ' 1'))}{ALL_END}",
            ("", "", [("add", {"b": "1", "a": 1})]),
        ),
        (f"{ALL}{call(name='rm')}{ADD}{ALL_END}.", (f"{ALL}{call(name='rm')}.", "", [ADDED])),
        (f"{ALL}{ADD}{call(name='rm')}{ADD}{ALL_END}", (call(name="rm"), "", [ADDED, ADDED])),
        (f"{ALL}{ALL_END}", (f"{ALL}{ALL_END}", "", [])),
        ("<|open|>think<|sep|>cut off<|close|>th", ("", "cut off<|close|>th", [])),
        ("Hi.", ("Hi.", "", [])),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_parts_are_told_apart_in_any_cut(answer: str, wanted: Read, cuts: list[int]) -> None:
    for chunks in (cut(answer, cuts), list(answer)):
        assert read(FORMATS, chunks, by_argument=False) == wanted
        assert read(FORMATS, chunks) == wanted


@pytest.mark.parametrize("special", [True, False])
def test_names_are_escaped(special: bool) -> None:
    key = 'a"b&c'
    given_calls = [("add", {key: 1, "&quot;": "x"})]
    written = KimiK3.written(given_calls)
    assert 'key="a&quot;b&amp;c" type="number"' in written
    assert read(FORMATS, list(written)) == ("", "", given_calls)
    schema = {"properties": {key: {"type": "integer"}, "&quot;": {"type": "string"}}}
    schemas = {"add": json.dumps(schema)}
    assert takes("kimi_k3", written, special=special, schemas=schemas)
    assert not takes("kimi_k3", written.replace(">1<", ">x<"), special=special, schemas=schemas)


def test_the_type_of_a_text_tells_it_from_other_values() -> None:
    values = {"points": [1, {}], "scale": 0.5, "grid": True, "title": None, "style": "1"}
    written = KimiK3.written([("plot", values)])
    for kind in ("array", "number", "boolean", "null", "string"):
        assert f'type="{kind}"' in written
    assert read(OutputFormats(KimiK3, None), [written], tools=TOOLS) == ("", "", [("plot", values)])


@pytest.mark.parametrize("special", [True, False])
def test_a_held_call_has_its_tags_and_its_schema(special: bool) -> None:
    second = ADD.replace('index="1"', 'index="2"')
    for taken in (f"{ALL}{ADD}{second}{ALL_END} Ok.", f"So: {ALL}{call(name='now')}{ALL_END}"):
        assert takes("kimi_k3", taken, special=special)
    refused = [
        *(call(argument("a", "number", "x")), call(argument("a", "string", "1")), call()),
        *(ADD.replace(' index="1"', ""), ADD.replace('index="1"', 'index="x"'), ""),
    ]
    for one in refused:
        assert not takes("kimi_k3", f"{ALL}{one}{ALL_END}", special=special)


def test_the_text_of_a_constrained_answer_may_have_its_tags() -> None:
    names = KimiK3.special_tokens
    frame = Frame(
        KimiK3Think.marks(""),
        heads=KimiK3Think.heads,
        tail=KimiK3Think.tail,
        held=KimiK3.held(SCHEMAS),
    )

    def taken(text: str) -> bool:
        matcher = compiler(names).compile("regex", "[0-9]+", frame)()
        tokens = tokens_of(text, names)
        return all(map(matcher.take, tokens)) and (matcher.is_over or matcher.take(END))

    answers = ("12", f"{RESPONSE}12{RESPONSE_END}{MESSAGE_END}", f"{ALL}{ADD}{ALL_END}")
    assert [one for one in answers if not taken(one)] == []
    assert [one for one in answers if not taken(f"{THOUGHT}{one}")] == []
    refused = ("So.", f"{THOUGHT}{RESPONSE}So.", f"{ALL}{call()}{ALL_END}")
    assert not any(map(taken, refused))
