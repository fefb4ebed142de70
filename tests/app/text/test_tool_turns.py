"""What templates leave out of tools, calls and results reaches the model as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.text.chat_template import ChatTemplate
from app.text.output.registry import choose_formats
from tests.app.text.families import FAMILIES, GEMMA_3, GLM_4, GRANITE_3, PHI_4_MINI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": number}}
    return {"id": f"call-{number}", "type": "function", "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": f"result {number}"}


CALLS = {"role": "assistant", "content": "", "tool_calls": [call(11), call(22)]}
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "Sums?"}, CALLS, result(22), result(11)]
Rendered = Callable[..., str]


@pytest.fixture
def rendered() -> Any:
    made: list[ChatTemplate] = []

    def render(source: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
        write = choose_formats([source]).tools
        assert write is not None
        made.append(ChatTemplate({"default": source}, {}, limit_s=5, write_calls=write.written))
        return made[-1].render(messages, tools=tools)

    yield render
    for template in made:
        template.close()


def test_granite_3_gets_calls_in_its_own_format(rendered: Rendered) -> None:
    text = rendered(GRANITE_3, TURNS, [TOOL])
    assert text.count("add") == 3  # declared once, by the template
    assert (
        '<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{"name": "add", "arguments": '
        '{"a": 11}}, {"name": "add", "arguments": {"a": 22}}]<|end_of_text|>\n'
        "<|start_of_role|>tool_response<|end_of_role|>result 11<|end_of_text|>\n"
        "<|start_of_role|>tool_response<|end_of_role|>result 22<|end_of_text|>\n"
    ) in text


def test_lfm2_gets_calls_in_its_own_format(rendered: Rendered) -> None:
    template = (
        "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>\n"
        "{% endif %}{% for m in messages %}{{ m.role }}\n{% if m.role == 'tool' %}"
        "<|tool_response_start|>{{ m.content }}<|tool_response_end|>{% else %}{{ m.content }}"
        "{% endif %}{{ '\n' }}{% endfor %}"
    )
    text = rendered(template, TURNS, [TOOL])
    assert text.count("List of tools") == 1
    assert (
        "assistant\n<|tool_call_start|>[add(a=11), add(a=22)]<|tool_call_end|>\n"
        "tool\n<|tool_response_start|>result 11<|tool_response_end|>\n"
    ) in text


def test_gemma_3_gets_results_in_the_turn_of_the_user(rendered: Rendered) -> None:
    later = [
        *TURNS,
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "33"},
        {"role": "user", "content": "Thanks"},
    ]
    assert rendered(GEMMA_3, later, [TOOL]) == (
        "<start_of_turn>user\nYou can call these functions:\n\n"
        '{"name": "add", "parameters": {"type": "object"}}\n\n'
        "To call functions, answer with calls only, as in:\n\n"
        "[name_of_function(name_of_argument='its value')]\n\nSums?<end_of_turn>\n"
        "<start_of_turn>model\n[add(a=11), add(a=22)]<end_of_turn>\n"
        '<start_of_turn>user\n<tool_response>\n{"name": "add", "content": "result 11"}\n'
        '</tool_response>\n\n<tool_response>\n{"name": "add", "content": "result 22"}\n'
        "</tool_response>\n\nAnd?<end_of_turn>\n"
        "<start_of_turn>model\n33<end_of_turn>\n<start_of_turn>user\nThanks<end_of_turn>\n"
        "<start_of_turn>model\n"
    )


def test_glm_4_gets_results_in_a_role_of_their_own(rendered: Rendered) -> None:
    text = rendered(GLM_4, TURNS, [TOOL])
    assert text.count("## add") == 1  # declared by the template
    assert text.endswith(
        '<|user|>\nSums?<|assistant|>\nadd\n{"a": 11}\nadd\n{"a": 22}<|observation|>\nresult 11'
        "<|observation|>\nresult 22<|assistant|>"
    )


def test_phi_4_mini_gets_tools_in_its_system_message(rendered: Rendered) -> None:
    told = '<|tool|>[{"name": "add", "parameters": {"type": "object"}}]<|/tool|><|end|>'
    assert rendered(PHI_4_MINI, TURNS, [TOOL]) == (
        f"<|system|>You are a helpful assistant with some tools.{told}<|user|>Sums?<|end|>"
        '<|assistant|><|tool_call|>[{"name": "add", "arguments": {"a": 11}}, '
        '{"name": "add", "arguments": {"a": 22}}]<|/tool_call|><|end|>'
        "<|tool_response|>result 11<|end|><|tool_response|>result 22<|end|><|assistant|>"
    )
    system = {"role": "system", "content": "Be brief."}
    assert rendered(PHI_4_MINI, [system, TURNS[0]], [TOOL]) == (
        f"<|system|>Be brief.{told}<|user|>Sums?<|end|><|assistant|>"
    )
    assert rendered(PHI_4_MINI, TURNS[:1]) == "<|user|>Sums?<|end|><|assistant|>"


def test_a_template_without_tools_gets_calls_like_hermes(rendered: Rendered) -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    told = {**CALLS, "content": "I add.", "tool_calls": [call(11)]}
    assert rendered(plain, [TURNS[0], told, result(11)]) == (
        '<user>Sums?<assistant>I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 11}}\n'
        "</tool_call><tool>result 11"
    )
    system = {"role": "system", "content": "Be brief."}
    text = rendered(plain, [system, TURNS[0]], [TOOL])
    assert text.startswith("<system>You can call these functions:")
    assert text.endswith("\n</tool_call>\n\nBe brief.<user>Sums?")


@pytest.mark.parametrize(
    "family", sorted(set(FAMILIES) - {"gemma_3", "glm_4", "granite_3", "phi_4_mini"})
)
def test_nothing_changes_where_the_template_shows_all(rendered: Rendered, family: str) -> None:
    text = rendered(FAMILIES[family], TURNS, [TOOL])
    told = family == "r1"  # whose template has no tools
    assert ("You can call these functions" in text) == told
    for once in ("11", "22", "result 11", "result 22"):
        assert text.replace("result 11", "").replace("result 22", "").count(once) == (
            "result" not in once
        )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_tool_may_have_no_parameters(rendered: Rendered, family: str) -> None:
    tool = {"type": "function", "function": {"name": "now_or_never"}}
    assert "now_or_never" in rendered(FAMILIES[family], TURNS[:1], [tool])


def test_messages_without_calls_stay_as_they_are(rendered: Rendered) -> None:
    text = rendered(GEMMA_3, TURNS[:1])
    assert text == "<start_of_turn>user\nSums?<end_of_turn>\n<start_of_turn>model\n"


def test_what_the_template_refuses_in_any_form_stays_refused(rendered: Rendered) -> None:
    refused = "{{ raise_exception('no tools') if messages|length > 1 }}"
    with pytest.raises(Exception, match="no tools"):
        rendered(refused, TURNS, [TOOL])


def test_a_result_without_a_call_has_no_name(rendered: Rendered) -> None:
    text = rendered(GEMMA_3, [TURNS[0], {"role": "assistant", "content": "Hm."}, result(11)])
    assert '<tool_response>\n{"content": "result 11"}\n</tool_response>' in text
