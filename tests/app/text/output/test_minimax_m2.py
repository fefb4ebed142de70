"""MiniMax-M2 and DeepSeek-V3.2: names in attributes, templates, and calls that break off."""

from __future__ import annotations

import json

import pytest

from app.text.output.minimax_m2 import DeepSeekV4, DeepSeekV32, Dots, MiniCPM5, MiniMaxM2
from app.text.output.pieces import AnswerPieces
from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.step3 import Step3
from app.text.output.thinking import Think
from tests.app.text.output.answers_by_name import (
    DSML,
    DSML_ADD,
    DSML_END,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    VALUE_END,
)
from tests.app.text.output.reading import TOOLS, read
from tests.app.text.output.test_held_calls import takes
from tests.app.text.output.test_tags import CountedSource

FORMATS = OutputFormats(MiniMaxM2, Think)
BEGUN = '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
END = "</invoke>\n</minimax:tool_call>"


def test_its_template_shows_both() -> None:
    template = "{%- set begin = '<minimax:tool_call>' -%}]~b]ai\\n<think>\\n"
    assert choose_formats([template]) == FORMATS


def test_reasoning_and_a_call() -> None:
    found = read(FORMATS, list(f"I add.\n</think>\n\n{BEGUN}{END}"), in_reasoning=True)
    assert found == ("", "I add.", [("add", {"a": 1})])


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    assert read(FORMATS, list(f"{BEGUN}<parameter>x{END}Hm.")) == ("Hm.", "", [("add", {"a": 1})])
    assert read(FORMATS, list(f"{BEGUN}x</invoke>Hm.")) == ("Hm.", "", [("add", {"a": 1})])


def test_a_name_may_hold_quotation_marks() -> None:
    given = [("add", {'a"b': 1})]
    schema = json.dumps({"type": "object", "properties": {'a"b': {"type": "integer"}}})
    written = MiniMaxM2.written(given)
    assert takes("minimax_m2", written, special=True, schemas={"add": schema})
    assert read(FORMATS, list(written)) == ("", "", given)


def test_a_held_call_has_its_required_parameters_once() -> None:
    assert takes("minimax_m2", BEGUN + END, special=False)
    again = '<parameter name="a">1</parameter>\n'
    assert not takes("minimax_m2", BEGUN + again + END, special=False)
    assert not takes("minimax_m2", BEGUN.replace(again, "") + END, special=False)


def test_the_marks_around_all_calls_tell_deepseeks_versions() -> None:
    assert choose_formats(["{% set dsml = '｜DSML｜' %}<think>"]).tools is DeepSeekV32
    assert choose_formats(["'<｜DSML｜function_calls>'"]).tools is DeepSeekV32
    assert choose_formats(["'<｜DSML｜tool_calls>'<think>"]) == OutputFormats(DeepSeekV4, Think)


def test_a_call_of_deepseek_that_breaks_off_keeps_its_whole_arguments() -> None:
    formats = OutputFormats(DeepSeekV32, Think)
    begun = f'{DSML}\n{INVOKE}add">\n{PARAMETER}a" string="false">1{VALUE_END}\n'
    answer = f'I add.</think>{begun}{PARAMETER}b">x{VALUE_END}{INVOKE_END}\n{DSML_END}Hm.'
    found = read(formats, list(answer), in_reasoning=True)
    assert found == ("Hm.", "I add.", [("add", {"a": 1})])


@pytest.mark.parametrize("special", [True, False])
def test_texts_and_other_values_of_deepseek_are_held_apart(special: bool) -> None:
    def call(value: str) -> str:
        return f'{DSML}\n{INVOKE}plot">\n{PARAMETER}{value}{VALUE_END}\n{INVOKE_END}\n{DSML_END}'

    assert takes("deepseek_v32", f"So: {DSML}\n{DSML_ADD}\n{DSML_END} Ok.", special=special)
    for taken in ('title" string="true">null', 'title" string="false">null'):
        assert takes("deepseek_v32", call(taken), special=special)
    for taken in ('style" string="true">[', 'style" string="false">["x", {}]'):
        assert takes("deepseek_v32", call(taken), special=special)
    for refused in (
        *('title" string="false">x', 'grid" string="true">true', 'grid">true'),
        *('style" string="false">[', 'scale" string="false">"1"'),
    ):
        assert not takes("deepseek_v32", call(refused), special=special)


CPM = OutputFormats(MiniCPM5, None)


def cpm(value: str, more: str = "") -> str:
    return f'<function name="add"><param name="b">{value}</param>{more}</function>'


@pytest.mark.parametrize(
    "text", ["x", "</param>", "<![CDATA[", "]]>", "a</param></function>\n", ""]
)
def test_a_value_of_minicpm5_in_its_wrapping_ends_with_it(text: str) -> None:
    written = cpm(f"<![CDATA[{text}]]>", '<param name="a">1</param>')
    assert read(CPM, list(written)) == ("", "", [("add", {"b": text, "a": 1})])
    given = [("add", {"a": 1, "b": text})]
    assert read(CPM, [MiniCPM5.written(given)]) == ("", "", given)


