"""Constrained output: the text follows the grammar, though the model is random."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.scheduling.plan import DEAD_END, SLOW_GRAMMAR, RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import Grammar, Request, SamplingParams
from actors.stage.grammars.masks import GrammarMasks
from actors.stage.grammars.matcher import MaskTime
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import MiniPlanner, make_chain, make_runner
from tests.actors.stage.test_speculation import BASE, NUM_BLOCKS, serve
from tests.tiny_models import EOS_TOKEN_ID, TURN_END_TOKEN_ID, VOCAB_SIZE

STOPS = (EOS_TOKEN_ID, TURN_END_TOKEN_ID)
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["on", "kind"],
    "additionalProperties": False,
}


def is_schema(text: str) -> bool:
    value = json.loads(text)
    assert text == json.dumps(value)  # one layout, in which blanks cannot run on
    return set(value) == {"on", "kind"} and value["kind"] in ("a", "b")


CASES: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "choice": (
        Grammar("choice", json.dumps(["yes", 'no "way"', "größer\n"])),
        lambda text: text in ("yes", 'no "way"', "größer\n"),
    ),
    "regex": (Grammar("regex", r"[a-c]{3}-\d{2}"), re.compile(r"[a-c]{3}-\d{2}").fullmatch),
    "json_schema": (Grammar("json_schema", json.dumps(SCHEMA)), is_schema),
    "ebnf": (Grammar("ebnf", 'root ::= "<" [x-z] [x-z] ">"'), re.compile("<[x-z]{2}>").fullmatch),
}


FORCING = {
    "type": "object",
    "properties": {"a_long_name": {"type": "boolean"}, "another_name": {"enum": ["x", "yes"]}},
    "required": ["a_long_name", "another_name"],
    "additionalProperties": False,
}


def sampling(grammar: Grammar, **more: object) -> SamplingParams:
    options = {"max_tokens": 120, "stop_token_ids": STOPS, "temperature": 1.0, **more}
    return SamplingParams(grammar=grammar, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_text_follows_the_grammar(tiny_model: Callable[..., Path], case: str) -> None:
    grammar, follows = CASES[case]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    params = [sampling(grammar, seed=s) for s in range(7)]
    planner = MiniPlanner(make_chain(tiny_model("llama")))
    outputs = planner.run(make_prompts(), params)
    for output in outputs:
        assert output[-1] in STOPS
        text = tokenizer.decode(output[:-1])
        assert follows(text), text
    # Preempted and recomputed, the matchers are rebuilt and the tokens are the same.
    tight = MiniPlanner(make_chain(tiny_model("llama"), 1, 50), num_blocks=50)
    assert tight.run(make_prompts(), params) == outputs


def test_json_object(tiny_model: Callable[..., Path]) -> None:
    """A random model may never close its braces: what there is must be the start of an object."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    params = sampling(Grammar("json_object", ""), max_tokens=40)
    for output in MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts(), params):
        text = tokenizer.decode([t for t in output if t not in STOPS])
        assert text.startswith("{")  # JSON mode is an object, with nothing before it


def test_end_outranks_min_tokens(tiny_model: Callable[..., Path]) -> None:
    params = sampling(Grammar("choice", '["no"]'), min_tokens=50)
    outputs = MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts(), params)
    assert all(len(output) == 3 and output[-1] in STOPS for output in outputs)


DEAD = 'root ::= [a-c] [a-c] [a-c] dead\ndead ::= dead "x"'


