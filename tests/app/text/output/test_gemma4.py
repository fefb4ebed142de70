"""Gemma 4 and FunctionGemma: the channel of reasoning, and calls that break off or are held."""

from __future__ import annotations

import json

from app.text.output.gemma4 import FunctionGemma, Gemma4, Gemma4Think
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes

FORMATS = OutputFormats(Gemma4, Gemma4Think)
CALL = "<|tool_call>call:add{a:1}<tool_call|>"


def test_reasoning_and_a_call() -> None:
    answer = f"<|channel>thought\nI add.\n<channel|>{CALL}"
    assert read(FORMATS, list(answer)) == ("", "I add.", [("add", {"a": 1})])
    assert read(FORMATS, list("<|channel>thought\n<channel|>Well.")) == ("Well.", "", [])
    assert read(FORMATS, list("A <|channel> is one.")) == ("A <|channel> is one.", "", [])


def test_the_prompt_begins_reasoning_or_leaves_it_out() -> None:
    turn = "<|turn>model\n"
    assert Gemma4Think.begins_in(f"{turn}<|channel>thought\n")
    assert not Gemma4Think.begins_in(turn)
    assert Gemma4Think.marks(turn) == ("<|channel>thought", "<channel|>")
    assert Gemma4Think.marks(f"{turn}<|channel>thought\n<channel|>") == ()
    found = read(FORMATS, list(f"I add.<channel|>{CALL}"), in_reasoning=True)
    assert found == ("", "I add.", [("add", {"a": 1})])


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    begun = "<|tool_call>call:add{a:1,"
    assert read(FORMATS, list(f"{begun}b:x}}<tool_call|>Hm.")) == ("Hm.", "", [("add", {"a": 1})])
    text, _, calls = read(FORMATS, list(f'{begun}b:<|"|>x'))
    assert (text, calls) == (',b:<|"|>x', [("add", {"a": 1})])


def test_keys_that_are_no_words_stand_between_the_marks_of_texts() -> None:
    given = [("plot", {"style": {"line width": 2, "a:b": ["x,y", None, True]}, "scale": 1e-05})]
    written = Gemma4.written(given)
    assert '{<|"|>line width<|"|>:2,' in written
    assert read(FORMATS, list(written)) == ("", "", given)


def test_held_calls_have_their_arguments_in_json() -> None:
    begin, end = "So: <|tool_call>call:plot", "<tool_call|>"
    given = {"points": [[1, 2], {"x y": 'a"}<|'}], "scale": -1.5e-05, "grid": True, "title": None}
    for written in (json.dumps(given), "{}"):
        for special in (True, False):
            assert takes("gemma4", f"{begin}{written}{end}", special=special)
        found = read(FORMATS, list(f"{begin}{written}{end}"))
        assert found == ("So: ", "", [("plot", json.loads(written))])
    for refused in ('{"scale": "x"}', "{scale:1}", '{"grid": true}so', '"{}"'):
        assert not takes("gemma4", f"{begin}{refused}{end}", special=True)
    assert not takes("gemma4", CALL.replace("add", "rm"), special=True)
    assert takes("gemma4", CALL.replace("a:1", '"a": 1') * 2, special=True)


def test_functiongemma_has_other_marks() -> None:
    template = "<start_of_turn>developer\n<start_function_declaration>declaration:"
    assert choose_formats([template]) == OutputFormats(FunctionGemma, None)
    formats = OutputFormats(FunctionGemma, None)
    begun = "<start_function_call>call:add{a:1,"
    answer = f"{begun}b:x}}<end_function_call>Hm.{begun}b:<escape>}}<escape>}}<end_function_call>"
    found = read(formats, list(answer))
    assert found == ("Hm.", "", [("add", {"a": 1}), ("add", {"a": 1, "b": "}"})])
    for special in (True, False):
        for arguments, is_taken in (('{"a": 1}', True), ('{"a": "x"}', False), ("{a:1}", False)):
            written = f"So: <start_function_call>call:add{arguments}<end_function_call>"
            assert takes("functiongemma", written, special=special) == is_taken