@pytest.mark.parametrize(
    "text", ["]]></param>", "</param>]]>", "<![CDATA[]]><![CDATA[", "</param>]]]"]
)
def test_a_value_of_minicpm5_holds_the_end_of_its_wrapping_between_two(text: str) -> None:
    written = MiniCPM5.written([("add", {"b": text, "a": 1})])
    assert read(CPM, list(written)) == ("", "", [("add", {"b": text, "a": 1})])
    for schema in ({"type": "string"}, {"enum": [text]}):
        schemas = {"add": json.dumps({"properties": {"b": schema, "a": {}}})}
        assert takes("minicpm5", written, special=False, schemas=schemas)


@pytest.mark.parametrize("blanks", ["\n", " \r\n\t"])
def test_blanks_may_follow_the_wrapping(blanks: str) -> None:
    for text in ("x ", "]]> x", f"]]>{blanks}x", f"]]>{blanks}"):
        written = cpm(f"<![CDATA[{text}]]>{blanks}", '<param name="a">1</param>')
        assert read(CPM, list(written)) == ("", "", [("add", {"b": text, "a": 1})])
    twice = cpm(f"<![CDATA[x]]>{blanks}</param>y]]>")  # ends at the first
    assert read(CPM, [twice], by_argument=False) == (twice, "", [])
    assert not takes("minicpm5", twice, special=False)


def test_names_of_minicpm5_may_stand_between_single_quotation_marks() -> None:
    single = "<function name='add'><param name='a'>1</param><param name='b'>\"</param></function>"
    for written in (single, single.replace("name='a'", 'name="a"')):
        assert read(CPM, list(written)) == ("", "", [("add", {"a": 1, "b": '"'})])
    for none in (single.replace("'add'", "'add\""), single.replace("'add'", "add")):
        assert read(CPM, list(none)) == (none, "", [])
    assert not takes("minicpm5", single, special=True)


def test_a_wrapping_without_its_end_is_of_the_value() -> None:
    found = read(CPM, list(cpm("<![CDATA[x", '<param name="a">1</param>')))
    assert found == ("", "", [("add", {"b": "<![CDATA[x", "a": 1})])


@pytest.mark.parametrize("special", [True, False])
def test_a_text_of_minicpm5_is_held_to_its_schema_also_in_its_wrapping(special: bool) -> None:
    def takes_value(value: str, schema: object) -> bool:
        schemas = {"add": json.dumps({"type": "object", "properties": {"b": schema}})}
        return takes("minicpm5", cpm(value), special=special, schemas=schemas)

    pattern = {"type": "string", "pattern": "^[a-z!]+$"}
    for taken in ("ab", "<![CDATA[ab]]>", "<![CDATA[!]]>"):
        assert takes_value(taken, pattern)
    any_capitals = {"type": "string", "pattern": "C"}
    for refused in ("<![CDATA[aB]]>", "<![CDATA[]]>", "<![CDATA[ab", "ab]]>"):
        assert not takes_value(refused, pattern)
    assert takes_value("<![CDATA[aC]]>", any_capitals)
    assert not takes_value("<![CDATA[a]]>", any_capitals)
    for taken in ("", "x", "<b>", "<![CDATA[]]>", "<![CDATA[x\n<b>]]>"):
        assert takes_value(taken, {"type": "string"})
    assert not takes_value("<![CDATA[x", {"type": "string"})
    listed = {"enum": ["<![CDATA[", "x"]}
    assert takes_value("<![CDATA[<![CDATA[]]>", listed)
    assert takes_value("x", listed)
    assert not takes_value("<![CDATA[", listed)
    lists = {"type": ["string", "array"]}
    assert takes_value("<![CDATA[x]]>", lists)
    assert not takes_value("<![CDATA[ [x]]>", lists)


ADD_ONE = ("add", {"a": 1})


@pytest.mark.parametrize("one", [MiniMaxM2, Dots, Step3, DeepSeekV32, DeepSeekV4])
@pytest.mark.parametrize("more", [{}, {"a": 2}], ids=["undeclared", "repeated"])
def test_a_value_of_a_malformed_call_may_speak_of_calls(
    one: type[MiniMaxM2], more: dict[str, int]
) -> None:
    quoted = one.written([("now", {})])
    tool = "add" if more else "rm"
    answer = one.written([ADD_ONE, (tool, {"a": 1, "b": quoted}), ADD_ONE])
    value = f"{quoted}{one.tags.end}"
    answer = answer.replace(value, f"{value}{one.tags.written(more)}")
    for chunks in ([answer], list(answer)):
        found = read(OutputFormats(one, None), chunks, by_argument=False)
        assert found[2] == [ADD_ONE, ADD_ONE]
        assert quoted in found[0]


def test_values_without_an_end_are_read_in_linear_time() -> None:
    one = '<invoke name="add"><parameter name="a">1</invoke>'
    answer = f"<minimax:tool_call>{one * 5000}"
    assert read(OutputFormats(MiniMaxM2, None), [answer]) == (answer, "", [])
    source, out = CountedSource(answer), AnswerPieces(TOOLS, by_argument=True)
    assert list(MiniMaxM2().read(source, out)) == []
    assert source.num_searched <= 5 * len(answer)
