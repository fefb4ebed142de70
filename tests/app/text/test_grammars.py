"""Grammars are compiled in a child process with the real library."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from actors.scheduling.request import Grammar
from actors.stage.grammar_kinds import (
    FORMATS,
    bounds_as_patterns,
    compile_grammar,
    ebnf_of_choices,
)
from app.text.grammar_worker import Trial
from app.text.grammars import GrammarBusy, GrammarChecker, GrammarInvalid, first_not_kept
from tests.app.text.tiny_tokenizer import byte_level_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_level_folder(Path(tmp_path_factory.mktemp("grammar"))))


@pytest.fixture(scope="module")
def compiler(folder: str) -> xgrammar.GrammarCompiler:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer))


@pytest.fixture(scope="module")
def checker(folder: str) -> Iterator[GrammarChecker]:
    found = GrammarChecker(folder)
    yield found
    found.close()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_object", ""),
        Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}'),
        Grammar("regex", "[a-c]{2,3}x?"),
        Grammar("ebnf", 'root ::= "a" root | "b"'),
        Grammar("choice", '["yes", "n\\"o\\n", "caf\\u00e9"]'),
    ],
)
async def test_good_grammars_compile(checker: GrammarChecker, grammar: Grammar) -> None:
    await checker.check(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "nonsense"}'),
        Grammar("json_schema", "{"),
        Grammar("regex", "(["),
        Grammar("ebnf", "root ::= missing"),
        Grammar("nonsense", ""),
    ],
)
async def test_bad_grammars_are_refused(checker: GrammarChecker, grammar: Grammar) -> None:
    with pytest.raises(GrammarInvalid):
        await checker.check(grammar)


async def test_verdicts_are_remembered(folder: str) -> None:
    """Nothing else is left to ask once the compiler is closed."""
    checker = GrammarChecker(folder)
    good, bad = Grammar("regex", "[a-c]{2}"), Grammar("regex", "([")
    await patiently(checker, good)
    with pytest.raises(GrammarInvalid) as first:
        await patiently(checker, bad)
    checker.close()
    await checker.check(good)
    with pytest.raises(GrammarInvalid) as second:
        await checker.check(bad)
    assert str(first.value) == str(second.value)
    with pytest.raises(RuntimeError, match="shutdown"):
        await checker.check(Grammar("regex", "new"))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"$ref": "#"}'),
        Grammar("regex", r"[^\s\S]"),
        Grammar("ebnf", "root ::= root"),
    ],
)
async def test_grammars_of_no_text_are_refused(checker: GrammarChecker, grammar: Grammar) -> None:
    with pytest.raises(GrammarInvalid, match="no text matches it"):
        await checker.check(grammar)


async def test_grammars_of_slow_masks_are_refused(checker: GrammarChecker) -> None:
    """They compile at once. Every mask takes longer than the one before."""
    rules = "".join(f"r{i} ::= r{i + 1}* [{chr(97 + i)}]?\n" for i in range(12))
    with pytest.raises(GrammarInvalid, match=r"takes too long|within"):
        await patiently(checker, Grammar("ebnf", f"root ::= r0*\n{rules}r12 ::= [a-z]*"))


@pytest.mark.parametrize(
    ("pattern", "num_slow", "is_slow"),
    [("a*", 9, False), ("a*", 300, True), ("(a|bc)*", 300, True), ("a", 300, False)],
)
def test_a_trial_follows_a_grammar_and_measures_it(
    folder: str, pattern: str, num_slow: int, is_slow: bool
) -> None:
    """By a clock that goes on by 10 ms for each of its first measurements."""
    info = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(folder))
    grammar = xgrammar.GrammarCompiler(info).compile_regex(pattern)
    readings = itertools.count()
    trial = Trial(
        info.decoded_vocab,
        info.stop_token_ids,
        clock=lambda: 0.01 * min(next(readings), 2 * num_slow),
    )
    complaint = trial.complaint(lambda: xgrammar.GrammarMatcher(grammar))
    assert (complaint is not None) == is_slow


@pytest.mark.heavy
async def test_a_pathological_grammar_is_cut_off_and_others_go_on(folder: str) -> None:
    properties = {f"p{i}": {"type": "string", "pattern": "(a|b){1,50}"} for i in range(4000)}
    huge = json.dumps({"type": "object", "properties": properties})  # seconds of work
    checker = GrammarChecker(folder, limit_s=1.0)
    with pytest.raises(GrammarInvalid, match=r"within 1 s"):
        await patiently(checker, Grammar("json_schema", huge))
    await patiently(checker, Grammar("regex", "ab+"))
    checker.close()


async def patiently(checker: GrammarChecker, grammar: Grammar) -> None:
    """Checked again while other processes leave the compiler no processor."""
    for _ in range(20):
        try:
            return await checker.check(grammar)
        except GrammarBusy:
            continue
    raise AssertionError("the compiler never got a processor")


async def test_a_flood_is_refused_beyond_a_bound(checker: GrammarChecker) -> None:
    checks = [checker.check(Grammar("regex", f"flood{i}")) for i in range(64)]
    outcomes = await asyncio.gather(*checks, return_exceptions=True)
    busy = [outcome for outcome in outcomes if isinstance(outcome, GrammarBusy)]
    assert len(busy) == 32
    assert [outcome for outcome in outcomes if outcome not in busy] == [None] * 32


async def test_keys_take_turns(checker: GrammarChecker) -> None:
    """While the compiler is held up, two keys' grammars wait for it."""
    may_go_on = threading.Event()
    checker._thread.submit(may_go_on.wait)
    ended: list[str] = []

    async def check(key: str, number: int) -> None:
        try:
            await checker.check(Grammar("regex", f"turn{key}{number}"), key)
        finally:
            ended.append(key)

    numbers = [("a", i) for i in range(32)] + [("b", 0), ("b", 1)]
    checks = [asyncio.create_task(check(*number)) for number in numbers]
    await asyncio.sleep(0)
    with pytest.raises(GrammarBusy):
        await checker.check(Grammar("regex", "turna32"), "a")
    may_go_on.set()
    await asyncio.gather(*checks, return_exceptions=True)
    assert "".join(ended) == "abab" + 30 * "a"


