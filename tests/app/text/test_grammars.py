"""Grammars are compiled in a child process with the real library."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.scheduling.request import Frame, Grammar
from actors.stage.grammars.compiler import GrammarCompiler
from app.text.grammar_worker import Trial
from app.text.grammars import GrammarBusy, GrammarChecker, GrammarInvalid, _digest
from app.text.output.deepseek import DeepSeekV3
from app.text.output.harmony import Harmony
from app.text.output.interface import ToolFormat
from app.text.output.kimi_k2 import KimiK2
from app.text.output.llama3_json import Llama3Json
from app.text.output.mistral import Mistral
from app.text.output.pythonic import Pythonic
from app.text.output.qwen3_coder import Qwen3Coder
from tests.tiny_tokenizers import byte_level_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_level_folder(Path(tmp_path_factory.mktemp("grammar"))))


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
        Grammar("json_schema", '{"type": "array", "uniqueItems": true}'),
        Grammar("regex", "[a-c]{2,3}x?"),
        Grammar("ebnf", 'root ::= "a" root | "b"'),
        Grammar("choice", '["yes", "n\\"o\\n", "caf\\u00e9"]'),
        Grammar("text", "", Frame(held=Harmony.held({"add": '{"type": "object"}'}))),
    ],
)
async def test_good_grammars_compile(checker: GrammarChecker, grammar: Grammar) -> None:
    await checker.check(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "nonsense"}'),
        Grammar("json_schema", "{"),
        Grammar("strict_json_schema", '{"type": "array", "uniqueItems": true}'),
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


@pytest.mark.parametrize("of", [Llama3Json, DeepSeekV3, KimiK2, Mistral])
async def test_a_schema_is_digested_once_however_many_ways_there_are_to_call(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, of: type[ToolFormat]
) -> None:
    sizes: list[int] = []

    def digest(text: bytes) -> Any:
        sizes.append(len(text))
        return hashlib.sha256(text)

    monkeypatch.setattr("app.text.grammars.hashlib", SimpleNamespace(sha256=digest))
    properties = {f"parameter_{n}": {"type": "array"} for n in range(40)}
    schema = json.dumps({"type": "object", "properties": properties})
    await patiently(checker, Grammar("text", "", Frame(held=of.held({"f": schema}))))
    assert len(schema) < sizes[0] < 2 * len(schema)


def test_other_grammars_have_other_digests() -> None:
    schemas = {"f": '{"type": "object"}', "g": '{"properties": {"\ud800": {}}}'}

    def grammars() -> list[Grammar]:
        ways = [of.held(schemas) for of in (Harmony, Llama3Json, Pythonic, Qwen3Coder)]
        ways += [Harmony.held({"g": schemas["g"]}), Llama3Json.held(schemas)[1:], ()]
        frames = [Frame(held=held, most_calls=most) for held in ways for most in (0, 1)]
        kinds = [Grammar("text", "", frame) for frame in (None, *frames)]
        return [*kinds, Grammar("text", " "), Grammar("regex", ""), Grammar("regex", "text")]

    digests = [*map(_digest, grammars())]
    assert digests == [*map(_digest, grammars())]
    assert len({*digests}) == len(digests) - 1  # no frame is as one of nothing


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
    compiler = GrammarCompiler.of_folder(Path(folder))
    readings = itertools.count()
    trial = Trial(
        compiler.texts,
        compiler.stop_token_ids,
        clock=lambda: 0.01 * min(next(readings), 2 * num_slow),
    )
    complaint = trial.complaint(compiler.compile(Grammar("regex", pattern)))
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