def test_a_dead_end_is_told_from_an_overflow(tiny_model: Callable[..., Path]) -> None:
    params = sampling(Grammar("ebnf", DEAD), stop_token_ids=(*STOPS, DEAD_END))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    for output in MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts(), params):
        assert output[-1] == DEAD_END
        assert re.fullmatch("[a-c]{3}", tokenizer.decode(output[:-1]))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_slow_grammar_ends_its_own_requests_alone(
    tiny_model: Callable[..., Path], num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = sampling(Grammar("regex", "[a-z]{40}"), stop_token_ids=(*STOPS, SLOW_GRAMMAR))
    free = SamplingParams(9)
    params = [slow if i % 2 else free for i in range(7)]
    alone = MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts()[::2], [free] * 4)
    monkeypatch.setattr(MaskTime, "MOST_S", -1.0)
    chain = make_chain(tiny_model("llama"), num_stages)
    outputs = MiniPlanner(chain, feeds=num_stages > 1).run(make_prompts(), params)
    assert outputs[1::2] == [[SLOW_GRAMMAR]] * 3
    assert outputs[::2] == alone


def test_requests_with_a_slow_grammar_have_one_time_together(
    tiny_model: Callable[..., Path],
) -> None:
    """Sixty-four continuations of one request would each take the whole time in the same step."""
    slow, other, nothing = Grammar("regex", "a*"), Grammar("regex", "b*"), np.zeros(0, np.int32)
    seconds = iter([0.0, 1.0])  # of one mask
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, STOPS, clock=lambda: next(seconds, 1.0))
    first = masks.mask(1, slow, nothing)
    assert first is not None
    assert masks.allows_some(first)
    for request_id in (1, 2):
        bits = masks.mask(request_id, slow, nothing)
        assert bits is not None
        assert not masks.allows_some(bits)
        assert masks.why_nothing(request_id) == SLOW_GRAMMAR
        assert masks.forced(request_id, slow, nothing, 4) == ()
    bits = masks.mask(3, other, nothing)
    assert bits is not None
    assert masks.allows_some(bits)
    masks.matchers.clear()  # they have left: the next one may have it better
    bits = masks.mask(4, slow, nothing)
    assert bits is not None
    assert masks.allows_some(bits)


def test_a_replayed_output_that_takes_too_long_is_left(tiny_model: Callable[..., Path]) -> None:
    seconds = iter(range(5))
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, STOPS, clock=lambda: float(next(seconds)))
    letter = AutoTokenizer.from_pretrained(tiny_model("llama")).encode(
        "a", add_special_tokens=False
    )
    bits = masks.mask(1, Grammar("regex", "a*"), np.array(letter * 100, np.int32))
    assert bits is not None
    assert not masks.allows_some(bits)
    assert next(seconds) == 2  # one token, of a hundred


def test_ignored_end_repeats_itself(tiny_model: Callable[..., Path]) -> None:
    params = sampling(Grammar("choice", '["no"]'), stop_token_ids=(), max_tokens=9)
    outputs = MiniPlanner(make_chain(tiny_model("llama"))).run(make_prompts(), params)
    assert all(len(o) == 9 and set(o[2:]) <= set(STOPS) for o in outputs)


def test_repeated_step_gives_the_same_token(tiny_model: Callable[..., Path]) -> None:
    runner = make_runner(tiny_model("llama"))
    params = sampling(Grammar("regex", "[a-z]{40}"), temperature=2.0, seed=5)
    start = RequestStart(1, (5, 6, 7), 3, tuple(range(20)), params)
    plans = [StepPlan(0, (Slice(1, 0, 3, True),), started=(start,))]
    plans += [StepPlan(i, (Slice(1, 2 + i, 1, True),)) for i in range(1, 12)]
    once = [tokens_of(runner.execute(plan, None)) for plan in plans]
    runner = make_runner(tiny_model("llama"))
    again = [[tokens_of(runner.execute(plan, None)) for _ in range(3)] for plan in plans]
    assert again == [[tokens] * 3 for tokens in once]


def tokens_of(result: object) -> tuple[tuple[int, int], ...]:
    assert isinstance(result, StepResult)
    return result.tokens


