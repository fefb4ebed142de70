"""Tools, calls and results as plain text, where a chat template leaves them out.

Many templates never read `tool_calls`, refuse the role `tool` or skip it, or do not mention tools.
What a template shows is found by rendering a probe with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from app.text.output.json_text import Calls

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_RESULT_ROLES: Final = ("tool", "tool_response", "observation", "user")
_DECLARED, _CALLED, _ANSWERED = "probe_declared", "probe called", "probe answered"
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _DECLARED,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_ASKED: Final[Messages] = [{"role": "user", "content": "probe"}]
_TURNS: Final[Messages] = [
    *_ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "probe0000",
                "type": "function",
                "function": {"name": _DECLARED, "arguments": {"text": _CALLED}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "probe0000", "content": _ANSWERED},
]


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """What becomes text, so that a template shows it.

    write: writes calls as the model does. tools_in_text: the template leaves out declared tools,
    calls_in_text: an assistant's calls. result_role: whose turn holds a result.
    """

    write: Callable[[Calls], str]
    tools_in_text: bool = False
    calls_in_text: bool = False
    result_role: str = "tool"

    @classmethod
    def of(
        cls,
        shown: Callable[[Messages, Tools | None], str],
        write: Callable[[Calls], str],
        *,
        with_tools: bool,
    ) -> ToolTurns:
        """The first way in which a template shows all, or OpenAI's if none does.

        shown: renders messages and tools; "" for what the template refuses. with_tools: find it for
        conversations with declared tools.
        """
        tools = [_TOOL] if with_tools else None
        in_text = with_tools and _DECLARED not in (shown(_ASKED, tools) or _DECLARED)
        for calls_in_text, role in product((False, True), _RESULT_ROLES):
            turns = cls(write, in_text, calls_in_text, role)
            text = shown(turns.messages(_TURNS, tools), turns.tools(tools))
            if _CALLED in text and _ANSWERED in text:
                return turns
        return cls(write, in_text)

    def tools(self, given: Tools | None) -> Tools | None:
        """The tools that are left to the template."""
        return None if self.tools_in_text else given

    def messages(self, given: Sequence[Mapping[str, Any]], tools: Tools | None) -> Messages:
        """The conversation with calls, results and tools that the template leaves out as text."""
        found: Messages = []
        calls: list[Mapping[str, Any]] = []  # of the assistant's last message
        follows_result = False
        for message in _by_call(given) if self.calls_in_text else map(dict, given):
            role = message.get("role")
            if role == "assistant":
                calls = list(message.get("tool_calls") or ())
                if calls and self.calls_in_text:
                    message["content"] = self._written(message, calls)
                    del message["tool_calls"]
            is_result = role == "tool"
            if is_result and self.result_role == "user":
                message = {"role": "user", "content": _result(message, calls)}
            elif is_result:
                message["role"] = self.result_role
            if follows_result and message.get("role") == "user":  # users' turns do not follow
                found[-1]["content"] += f"\n\n{message['content']}"  # each other
            else:
                found.append(message)
            follows_result = is_result and self.result_role == "user"
        if self.tools_in_text and tools:
            self._declare(found, tools)
        return found

    def _written(self, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> str:
        functions = [call["function"] for call in calls]
        text = self.write([(one["name"], one["arguments"]) for one in functions])
        content = message.get("content")
        return f"{content}\n{text}" if content else text

    def _declare(self, messages: Messages, tools: Tools) -> None:
        """Tell the model of tools at the start of the first message of the system or the user."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self.write([("name_of_function", {"name_of_argument": "its value"})])
        text = (
            f"You can call these functions:\n\n{listed}\n\n"
            f"To call functions, answer with calls only, as in:\n\n{example}"
        )
        for number, message in enumerate(messages):
            if message.get("role") in ("system", "user"):
                messages[number] = {**message, "content": f"{text}\n\n{message['content']}"}
                return


def _result(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> str:
    """A result with the name of the function that returned it."""
    ids = {call.get("id"): call["function"]["name"] for call in calls}
    name = ids.get(message.get("tool_call_id"))
    named = {} if name is None else {"name": name}
    written = json.dumps({**named, "content": message.get("content")}, ensure_ascii=False)
    return f"<tool_response>\n{written}\n</tool_response>"


def _by_call(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Copies of messages; results are in the order of their calls, which as text have no ids."""
    found: Messages = []
    places: dict[Any, int] = {}
    results: Messages = []

    def add_results() -> None:
        found.extend(sorted(results, key=lambda r: places.get(r.get("tool_call_id"), len(places))))
        results.clear()

    for message in messages:
        if message.get("role") == "tool":
            results.append(dict(message))
            continue
        add_results()
        found.append(dict(message))
        calls = message.get("tool_calls") or ()
        places = {call.get("id"): place for place, call in enumerate(calls)}
    add_results()
    return found
