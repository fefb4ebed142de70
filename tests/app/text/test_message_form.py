"""What each family's template refuses of OpenAI's form, and takes in its own."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from app.text.message_form import MessageForm
from app.text.template_worker import render
from tests.app.text.families import FAMILIES

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITHOUT_TOOLS = ("gemma_3", "glm_4", "granite_3", "phi_4_mini")  # or calls, of OpenAI's form
# Families whose template takes parallel calls with ids of OpenAI's kind as they are.
PLAIN = (
    "apertus",
    "deepseek_v32",
    "deepseek_v4",
    "functionary",
    "functiongemma",
    "gigachat3",
    "internlm",
    "solar_open",
    "dots",
    "step3",
    "hunyuan_v3_open",
    "kimi_k3",
    "plamo3",
    "granite_20b",
    "longcat",
    "minicpm5",
    "xlam",
    "command_r7b",
    "hermes",
    "qwen3",
    "qwen3_coder",
    "glm_45",
    "granite_4",
    "llama_3_2",
    "llama_4",
    "llama_4_json",
    "magistral",
    "gemma_4",
    "minimax_m2",
    "seed_oss",
)


def call(number: int, arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": f"call-{number:024d}", "type": "function", "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call-{number:024d}", "content": f"result {number}"}


CALLS = {"role": "assistant", "content": "", "tool_calls": [call(1, {"a": 11}), call(2, {"a": 22})]}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Sums?"},
    {**CALLS, "reasoning_content": "Two of them."},
    result(2),  # in another order than the calls
    result(1),
]


def written(family: str, messages: list[dict[str, Any]], tools: Any = None) -> dict[str, str]:
    return render(
        {
            "template": FAMILIES[family],
            "variables": {
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": True,
                "eos_token": "</s>",
            },
        }
    )


def fitted(family: str, messages: list[dict[str, Any]]) -> str:
    form = MessageForm.of(FAMILIES[family])
    answer = written(family, form.messages(messages), form.tools([ADD]))
    assert "text" in answer, answer
    return answer["text"]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WITHOUT_TOOLS)))
def test_parallel_calls_and_their_results_reach_the_model(family: str) -> None:
    given = copy.deepcopy(TURNS)
    text = fitted(family, given)
    assert given == TURNS
    for once in ("Be brief.", "Sums?", "11", "22", "result 1", "result 2"):
        assert text.count(once) == 1, once
    if family in ("llama_3", "gpt_oss"):  # which take one call at a time, each with its result
        found = [text.index(part) for part in ("11", "result 1", "22", "result 2")]
        assert found == sorted(found)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WITHOUT_TOOLS) - set(PLAIN)))
def test_the_same_turns_unchanged_are_refused_or_lose_a_call(family: str) -> None:
    answer = written(family, TURNS, [ADD])
    assert "text" not in answer or not {"11", "22"} <= set(re.findall(r"\d+", answer["text"]))


@pytest.mark.parametrize("family", PLAIN)
def test_other_families_get_what_was_given(family: str) -> None:
    form = MessageForm.of(FAMILIES[family])
    plain = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in TURNS]
    assert form.messages(plain) == plain
    assert form.tools([ADD]) == [ADD]


@pytest.mark.parametrize(
    "family", ["command_r7b", "qwen3", "glm_45", "magistral", "gpt_oss", "gemma_4"]
)
def test_reasoning_between_calls_is_kept(family: str) -> None:
    assert fitted(family, TURNS).count("Two of them.") == 1


@pytest.mark.parametrize("field", ["message.reasoning", "message.thought", "message['thinking']"])
def test_reasoning_has_the_name_that_the_template_reads(field: str) -> None:
    (message,) = MessageForm.of(f"{{{{ {field} }}}}").messages([TURNS[2]])
    name = re.findall(r"\w+", field)[-1]
    assert message[name] == "Two of them."
    assert "reasoning_content" not in message


def test_reasoning_and_text_before_a_call_are_one_where_there_is_room_for_one() -> None:
    told = {**TURNS[2], "content": "I add."}
    text = fitted("gpt_oss", [*TURNS[:2], told, *TURNS[3:]])
    assert "<|channel|>analysis<|message|>Two of them.\n\nI add.<|end|>" in text
    answer = {"role": "assistant", "content": "33", "reasoning_content": "Done."}
    text = fitted("gpt_oss", [*TURNS[:2], told, *TURNS[3:], answer])
    assert "final<|message|>33<|end|>" in text


def test_ids_are_short_where_the_template_counts_their_letters() -> None:
    message, back = MessageForm.of(FAMILIES["mistral"]).messages([TURNS[2], result(2)])
    ids = [one["id"] for one in message["tool_calls"]]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    assert len(set(ids)) == 2
    assert back["tool_call_id"] == ids[1]
    own = {**call(1, {}), "id": "abcDEF123"}
    (kept,) = MessageForm.of(FAMILIES["mistral"]).messages([{**CALLS, "tool_calls": [own]}])
    assert kept["tool_calls"] == [own]


def test_arguments_are_text_where_the_template_joins_them_to_text() -> None:
    text = fitted("r1", TURNS)
    assert '```json\n{"a": 11}\n```' in text
    assert text.count("<|Assistant|>") == 1  # none for a text that is not there


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_leading_system_messages_are_one(family: str) -> None:
    two = [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}]
    assert "Be brief.\n\nBe kind." in fitted(family, [*two, {"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("family", ["mistral", "mistral_2506", "magistral", "gemma_3"])
def test_turns_that_do_not_alternate_stay_refused(family: str) -> None:
    twice = [{"role": "user", "content": "Hi"}] * 2
    answer = written(family, MessageForm.of(FAMILIES[family]).messages(twice))
    assert answer == {"refused": "user and assistant take turns"}


@pytest.mark.parametrize("family", ["hermes", "qwen3", "qwen3_coder", "granite_4", "gpt_oss"])
def test_results_without_a_call_stay_refused(family: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, result(1)]
    answer = written(family, MessageForm.of(FAMILIES[family]).messages(turns))
    assert answer == {"refused": "a result without a call"}


@pytest.mark.parametrize("missing", [{}, {"parameters": {}}, {"parameters": None}])
def test_a_tool_without_parameters_has_an_object_of_none(missing: dict[str, Any]) -> None:
    for family in sorted(FAMILIES):
        tools = MessageForm.of(FAMILIES[family]).tools([{"function": {"name": "now", **missing}}])
        assert tools is not None
        assert tools[0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_a_result_that_no_call_asked_for_stays() -> None:
    text = fitted("llama_3", [*TURNS, {"role": "tool", "tool_call_id": "x", "content": "stray"}])
    assert text.index("result 2") < text.index("stray")


def test_ids_that_stand_for_names_hold_them() -> None:
    """In the manner of Kimi K2."""
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or () %}"
        "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
        "{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "{% if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n"
        "{{ message.content }}\n{% endif %}{% endfor %}"
    )
    given = [*copy.deepcopy(TURNS), {**CALLS, "tool_calls": [call(1, {})]}, result(1), result(7)]
    before = copy.deepcopy(given)
    messages = MessageForm.of(template).messages(given)
    text = render({"template": template, "variables": {"messages": messages}})["text"]
    assert given == before
    assert re.findall(r"call_begin\|>(\S+?)<", text) == [f"functions.add:{n}" for n in range(3)]
    assert re.findall(r"Return of (\S+)\n(.*)", text) == [
        ("functions.add:1", "result 2"),
        ("functions.add:0", "result 1"),
        ("functions.add:2", "result 1"),
        (f"call-{7:024d}", "result 7"),
    ]
