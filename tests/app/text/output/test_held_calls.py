"""Calls that a grammar holds to the schemas of their tools, as each family writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from actors.scheduling.request import Frame, Grammar
from actors.stage.grammars.guidance import GuidanceCompiler
from app.text.output.registry import TOOL_FORMATS, OutputFormats
from tests.app.text.output.answers import ADD, NOW, PLOT
from tests.app.text.output.reading import TOOLS, read

HELD = sorted(TOOL_FORMATS.keys() - {"functiongemma", "gemma4"})  # which are held in JSON
# What begins as no declared tool's call is text of theirs.
WITHOUT_MARK = ("glm4", "llama3_json", "pythonic", "tool_code", "xlam")
SCHEMAS = {name: json.dumps({"type": "object", **schema}) for name, schema in TOOLS.items()}
END = 256

START = "<|start|>assistant"
COMMENTARY = "<|channel|>commentary"
JSON = "<|constrain|>json<|message|>"
BARE = '{"name": "add", "parameters": {"a": 1}}'
VALUE_END = "\n</parameter>\n"
A = f"<parameter=a>\n1{VALUE_END}"
GRID = "<parameter=grid>\n"

# Format, what may be written, and what may not.
ANSWERS: list[tuple[str, list[str], list[str]]] = [
    (
        "hermes",
        [
            "",
            "a < b",
            'So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> Ok.',
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        ],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
        ],
    ),
    (
        "harmony",
        [
            "to=functions is a word, and so is to=functions.rm",
            f"<|channel|>analysis<|message|>I use to=functions.rm.<|end|>{START}{COMMENTARY} "
            f'to=functions.add {JSON}{{"a": 1}}<|call|>',
            f'{COMMENTARY} to=functions.add {JSON}{{"a": 1}}',
            f"{COMMENTARY} to=functions.now<|message|>{{}}<|call|>{START}{COMMENTARY} "
            'to=functions.add json<|message|>{"a": 1}<|call|>',
            f' to=functions.add{COMMENTARY} json<|message|>{{"a": 1}}<|call|>',
            f"{COMMENTARY}<|message|>I look.<|end|>{START} to=functions.add{COMMENTARY} "
            f'{JSON}{{"a": 1}}<|call|>{START}<|channel|>final<|message|>Not to=functions.rm.',
            f"{COMMENTARY} to=python code<|message|>print(1)<|call|>",
        ],
        [
            f"{COMMENTARY} to=functions.rm",
            f"{COMMENTARY}<|constrain|>json to=functions.rm",
            " to=functions.rm",
            f"{START} to=functions.rm",
            f"{COMMENTARY} to=functions.add",
            f"{COMMENTARY} to=functions.add {JSON}",
            f'{COMMENTARY} to=functions.add {JSON}{{"a": "x"',
            f'{COMMENTARY} to=functions.add {JSON}{{"b": "x"}}',
            f'{COMMENTARY} to=functions.add {JSON}{{"a": 1, "c"',
            f'{COMMENTARY} to=functions.add {JSON}{{"a": 1',
            f'{COMMENTARY} to=functions.add {JSON}{{"a": 1}} so',
            f'{COMMENTARY} to=functions.add {JSON}{{"a": 1}}{START}',
            f'{COMMENTARY} to=functions.addjson<|message|>{{"a": 1}}',
            f'{COMMENTARY} to=functions.add {JSON}{{"a": 1}}<|call|>{START} to=functions.rm',
        ],
    ),
    (
        "llama3_json",
        [
            '{"city": "Paris"}',
            '{"name": "Ann", "parameters": {}}',
            '{"name": "add"}',
            '{\n  "name": "add",\n  "parameters": {"a": 1}}',
            '{"type": "function", "name": "add", "parameters": {"a": 1}}; more',
            f"{BARE}{BARE}\n{BARE} ; {BARE} and so on",
            f"So: <|python_tag|>{BARE}; {BARE}",
            "<|python_tag|>print(1)",
            f"<|python_start|>I look.<|python_end|>{BARE}",
            f"<|python_start|>{BARE}<|python_end|>Done.",
            'The call is {"name": "add", "parameters": 3}',
        ],
        [
            '{"name": "add", "parameters": 3',
            '{"name":"add","parameters":{}',
            BARE[:-1],
            '{"type": "function", "name": "add", "parameters": {"b"',
            f'{BARE}; {{"name": "add", "parameters": {{}}',
            f'{BARE}{{"name": "add", "parameters": {{}}',
            '<|python_tag|>{"name": "add", "parameters": {}',
            '<|python_start|>So<|python_end|>\n{"name": "add", "parameters": {}',
        ],
    ),
    (
        "glm4",
        ["add", "add it", "I\nadd\n{}", "rm\n{}", 'add\n{"a": 1}\nnow\n{}', 'add\n{"a": 1}\nSo.'],
        ["add\n{}", "add\n", 'add\n{"a": "x"}', 'add\n{"a": 1}\nadd\n{}'],
    ),
    (
        "qwen3_coder",
        [
            "a <tool or <function or <parameter=b>",
            f"So: <function=add>\n{A}</function>\n</tool_call> <function=now></function>",
            f"<tool_call><function=add>{A}<parameter=b>\n<function=rm>\n</parameter></function>"
            "</tool_call>",
            f"<function=plot>{GRID}True{VALUE_END}</function>",
        ],
        [
            "<tool_call>",
            "<tool_call>text",
            "<function=rm",
            "<function=add>\n</function>",
            f"<function=add>\n{A}",
            f"<function=add>\n{A}{A}",
            f"<function=add>\n{A}</function> <function=rm",
            f"<tool_call>\n<function=add>\n{A}</function>",
            f"<tool_call>\n<function=add>\n{A}</function>\n</tool_call><tool_call>",
        ],
    ),
    (
        "glm45",
        [
            "<tool_call",
            "<tool_call>now</tool_call><tool_call>now\n</tool_call>Done.",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>\n"
            "<arg_value>\n</tool>\n</arg_value></tool_call>",
        ],
        [
            "<tool_call>",
            "<tool_call>rm",
            "<tool_call>add</tool_call>",
            "<tool_call>add\n<arg_key>b</arg_key>",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>x",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
        ],
    ),
    (
        "pythonic",
        [
            "[1, 2]",
            "[add] is a tool",
            "[rm(a=1)]",
            "add(a='x')",
            "So: [add(a='x')]",
            "[ add(a=1, b='it') , now()] So: [add(a='x')]",
            "So: <|python_start|>[now(),add(a=1)]<|python_end|>Done.",
            "<|python_start|>print(1)<|python_end|>",
        ],
        [
            "[add()]",
            "[add(a='x')]",
            "[add(a=1)",
            "\n[ add(a=1), rm()]",
            "[add(1)]",
            "[add(a=1, b=2)]",
            "<|python_start|>[add(a=None)]<|python_end|>",
        ],
    ),
    (
        "tool_code",
        [
            "[now(), add(a=1)]",
            "```tool_code\nadd(a=1)\nnow()\n```\nSo: add()",
            "```tool_code\n[add(a=1), now()]\n``` Done.",
            "```tool_code\nprint(1)\n```",
            "```python\nadd()\n```",
            "add(a='x')",
        ],
        [
            "[add()]",
            "```tool_code\nadd()\n```",
            "```tool_code\nadd(a=1)\nadd(a='x')\n```",
            "```tool_code\n[add(a=1)\n```",
        ],
    ),
]


@cache
def compiler(names: tuple[str, ...]) -> GuidanceCompiler:
    texts = [*(bytes([byte]) for byte in range(256)), b"", *(b"" for _ in names)]
    return GuidanceCompiler(
        texts, (END,), dict(zip(names, range(END + 1, len(texts)), strict=True))
    )


def takes(name: str, text: str, *, special: bool, schemas: dict[str, str] = SCHEMAS) -> bool:
    """special: whether the format's marks are tokens of their own; else they are spelled."""
    one = TOOL_FORMATS[name]
    names = tuple(sorted(one.special_tokens, key=len, reverse=True)) if special else ()
    frame = Frame(calls=one.openings, held=one.held(schemas))
    matcher = compiler(names).compile("text", "", frame)()
    return all(map(matcher.take, tokens_of(text, names))) and (matcher.is_over or matcher.take(END))