@pytest.mark.parametrize("listed", [STOPS, STOPS[1:], ()])
def test_foreign_output_ends_the_request_alone(
    tiny_model: Callable[..., Path], listed: tuple[int, ...]
) -> None:
    """A replayed output that breaks the grammar: only end tokens follow, the tokenizer's too."""
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, listed)
    mask = masks.mask(1, Grammar("choice", '["no"]'), np.array([3, 4], dtype=np.int32))
    assert mask is not None
    words = mask.numpy().view(np.uint32)
    allowed = [i for i in range(VOCAB_SIZE) if words[i // 32] >> np.uint32(i % 32) & np.uint32(1)]
    assert allowed == sorted({EOS_TOKEN_ID, *listed})


@pytest.mark.parametrize("pattern", [".*", "[^a]*", "b.*"])
def test_an_open_text_forces_nothing(tiny_model: Callable[..., Path], pattern: str) -> None:
    """Where nearly all may follow, also in a vocabulary that fills no whole words."""
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, STOPS)
    forced = masks.forced(1, Grammar("regex", pattern), np.array([], dtype=np.int32), 8)
    assert len(forced) == pattern.startswith("b")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "([a-z"),
        Grammar("json_schema", "{nonsense"),
        Grammar("ebnf", "root ::= missing"),
        Grammar("choice", "[]"),
        Grammar("choice", "[1]"),
        Grammar("telepathy", ""),
    ],
)
def test_what_is_no_grammar(tiny_model: Callable[..., Path], grammar: Grammar) -> None:
    runner = make_runner(tiny_model("llama"))
    with pytest.raises(ValueError, match=grammar.kind):
        runner.compile_grammar(grammar)
    runner.compile_grammar(Grammar("regex", "[a-z]+"))


def test_cache_is_bounded(tiny_model: Callable[..., Path]) -> None:
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, STOPS)
    first = Grammar("choice", '["first"]')
    kept = masks.compile(first)
    for i in range(300):
        masks.compile(Grammar("choice", json.dumps([f"c{i}"])))
        assert masks.compile(first) is kept  # used all the time, so never dropped
    assert len(masks._compiled) == 64


