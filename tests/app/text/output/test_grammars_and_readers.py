"""What the grammar of held calls lets a model write is read as the calls that it allows."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from actors.scheduling.request import Frame, HeldCalls, HeldPart
from actors.stage.grammars.guidance import GuidanceCompiler
from actors.stage.grammars.matcher import Matcher
from app.text.output.pieces import gathered
from app.text.output.pythonic import Pythonic
from app.text.output.registry import TOOL_FORMATS, OutputFormats
from tests.app.text.output.reading import cut, pieces_of

Schema = dict[str, Any]
INTEGER, TEXT, NULL = ({"type": kind} for kind in ("integer", "string", "null"))
BOOLEAN, NUMBER = {"type": "boolean"}, {"type": "number"}
LIST, INTEGERS = {"type": "array"}, {"type": "array", "items": INTEGER}
KEYED: Schema = {
    "type": "object",
    "properties": {"k": INTEGER, "l l": TEXT},
    "required": ["k", "l l"],
}
OPEN: Schema = {"type": "object", "additionalProperties": TEXT}
COLORS: Schema = {"enum": ["red", "a b"]}
SINGLE: Final[list[Schema]] = [
    *(INTEGER, TEXT, NULL, BOOLEAN, NUMBER, INTEGERS, KEYED, OPEN, COLORS),
    {"type": "array", "items": TEXT},
]
VALUES: Final[list[Schema]] = [
    *(*SINGLE, {}, LIST, {"const": "x"}, {"enum": [1.5, 2]}),
    {"type": ["string", "null"]},
    {"type": ["integer", "null"]},
    {"type": ["string", "number", "boolean"]},
    {"anyOf": [INTEGER, TEXT]},
    {"anyOf": [TEXT, INTEGERS]},
    {"enum": ["1", 1, None, "None", "true", True]},
    {"type": "string", "enum": ["", "a\nb", " c "]},
    {"type": "string", "pattern": "^[a-z]{2,4}$"},
    {"type": "integer", "minimum": 3, "maximum": 700},
    {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
    {"properties": {"k": TEXT}},
    {"items": TEXT},
]
NAMES = ["a", "as", "größe", "x-y", "p.q", "user id", "$r", 'q"s', "tab\tt", "{z}", "k=v", "a,b"]
OF_PYTHON = re.compile(r"[\w.-]+")

# Beside what calls have, a model's tokens are these.
CHARS = [*map(chr, range(32, 127)), *"\n\r\t\x00\x85\u2028\u3000éößñ名😀"]
WORDS = [
    *("a", "add", "user id", "true", "True", "None", "null", "1e5", "0.5", "-1", "{}", "[]"),
    *("\\n", "\\u00e9", '\\"', "\\'", "\\x41", "\\ud83d\\ude00", '", ', '": ', "</", "```", "\n\n"),
    "<![CDATA[",
]
CLOSERS = frozenset(("'", '"', "}", "]", ")", '"}', "\n"))
OWN_VALUES = {"functiongemma", "gemma4"}  # which are read, but held in JSON
BETWEEN_TAGS = ["deepseek_v32", "glm45", "kimi_k3", "minicpm5", "qwen3_coder"]  # one of each kind
MOST_TOKENS, HURRIES_AT = 250, 80

LISTED = ["1", 1, "2", 2.5, "true", True, "null", None, "None", "[1]", [1], "{}", "a b", ""]
KINDS: Final[list[Schema]] = [  # of which a value may be of one
    *(TEXT, TEXT, INTEGER, NUMBER, NULL, BOOLEAN, INTEGERS, KEYED, COLORS),
    {"type": "string", "pattern": "^[0-9]{1,3}$"},
    {"type": "string", "pattern": "^[^a-z]*$"},
    {"type": "integer", "minimum": 20},
    {"type": "number", "maximum": -1},
    {"type": "array", "items": INTEGER, "minItems": 2},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "multipleOf": 0.5},
    *({"pattern": "^[0-9a-z]{0,3}$"}, {"minimum": 20}, {"multipleOf": 3}, {"minItems": 2}),
]


def union_of(rng: random.Random) -> Schema:
    """A schema of values of several types."""
    listed = {"enum": rng.sample(LISTED, rng.randint(2, 4))}
    if rng.random() < 0.3:
        return listed
    if rng.random() < 0.1:
        return rng.choice(KINDS)
    return {"anyOf": rng.sample([*KINDS, listed, listed], rng.randint(2, 3))}


def schema_of(rng: random.Random, values: list[Schema], names: list[str]) -> Schema:
    properties = {name: rng.choice(values) for name in rng.sample(names, rng.randint(0, 3))}
    required = [name for name in properties if rng.random() < 0.5]
    whole: Schema = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.25:
        whole["additionalProperties"] = rng.choice([True, False, INTEGER, TEXT])
    return whole


def names_of(name: str) -> list[str]:
    """Those that parameters may have."""
    if not issubclass(TOOL_FORMATS[name], Pythonic):
        return NAMES
    return [one for one in NAMES if OF_PYTHON.fullmatch(one)]


def texts_of(parts: Iterable[HeldPart]) -> Iterator[str]:
    for part in parts:
        if part.kind in ("text", "until"):
            yield part.text
        yield from texts_of(part.parts)


@cache
def compiler(texts: tuple[str, ...], special: tuple[str, ...]) -> GuidanceCompiler:
    end = len(texts)
    vocabulary = [*(text.encode() for text in texts), b"", *(b"" for _ in special)]
    tokens = dict(zip(special, range(end + 1, len(vocabulary)), strict=True))
    return GuidanceCompiler(vocabulary, (end,), tokens)


def special_of(name: str) -> tuple[str, ...]:
    return tuple(sorted(TOOL_FORMATS[name].special_tokens, key=len, reverse=True))


def tokens_of(text: str, special: tuple[str, ...]) -> list[str]:
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return [token for part in parts for token in ([part] if part in special else part)]


def written_by_grammar(
    name: str, schemas: Mapping[str, Schema], rng: random.Random, most_calls: int
) -> str | None:
    """A text that a random walk through the grammar of calls gives; None for one too long."""
    held = TOOL_FORMATS[name].held({one: json.dumps(schema) for one, schema in schemas.items()})
    special = special_of(name)
    own = {text for one in held for text in (one.head, one.tail, one.separator or "", one.opening)}
    own |= {text for one in held for call in one.calls for text in texts_of(call.parts)}
    spelled = {text for text in own if text and not any(mark in text for mark in special)}
    texts = tuple(dict.fromkeys([*CHARS, *WORDS, *sorted(spelled)]))
    names = [*texts, "", *special]
    end = len(texts)
    bare = [one for one in held if one.may_be_text]
    frame = Frame(held=held, most_calls=0 if bare else most_calls)
    matcher = compiler(texts, special).compile("text", "", frame)()
    taken = []
    if bare:
        taken = tokens_of(beginning(bare, rng), special)
        assert all(matcher.take(names.index(token)) for token in taken)
    closers = {i for i, text in enumerate(names) if text in CLOSERS or i > end or text in own}
    while not matcher.is_over and len(taken) < MOST_TOKENS:
        may_follow = following(matcher, len(names))
        assert may_follow
        if end in may_follow and (bare or len(may_follow) == 1 or rng.random() < 0.5):
            return "".join(taken)
        may_follow = [i for i in may_follow if i != end]
        close = [i for i in may_follow if i in closers]
        words = [i for i in may_follow if len(names[i]) > 1]
        pick, hurries = rng.random(), len(taken) > HURRIES_AT
        some = close if close and (hurries or pick < 0.2) else words if pick < 0.6 else may_follow
        token = rng.choice(some or may_follow)
        assert matcher.take(token)
        taken.append(names[token])
    return "".join(taken) if matcher.is_over else None


def beginning(bare: list[HeldCalls], rng: random.Random) -> str:
    """Of calls that have no mark of their own, with other blanks."""
    held = rng.choice(bare)
    first = rng.choice(held.calls).parts[0]
    text = held.head + rng.choice(first.parts or (first,)).text
    return held.opening + "".join(rng.choice(["", "\n", "  "]) if c == " " else c for c in text)


def following(matcher: Matcher, num_tokens: int) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:num_tokens]
    return [int(token) for token in np.flatnonzero(bits)]


def read_alike(name: str, text: str, schemas: Mapping[str, Schema], rng: random.Random) -> Any:
    """The text and calls found, which are the same in any cut, streamed or whole."""
    formats = OutputFormats(TOOL_FORMATS[name], None)
    cuts = ([text], list(text), cut(text, [rng.randint(0, len(text)) for _ in range(6)]))
    found = [
        gathered(pieces_of(formats, texts, by_argument=by_argument, tools=schemas))
        for texts in cuts
        for by_argument in (False, True)
    ]
    assert all(one == found[0] for one in found), text
    return found[0][0], [(tool, json.loads(arguments)) for tool, arguments in found[0][2]]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@given(seed=st.integers(0, 1 << 16))
@example(seed=1218)  # an empty key
@settings(max_examples=12, deadline=None, derandomize=True)
def test_what_a_grammar_allows_is_read_as_calls_of_its_schemas(name: str, seed: int) -> None:
    rng = random.Random(seed)
    schemas = {tool: schema_of(rng, VALUES, names_of(name)) for tool in ("add", "get-it")}
    most_calls = rng.choice([1, 3])
    if (text := written_by_grammar(name, schemas, rng, most_calls)) is None:
        return
    rest, calls = read_alike(name, text, schemas, rng)
    is_bare = any(one.may_be_text for one in TOOL_FORMATS[name].held({}))
    assert not rest.strip(), text
    assert 1 <= len(calls) <= (MOST_TOKENS if is_bare else most_calls), text
    for tool, arguments in calls:
        Draft202012Validator(schemas[tool]).validate(arguments)


@pytest.mark.parametrize("name", BETWEEN_TAGS)
@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_value_of_several_types_is_read_as_one_that_its_schema_has(name: str, seed: int) -> None:
    rng = random.Random(seed)
    properties = {key: union_of(rng) for key in ("a", "as")}
    schemas = {"add": {"type": "object", "properties": properties, "required": ["a", "as"]}}
    if (text := written_by_grammar(name, schemas, rng, 1)) is None:
        return
    rest, ((tool, arguments),) = read_alike(name, text, schemas, rng)
    assert (rest.strip(), tool) == ("", "add")
    Draft202012Validator(schemas["add"]).validate(arguments)


def value_of(schema: Schema, rng: random.Random) -> Any:
    def text() -> str:
        of_marks = ["</parameter>", "</arg_value>", "</tool_call>", "'", '"', "\\"]
        of_marks += ["<![CDATA[", "</param>"]
        # Between tags a text ends at its first closing one.
        chosen = rng.choice([CHARS, [*WORDS, "{x", "[TOOL_CALLS]"], of_marks])
        return "".join(rng.choice(chosen) for _ in range(rng.randint(0, 6)))

    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "string":
            return text().replace("</parameter>", "").replace("</arg_value>", "")
        case "array":
            one = schema["items"]
            return [text() if one is TEXT else value_of(one, rng) for _ in range(rng.randint(0, 3))]
        case "object" if "properties" in schema:
            return {"k": rng.randint(-9, 999), "l l": text()}
        case "object":
            return {rng.choice(["x", "l l", ""]): text()}
    values = {"integer": [0, -7, 10**15], "number": [0, -1.5, 1e-7], "boolean": [True, False]}
    return rng.choice(values.get(schema["type"], [None]))


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - OWN_VALUES))
@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_calls_that_a_family_writes_are_allowed_and_read_as_they_are(name: str, seed: int) -> None:
    rng = random.Random(seed)
    schemas, wanted = {}, []
    for tool in ("add", "get-it"):
        properties = {one: rng.choice(SINGLE) for one in rng.sample(names_of(name), 3)}
        schemas[tool] = {"type": "object", "properties": properties, "required": list(properties)}
        wanted.append((tool, {key: value_of(one, rng) for key, one in properties.items()}))
    written = TOOL_FORMATS[name].written(wanted)
    is_spelled = any(mark in json.dumps(wanted) for mark in special_of(name))
    special = () if is_spelled else rng.choice([(), special_of(name)])
    held = TOOL_FORMATS[name].held({one: json.dumps(schema) for one, schema in schemas.items()})
    texts = tuple(dict.fromkeys([*CHARS, *written]))
    matcher = compiler(texts, special).compile("text", "", Frame(held=held))()
    names = [*texts, "", *special]
    assert all(matcher.take(names.index(token)) for token in tokens_of(written, special)), written
    assert matcher.is_over or matcher.take(len(texts)), written
    rest, calls = read_alike(name, written, schemas, rng)
    assert (rest.strip(), calls) == ("", wanted)