def tokens_of(text: str, names: Sequence[str]) -> list[int]:
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    tokens: list[int] = []
    for part in parts:
        tokens += [END + 1 + names.index(part)] if part in names else part.encode()
    return tokens


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("calls", [[NOW], [ADD, NOW, PLOT]], ids=len)
@pytest.mark.parametrize("name", HELD)
def test_what_a_family_writes_is_taken(
    name: str, calls: list[tuple[str, Any]], special: bool
) -> None:
    written = TOOL_FORMATS[name].written(calls)
    assert takes(name, written, special=special)
    assert takes(name, f"So: {written}", special=special)
    assert read(OutputFormats(TOOL_FORMATS[name], None), list(written)) == ("", "", calls)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", HELD)
def test_what_breaks_a_schema_is_refused(name: str, special: bool) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("sub", {}),
        ("add", {"a": "x"}),
        ("add", {"b": "x"}),
        ("add", {"a": 1, "c": 2}),
        ("add", {"a": 1.5}),
        ("plot", {"grid": 3}),
    ]
    for call in calls:
        written = TOOL_FORMATS[name].written([call])
        is_text = call[0] == "sub" and name in WITHOUT_MARK
        assert takes(name, written, special=special) == is_text, written


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("name", "taken", "refused"), ANSWERS)
def test_text_is_free_and_calls_are_held(
    name: str, taken: list[str], refused: list[str], special: bool
) -> None:
    assert [text for text in taken if not takes(name, text, special=special)] == []
    assert [text for text in refused if takes(name, text, special=special)] == []


def test_cohere_numbers_its_calls_and_writes_them_on_lines_of_their_own() -> None:
    call = '{"tool_call_id": "%d", "tool_name": "add", "parameters": {"a": 1}}'
    written = f"<|START_ACTION|>[\n    {call % 0},\n    {call % 1}\n]<|END_ACTION|>"
    assert takes("cohere", written, special=True)
    assert (
        read(OutputFormats(TOOL_FORMATS["cohere"], None), list(written))[2]
        == [("add", {"a": 1})] * 2
    )


def test_a_call_may_end_the_answer_where_its_mark_is_a_stop_token() -> None:
    texts = [*(bytes([byte]) for byte in range(256)), b"", b""]
    names = {"<|call|>": END + 1}
    held = TOOL_FORMATS["harmony"].held(SCHEMAS)
    written = f'{COMMENTARY} to=functions.add {JSON}{{"a": 1}}'
    matcher = GuidanceCompiler(texts, (END, END + 1), names).compile("text", "", Frame(held=held))()
    assert all(map(matcher.take, written.encode()))
    assert matcher.take(END + 1)
    assert matcher.is_over


@pytest.mark.parametrize("name", ["harmony", "llama3_json", "mistral"])
def test_a_schema_counts_once_however_many_ways_there_are_to_call(name: str) -> None:
    properties = {f"parameter_{n}": {"type": "array"} for n in range(99)}
    schema = json.dumps({"type": "object", "properties": properties})
    grammar = Grammar("text", "", Frame(held=TOOL_FORMATS[name].held({"f": schema})))
    assert len(schema) < grammar.num_held_chars < len(schema) + 200