def test_a_step_looks_its_grammar_up_while_another_compiles(
    tiny_model: Callable[..., Path],
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow(GrammarMasks):
        def _compile(self, grammar: Grammar) -> Any:
            if grammar.kind == "regex":
                begun.set()
                assert may_end.wait(60)
            return super()._compile(grammar)

    masks, known = Slow(tiny_model("llama"), VOCAB_SIZE, STOPS), Grammar("choice", '["a"]')
    compiled = masks.compile(known)
    other = threading.Thread(target=masks.compile, args=(Grammar("regex", "a+"),))
    other.start()
    assert begun.wait(60)
    assert masks.compile(known) is compiled
    may_end.set()
    other.join()


def test_model_without_end_or_tokenizer(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    endless = shutil.copytree(tiny_model("llama"), tmp_path / "endless")
    path = endless / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        GrammarMasks(endless, VOCAB_SIZE, ()).compile(Grammar("json_object", ""))
    with pytest.raises(ValueError, match="has no tokenizer for grammars"):
        GrammarMasks(tmp_path, VOCAB_SIZE, STOPS).compile(Grammar("json_object", ""))


def test_a_matcher_goes_back_over_rejected_drafts(tiny_model: Callable[..., Path]) -> None:
    """Over those it took, those that broke it, and its end."""
    grammar = Grammar("regex", "abc|abd")
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, STOPS)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))

    def allowed(text: str, *stops: int) -> str:
        """Characters that may follow; all end tokens count as "."."""
        output = [*tokenizer.encode(text, add_special_tokens=False), *stops]
        bits = masks.mask(1, grammar, np.array(output, np.int32))
        assert bits is not None
        words = bits.numpy().view(np.uint32)
        ids = [i for i in range(VOCAB_SIZE) if words[i // 32] >> np.uint32(i % 32) & 1]
        return "".join(sorted({"." if i in STOPS else tokenizer.decode([i]) for i in ids}))

    assert allowed("") == "a"
    assert allowed("ab") == "cd"
    assert allowed("abc") == "."
    assert allowed("abc", EOS_TOKEN_ID) == "."
    assert allowed("abd") == "."
    assert allowed("a") == "b"
    assert allowed("axyz") == "."  # broken, so that nothing may follow
    assert allowed("ax") == "."
    assert allowed("a") == "b"
    assert allowed("ab") == "cd"


def test_a_grammar_says_what_it_forces(tiny_model: Callable[..., Path]) -> None:
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, STOPS)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    grammar = Grammar("json_schema", json.dumps(FORCING))

    def forced(text: str) -> str:
        output = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        return str(tokenizer.decode(masks.forced(1, grammar, output, 64)))

    assert forced("") == '{"a_long_name": '
    assert forced('{"a_lo') == 'ng_name": '
    assert forced('{"a_long_name": ') == ""  # true or false
    assert forced('{"a_long_name": t') == 'rue, "another_name": "'
    assert forced('{"a_long_name": true, "another_name": "x"}') == ""


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("draft_model", [False, True])
@pytest.mark.parametrize("variant", ["llama", "qwen3-5"])
def test_what_a_grammar_forces_is_drafted(
    tiny_model: Callable[..., Path], num_stages: int, draft_model: bool, variant: str
) -> None:
    """Fewer steps, the same bytes: beside a draft model, which guesses the rest, and without; also
    where layers keep a state."""
    skip_unless_available("cpu")
    grammar, folder = Grammar("json_schema", json.dumps(FORCING)), tiny_model(variant)
    kept = {} if variant == "llama" else {"num_saved_states": 8, "swap": "never"}
    settings = replace(BASE, num_stages=num_stages, **kept)  # type: ignore[arg-type]
    base = SamplingParams(90, temperature=1.0, logprobs=1, stop_token_ids=STOPS)
    requests = [
        Request(i, tuple(p), replace(base, seed=i, grammar=None if i == 2 else grammar), 0.0)
        for i, p in enumerate(make_prompts()[:4])
    ]
    plain, _, plans = serve(
        settings,
        make_chain(folder, num_stages, NUM_BLOCKS, backend="cpu"),
        requests=requests,
    )
    options = {"draft_model_path": str(tiny_model("llama")), "max_drafts": 8} if draft_model else {}
    config = replace(settings, drafter="lookup")
    if draft_model:
        config = replace(config, drafter="model", draft_model="itself")
    drafted, core, fewer = serve(
        config,
        make_chain(folder, num_stages, NUM_BLOCKS, backend="cpu", **options),
        requests=requests,
    )
    assert drafted == plain
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(tokenizer.decode(drafted[i].tokens[:-1])) for i in (0, 1, 3)]
    assert all({*text} == {"a_long_name", "another_name"} for text in texts)
    assert core.outcomes.num_accepted_drafts > 60
    steps = [
        sum(part.request_id == 0 for p in some for part in p.named_slices)
        for some in (plans, fewer)
    ]
    assert steps[1] < steps[0] / 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", 'root ::= "ab" root'),
        ("regex", "(ab){100000}"),
        (
            "json_schema",
            json.dumps(
                {
                    "type": "object",
                    "properties": {"a": {"$ref": "#"}},
                    "required": ["a"],
                    "additionalProperties": False,
                }
            ),
        ),
    ],
)
def test_a_forced_text_without_end_is_cut(
    tiny_model: Callable[..., Path], kind: str, text: str
) -> None:
    """Searching for its end would stop the stage and all its streams."""
    masks = GrammarMasks(tiny_model("llama"), VOCAB_SIZE, STOPS)
    grammar = Grammar(kind, text)
    tokens = masks.forced(1, grammar, np.zeros(0, np.int32), 8)
    assert len(tokens) == 8
    assert masks.forced(1, grammar, np.array(tokens, np.int32), 4) != ()
