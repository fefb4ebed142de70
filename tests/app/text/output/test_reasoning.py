"""Reasoning told from the answer, and its tokens counted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from actors.scheduling.request import FinishReason
from app.api.endpoints.output import read_delta
from app.engine_client.client import TokenChunk
from app.text.incremental import TableDetokenizer, TextRules, TextStream
from app.text.output.cohere import Cohere, CohereThink
from app.text.output.granite import Granite
from app.text.output.harmony import Harmony, HarmonyChannels
from app.text.output.hermes import Hermes
from app.text.output.pieces import AnswerPiece, Text, gathered
from app.text.output.registry import OutputFormats
from app.text.output.thinking import GraniteThink, MistralThink, Think
from tests.app.text.output.reading import CUTS, TOOLS, Read, cut, read

THINK = OutputFormats(Hermes, Think)
COHERE = OutputFormats(Cohere, CohereThink)
GRANITE = OutputFormats(Granite, GraniteThink)
HARMONY = OutputFormats(Harmony, HarmonyChannels)
CALL = '<tool_call>{"name": "now"}</tool_call>'
CHANNELS = (
    "<|channel|>analysis<|message|>First a <b>.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>'
    "analysis<|message|>Then c.<|end|><|start|>assistant<|channel|>final<|message|>So: 1 < 2."
    "<|return|>"
)
RESUMED = (
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>analysis"
    "<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"
)

PLAN = "<|START_THINKING|>A\nplan.<|END_THINKING|>"
ACTION = '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>'

CASES = [
    (THINK, False, "<think>\nOne.\n\nTwo.\n</think>\n\nYes.", ("Yes.", "One.\n\nTwo.", [])),
    (THINK, False, f"<think>So</think>{CALL}", ("", "So", [("now", {})])),
    (THINK, False, f"<think>{CALL}</think>", ("", CALL, [])),
    (THINK, False, "\n<think></think>Yes.", ("Yes.", "", [])),
    (THINK, False, "Yes.<think>No.</think>", ("Yes.<think>No.</think>", "", [])),
    (THINK, False, " <thing>", (" <thing>", "", [])),
    (THINK, False, "<think>cut off </thi", ("", "cut off </thi", [])),
    (THINK, True, "One.\n</think>\n\nYes.", ("Yes.", "One.", [])),
    (THINK, True, "never ends\n", ("", "never ends", [])),
    (THINK, True, "\n<think>\nOne <think>.\n</think>\n\nYes.", ("Yes.", "One <think>.", [])),
    (THINK, True, "<thin", ("", "<thin", [])),
    (THINK, True, "</think>Yes.", ("Yes.", "", [])),
    (OutputFormats(None, MistralThink), False, "[THINK]Hm[/THINK]Yes.", ("Yes.", "Hm", [])),
    (
        GRANITE,
        False,
        "<think>Hm</think>\n<response>Hi <b>.</response>",
        ("Hi <b>.", "Hm", []),
    ),
    (
        GRANITE,
        False,
        '<think>Hm</think><response>So.</response><|tool_call|>[{"name": "now"}]',
        ("So.", "Hm", [("now", {})]),
    ),
    (GRANITE, False, "<think>Hm</think><response>cut off</resp", ("cut off</resp", "Hm", [])),
    (
        GRANITE,
        False,
        "<think>Hm</think><response>A <response>x</response>, </response> \n</response>\n",
        ("A <response>x</response>, </response> \n\n", "Hm", []),
    ),
    (GRANITE, False, "<response>XML</response>", ("<response>XML</response>", "", [])),
    (GRANITE, False, "<think>Hm</think>Hi</response>", ("Hi</response>", "Hm", [])),
    (COHERE, False, f"{PLAN}{ACTION}", ("", "A\nplan.", [("now", {})])),
    (
        COHERE,
        False,
        f"{PLAN}<|START_RESPONSE|>Hi <b>.<|END_RESPONSE|>",
        ("Hi <b>.", "A\nplan.", []),
    ),
    (COHERE, False, "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", ("Hi.", "", [])),
    (COHERE, False, "\n<|START_RESPONSE|>cut off<|END_RES", ("cut off<|END_RES", "", [])),
    (COHERE, False, " Unmarked. <|START_RES", (" Unmarked. <|START_RES", "", [])),
    (COHERE, False, f"{ACTION}<|START_RESPONSE|>Hi.<|END_RESPONSE|>", ("Hi.", "", [("now", {})])),
    (COHERE, False, f"<|START_RESPONSE|>Hi.<|END_RESPONSE|>{ACTION}", ("Hi.", "", [("now", {})])),
    (COHERE, False, f"{PLAN}So: <|START_RESPONSE|>Hi.", ("So: Hi.", "A\nplan.", [])),
    (COHERE, False, "Hi.<|END_RESPONSE|>", ("Hi.", "", [])),
    (COHERE, True, f"plan<|END_THINKING|>{ACTION}", ("", "plan", [("now", {})])),
    (OutputFormats(None, None), False, "<think>Hm</think>Yes.", ("<think>Hm</think>Yes.", "", [])),
    (HARMONY, False, CHANNELS, ("So: 1 < 2.", "First a <b>.\nThen c.", [("add", {"a": 1})])),
    (HARMONY, False, RESUMED, ("Let me see.\nHi", "Hm.", [])),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>Three.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Four.",
        ("Three.\nFour.", "One.\nTwo.", []),
    ),
    (HARMONY, False, "<|channel|>analysis<|message|>cut off", ("", "cut off", [])),
    (HARMONY, False, "<|channel|>ana", ("", "", [])),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi",
        ("Hi", "Hm.", []),
    ),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>Hm.<|channel|>commentary to=functions.now<|message|>{}"
        "<|channel|>final<|message|>Two <|channel|> tokens<|return|>",
        ("Two <|channel|> tokens", "Hm.", [("now", {})]),
    ),
    (HARMONY, False, "No channel.", ("No channel.", "", [])),
]


@pytest.mark.parametrize(("formats", "begun", "answer", "wanted"), CASES)
@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_reasoning_is_told_apart_in_any_cut(
    formats: OutputFormats, begun: bool, answer: str, wanted: object, cuts: list[int]
) -> None:
    assert read(formats, cut(answer, cuts), in_reasoning=begun) == wanted
    assert read(formats, list(answer), in_reasoning=begun) == wanted


@pytest.mark.parametrize(
    ("formats", "begun", "tokens", "num_reasoning"),
    [
        (THINK, False, ["<think>", "\n", "So", ".", "</think>", "\n\n", "Yes", "."], 5),
        (THINK, False, ["<th", "ink>", "So", "</", "think>", "Yes"], 5),
        (THINK, True, ["So", "</think>", "Yes"], 2),
        (THINK, True, ["\n", "<th", "ink>", "So", "</think>", "Yes"], 5),
        (THINK, False, ["<th", "ing>", "Yes"], 0),
        (
            HARMONY,
            False,
            [
                "<|channel|>",
                "analysis",
                "<|message|>",
                "So",
                "<|end|>",
                "<|start|>",
                "assistant",
                "<|channel|>",
                "final",
                "<|message|>",
                "Yes",
            ],
            5,
        ),
    ],
)
def test_reasoning_tokens_are_counted(
    formats: OutputFormats, begun: bool, tokens: list[str], num_reasoning: int
) -> None:
    for groups in ([tokens], [[token] for token in tokens]):
        parser = formats.parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=begun)
        for group in groups:
            parser.push(group)
        parser.finish()
        assert parser.num_reasoning_tokens == num_reasoning


@pytest.mark.parametrize(
    ("answer", "max_tokens", "stops", "num_reasoning"),
    [
        ("<think>So</think>Yes", None, (), 17),
        ("<think>So", None, (), 9),
        ("<think>So, on and on", 5, (), 0),  # cut off before it was known to be reasoning
        ("<think>So, on and on", 12, (), 12),
        ("<think>Soé", 10, (), 10),  # within a character
        ("<think>Soé", 10, ("é!",), 10),
        ("<think>So, on and on", 12, (", on\n",), 12),  # a stop string is held back
        ("<think>So, on and on", 20, (", on",), 13),
        ("<think>So</think>Yes", 16, ("</think>!",), 16),
        ("<think>So</think>Yes", 17, ("</think>!",), 17),
        ("<think>So</think>Yes", 19, ("</think>Yes!",), 19),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_reasoning_has_no_more_tokens_than_the_answer(
    answer: str, max_tokens: int | None, stops: tuple[str, ...], num_reasoning: int, cuts: list[int]
) -> None:
    """However the engine's chunks are cut, the end token alone in one or not; a byte a token."""
    tokens = [*answer.encode(), 256][:max_tokens]
    reason = FinishReason.STOP if max_tokens is None else FinishReason.LENGTH
    rules = TextRules(stops, frozenset({256}), by_token=True)
    bytes_of = [bytes([byte]) for byte in range(256)]
    places = [0, *sorted(min(place, len(tokens) - 1) for place in cuts), len(tokens)]
    for begins in (places, range(len(tokens) + 1)):
        stream = TextStream(0, rules, TableDetokenizer(bytes_of))
        parser = THINK.parser({}, is_forced=False, by_argument=True, in_reasoning=False)
        for begin, end in pairwise(begins):
            ended = reason if end == len(tokens) else None
            if not stream.finished:
                read_delta(
                    parser, stream.detokenize(TokenChunk(0, begin, tokens[begin:end], ended))
                )
        assert parser.num_reasoning_tokens == num_reasoning <= stream.num_tokens