async def test_a_closed_checker_leaves_nobody_waiting(folder: str) -> None:
    checker, may_go_on = GrammarChecker(folder), threading.Event()
    checker._thread.submit(may_go_on.wait)
    checks = [asyncio.create_task(checker.check(Grammar("regex", f"{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    checker.close()
    may_go_on.set()
    outcomes = await asyncio.gather(*checks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)


async def test_requests_with_the_same_grammar_wait_for_one_compilation(folder: str) -> None:
    """Whatever becomes of the request that came first, and with one place among those that wait."""
    checker = GrammarChecker(folder)
    same = Grammar("regex", "same")
    checks = [asyncio.create_task(checker.check(same)) for _ in range(64)]
    others = [checker.check(Grammar("regex", f"other{i}")) for i in range(32)]
    await asyncio.sleep(0)  # all of the same have begun to wait
    checks[0].cancel()
    outcomes = await asyncio.gather(*checks, *others, return_exceptions=True)
    checker.close()
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:-1] == [None] * 94
    assert isinstance(outcomes[-1], GrammarBusy)


def test_choices_are_escaped() -> None:
    assert ebnf_of_choices(['a"b\\c\n']) == 'root ::= "a\\"b\\\\c\\n"'


def test_bounds_are_written_as_patterns_and_values_left_alone() -> None:
    word = {"type": "string", "minLength": 1, "maxLength": 3}
    schema = {
        "properties": {"const": word, "maxLength": {"type": "integer"}},
        "anyOf": [{"type": ["string", "null"], "maxLength": 2}, {"const": word}],
        "items": {"type": "string", "minLength": 2},
        "contains": {"type": "string", "maxLength": 2, "pattern": "a"},
        "not": {"type": "string", "maxLength": "2"},
    }
    char = r'[^"\\\x00-\x1f]'
    assert bounds_as_patterns(schema) == {
        "properties": {
            "const": {"type": "string", "pattern": f"^{char}{{1,3}}$"},
            "maxLength": {"type": "integer"},
        },
        "anyOf": [
            {"type": ["string", "null"], "pattern": f"^{char}{{0,2}}$"},
            {"const": word},
        ],
        "items": {"type": "string", "pattern": f"^{char}{{2,}}$"},
        "contains": {"type": "string", "maxLength": 2, "pattern": "a"},
        "not": {"type": "string", "maxLength": "2"},
    }


_BOUNDED: Any = {"type": "string"}


@pytest.fixture(scope="module")
def many_tokens() -> xgrammar.TokenizerInfo:
    """As many as large models have, most of them words of two syllables."""
    parts = [a + b for a in "bcdfghjklmnpqrstvwxz" for b in "aeiouy"]
    words = {f"{lead}{a}{b}" for lead in ("", " ", " S") for a in parts for b in parts}
    texts = [*map(chr, range(32, 127)), '", "', '": ', '"}', *sorted(words)]
    return xgrammar.TokenizerInfo(
        [text.encode() for text in texts] + [b""],
        vocab_type=xgrammar.VocabType.RAW,
        stop_token_ids=[len(texts)],
    )


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        (_BOUNDED, None),
        (_BOUNDED | {"maxLength": 20}, 20),
        (_BOUNDED | {"maxLength": 500}, None),
        (_BOUNDED | {"minLength": 1, "maxLength": 500}, None),
        (_BOUNDED | {"minLength": 200}, None),
    ],
    ids=str,
)
def test_bounds_do_not_make_masks_slow(
    many_tokens: xgrammar.TokenizerInfo, schema: Any, longest: int | None
) -> None:
    """Masks of a repetition of more than 128 take tens of milliseconds: a bound is left out."""
    compiler = xgrammar.GrammarCompiler(many_tokens, max_threads=1)
    text = json.dumps({"type": "object", "properties": {"a": schema}, "required": ["a"]})
    compiled = compile_grammar(compiler, "json_schema", text, many_tokens.vocab_size)
    trial = Trial(many_tokens.decoded_vocab, many_tokens.stop_token_ids)
    assert trial.complaint(lambda: xgrammar.GrammarMatcher(compiled)) is None
    matcher = xgrammar.GrammarMatcher(compiled)
    assert matcher.accept_string('{"a": "' + "x" * (longest or 999))
    assert matcher.accept_string("x") is (longest is None)


def test_bounds_share_what_a_grammar_has_room_for() -> None:
    word = {"type": "string", "maxLength": 50}
    first, second, small = bounds_as_patterns([word, word, {**word, "maxLength": 5}], 50_000)
    assert first["pattern"].endswith("{0,50}$")
    assert second == {"type": "string"}
    assert small["pattern"].endswith("{0,5}$")


@pytest.mark.parametrize("format_", [{}, {"format": "password"}])
@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('"ab"', True),
        ('"é猫🙂"', True),
        ('"a"', False),
        ('"abcd"', False),
        ('"a\tb"', False),
        ('"a\x00b"', False),
        ('"a\\"', False),
        (' "ab"', False),
    ],
)
def test_bounded_strings_are_json(
    compiler: xgrammar.GrammarCompiler, format_: dict[str, str], text: str, follows: bool
) -> None:
    schema = {"type": "string", "minLength": 2, "maxLength": 3, **format_}
    compiled = compile_grammar(compiler, "json_schema", json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    assert (matcher.accept_string(text) and matcher.is_terminated()) == follows


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


_INT: Any = {"type": "integer"}
_TEXT: Any = {"type": "string"}
# A schema, a value that breaks it, and why the grammar takes the value all the same; None: it does
# not.
_STRICT: list[tuple[Any, Any, str | None]] = [
    (_TEXT | {"pattern": "^(?!b)[ab]$"}, "b", "a pattern's lookahead"),
    (_TEXT | {"pattern": "^[(?=]$"}, "x", None),
    (_TEXT | {"pattern": r"^\(?!a$"}, "x", None),
    (_TEXT | {"pattern": "^a+$", "maxLength": 1}, "aa", "'maxLength' beside 'pattern'"),
    (_TEXT | {"pattern": "^a+$", "minLength": 2}, "a", "'minLength' beside 'pattern'"),
    (_TEXT | {"pattern": "^a+$", "minLength": 0}, "b", None),
    (_TEXT | {"format": "date", "maxLength": 3}, "2026-01-01", "'maxLength' beside 'format'"),
    (_TEXT | {"format": "date", "pattern": "^a$"}, "2026-01-01", "'pattern' beside 'format'"),
    (_TEXT | {"format": "uri", "minLength": 1}, "", None),
    (_TEXT | {"format": "uri", "minLength": 1, "maxLength": 2083}, "", None),  # HttpUrl
    (_TEXT | {"format": "uri-reference", "minLength": 1}, "", "'minLength' beside 'format'"),
    (_TEXT | {"format": "password", "maxLength": 3}, "abcd", None),
    (_TEXT | {"format": "password", "pattern": "^a$"}, "b", None),
    (_TEXT | {"minLength": 2, "maxLength": 3}, "a", None),
    ({"type": ["string", "null"], "maxLength": 1}, "ab", None),
    ({"maxLength": 1}, "ab", "'maxLength' without a 'type'"),
    (_INT | {"multipleOf": 5}, 7, None),
    (_INT | {"multipleOf": 1024}, 7, None),
    ({"type": ["integer", "null"], "multipleOf": 5}, 7, None),
    (_INT | {"multipleOf": 2000}, 7, "'multipleOf'"),
    (_INT | {"multipleOf": 5, "minimum": 0}, 7, "'multipleOf'"),
    ({"type": "number", "multipleOf": 0.5}, 0.7, "'multipleOf'"),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2}, 2, None),
    (_INT | {"exclusiveMinimum": 0, "maximum": 7}, 8, None),
    ({"minimum": 3}, 2, "'minimum' without a 'type'"),
    ({"type": "array", "items": _INT, "minItems": 2}, [1], None),
    ({"type": "array", "items": _INT, "uniqueItems": True}, [1, 1], "'uniqueItems'"),
    ({"type": "array", "items": _INT, "uniqueItems": False}, ["a"], None),
    ({"type": "array", "items": _INT, "contains": {"const": 1}}, [2], "'contains'"),
    ({"type": "array", "prefixItems": [_INT], "items": False}, [1, 2], None),
    ({"items": _INT}, ["a"], None),
    (_object(a=_INT) | {"required": ["a"]}, {}, None),
    ({"properties": {"a": _INT}, "required": ["a"]}, {"a": "b"}, None),
    (_object(a=_INT, b=_INT) | {"minProperties": 1}, {}, None),
    ({"type": "object", "additionalProperties": _INT, "maxProperties": 1}, {"a": 1, "b": 2}, None),
    ({"type": "object", "patternProperties": {"^a$": _INT}, "required": ["a"]}, {}, "'required'"),
    (
        {"type": "object", "patternProperties": {"^(?!b).$": _INT}, "additionalProperties": False},
        {"b": 1},
        "a pattern's lookahead",
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": _INT},
        {"ab": 1},
        None,
    ),
    (
        {"type": "object", "properties": {"b": _INT}, "propertyNames": {"pattern": "^a$"}},
        {"b": 1},
        "'propertyNames' beside 'properties'",
    ),
    (
        _object(a=_INT, b=_INT) | {"dependentRequired": {"a": ["b"]}},
        {"a": 1},
        "'dependentRequired'",
    ),
    (_object(a=_INT, b=_INT) | {"if": {"required": ["a"]}, "then": False}, {"a": 1}, "'if'"),
    (_object(a={"not": {"const": 1}}), {"a": 1}, "'not'"),
    ({"anyOf": [_INT | {"minimum": 3}, _TEXT]}, 2, None),
    ({"anyOf": [_INT, _TEXT], "minimum": 3}, 2, "'minimum' beside 'anyOf'"),
    ({"type": "integer", "anyOf": [{"const": 1}, _INT]}, "a", None),
    ({"type": "string", "anyOf": [{"title": "any"}]}, 1, "'type' beside 'anyOf'"),
    ({"allOf": [_INT | {"minimum": 3}]}, 2, None),
    ({"allOf": [_INT, {"minimum": 3}]}, 2, "an 'allOf' of several schemas"),
    ({"oneOf": [_object(k={"const": c}) | {"required": ["k"]} for c in "ab"]}, {"k": "c"}, None),
    ({"type": "string", "enum": ["a", "bc"]}, "b", None),
    ({"type": "string", "enum": ["a", "bc"], "maxLength": 1}, "bc", "'maxLength' beside 'enum'"),
    ({"$defs": {"i": _INT}, "$ref": "#/$defs/i", "title": "I"}, "a", None),
    ({"$defs": {"i": _INT}, "$ref": "#/$defs/i", "minimum": 3}, 2, "'minimum' beside '$ref'"),
    ({"$defs": {"i": _INT | {"$anchor": "x"}}, "$ref": "#x"}, "a", "the $ref '#x'"),
    (
        {"$defs": {"i": {"type": "number", "multipleOf": 0.5}}, "items": {"$ref": "#/$defs/i"}},
        [0.7],
        "'multipleOf'",
    ),
]


def test_formats_are_known(compiler: xgrammar.GrammarCompiler) -> None:
    for name in (*FORMATS, "password", "iri", "idn-email", "regex"):
        schema = json.dumps({"type": "string", "format": name})
        matcher = xgrammar.GrammarMatcher(compile_grammar(compiler, "json_schema", schema))
        assert matcher.accept_string('"a b%(') == (name not in FORMATS), name


@pytest.mark.parametrize(("schema", "value", "lost"), _STRICT)
def test_what_a_grammar_does_not_keep_of_a_schema_is_known(
    compiler: xgrammar.GrammarCompiler, schema: Any, value: Any, lost: str | None
) -> None:
    assert not Draft202012Validator(schema).is_valid(value)
    compiled = compile_grammar(compiler, "json_schema", json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    breaks_it = matcher.accept_string(json.dumps(value)) and matcher.is_terminated()
    found = first_not_kept(schema)
    assert (found or "").startswith(lost or "")
    assert breaks_it == (found is not None) == (lost is not None)