def test_the_answer_behind_the_reasoning_needs_no_parser() -> None:
    parser = OutputFormats(None, Think).parser(
        {}, is_forced=False, by_argument=True, in_reasoning=False
    )
    seen = []
    for token in ["<think>", "So", "</think>", "\n\n", "Yes", "."]:
        parser.push([token])
        seen.append(parser.is_transparent)
    assert seen == [False, False, False, False, True, True]


@pytest.mark.parametrize(("formats", "begun", "answer", "wanted"), CASES)
@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_past_the_reasoning_the_parser_may_be_left_out(
    formats: OutputFormats, begun: bool, answer: str, wanted: Read, cuts: list[int]
) -> None:
    """As the streamed chat does; a request without tools, whose calls are text."""
    whole = read(formats, [answer], tools={}, in_reasoning=begun)
    assert whole == wanted or wanted[2]
    for texts in (cut(answer, cuts), list(answer)):
        parser = formats.parser({}, is_forced=False, by_argument=True, in_reasoning=begun)
        found: list[AnswerPiece] = []
        for text in texts:
            found += [Text(text)] if parser.is_transparent else parser.push([text])
        assert gathered([*found, *parser.finish()]) == whole


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ],
)
def test_a_template_may_begin_the_reasoning(prompt: str, begun: bool) -> None:
    assert Think.begins_in(prompt) is begun
