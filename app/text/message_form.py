"""Messages in the form that a chat template expects of them, which its text tells.

A conversation comes in OpenAI's form. Templates differ in how they name reasoning, in the ids that
they accept, in how many calls a message may hold, and in what they take for "no text".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_COMMENT: Final = re.compile(r"\{#.*?#\}", re.DOTALL)
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_REASONING: Final = "reasoning_content"
# How a template reads a field of a message: m.x, m['x'], m.get('x', ...).
_FIELD: Final = r"\b(?:message|msg|m)(?:\.{0}\b|\[['\"]{0}['\"]\]|\.get\(['\"]{0}['\"])"
# Phi-4-mini's, where a conversation with tools has no system message.
_WITH_TOOLS: Final = "You are a helpful assistant with some tools."
_ARGUMENTS: Final = r"\barguments\b['\"\]]*\s*"
_ID_AND_ARGUMENTS: Final = "<|tool_call_argument_begin|>"  # Kimi K2's, where no name is written
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}

_Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What one template expects.

    reasoning: the field of an assistant's message that it reads.
    reasoning_block: it reads reasoning as a part of the content instead.
    reasoning_or_content: a message with calls has one or the other.
    short_ids: ids of calls have nine letters and digits.
    named_ids: ids of calls have the name of the tool and count up.
    one_call: a message holds one call.
    text_arguments: a call's arguments are JSON text, not an object.
    null_content: a message with calls and no text has the content null, not "".
    described_tools: every tool has a description.
    tools_in_system: the system message holds the tools, as JSON text; `tool` is the role of such a
    declaration then, `tool_response` that of a result.
    """

    reasoning: str = _REASONING
    reasoning_block: bool = False
    reasoning_or_content: bool = False
    short_ids: bool = False
    named_ids: bool = False
    one_call: bool = False
    text_arguments: bool = False
    null_content: bool = False
    described_tools: bool = False
    tools_in_system: bool = False

    @classmethod
    def of(cls, template: str) -> MessageForm:
        """The form that a template's text shows."""
        code = _COMMENT.sub("", template)

        def shows(pattern: str) -> bool:
            return re.search(pattern, code) is not None

        fields = (_REASONING, "thinking", "reasoning", "thought", "tool_plan")
        read = next((name for name in fields if shows(_FIELD.format(name))), None)
        return cls(
            reasoning=read or _REASONING,
            reasoning_block=read is None and shows(r"\[?['\"]?type['\"]?\]?\s*==\s*['\"]thinking"),
            reasoning_or_content=shows(r"\.content and \w+\.thinking"),
            short_ids=shows(r"\bid['\"\]]*\s*\|\s*length\s*(?:!=|==|<)\s*9"),
            named_ids=_ID_AND_ARGUMENTS in code,
            one_call=shows(r"tool_calls['\"\]]*\[0\]")
            and not shows(r"\bfor\s+\w+\s+in\s[^%]*\btool_calls\b"),
            text_arguments=_joins_arguments(shows),
            null_content=shows(
                r"['\"]assistant['\"]\s+and\s+\w+(?:\.content|\[['\"]content['\"]\])"
                r"\s+is\s+(?:not\s+)?none"
            ),
            described_tools=shows(r"[+~]\s*tool(?:\.function)?\.description\s*[+~]"),
            tools_in_system=shows(r"[+~]\s*" + _FIELD.format("tools")),
        )

    def messages(
        self, given: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> _Messages:
        """The conversation in this form: leading system messages are one, as most templates read
        only the first."""
        fitted = [self._message(dict(message)) for message in given]
        while len(fitted) > 1 and all(_is_system_text(message) for message in fitted[:2]):
            second = fitted.pop(1)
            fitted[0] = {**fitted[0], "content": f"{fitted[0]['content']}\n\n{second['content']}"}
        if self.tools_in_system and tools:
            if not fitted or not _is_system_text(fitted[0]):
                fitted.insert(0, {"role": "system", "content": _WITH_TOOLS})
            fitted[0]["tools"] = json.dumps([t["function"] for t in tools], ensure_ascii=False)
        if self.named_ids:
            _name_ids(fitted)
        return _one_call_each(fitted) if self.one_call else fitted

    def tools(self, given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
        """The tools in this form; None for none."""
        if not given:
            return None
        return [{**tool, "function": self._function(tool["function"])} for tool in given]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.tools_in_system and message.get("role") == "tool":
            message["role"] = "tool_response"
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [self._call(dict(call)) for call in calls]
            if self.null_content and not message.get("content"):
                message["content"] = None
        if self.short_ids and isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        reasoning = message.pop(_REASONING, None)
        if reasoning is None:
            return message
        content = message.get("content")
        if self.reasoning_block:
            texts = [{"type": "text", "text": content}] if content else []
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *texts]
            return message
        if self.reasoning_or_content and calls and content:
            reasoning, message["content"] = f"{reasoning}\n\n{content}", ""
        message[self.reasoning] = reasoning
        return message

    def _function(self, given: Mapping[str, Any]) -> dict[str, Any]:
        # Optional in OpenAI's form, but most templates read them of every tool.
        function = {**given, "parameters": given.get("parameters") or _NO_PARAMETERS}
        if self.described_tools:
            function["description"] = given.get("description") or ""
        return function

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        if self.short_ids and isinstance(call.get("id"), str):
            call["id"] = _short_id(call["id"])
        function = call.get("function")
        if self.text_arguments and isinstance(function, Mapping):
            arguments = function.get("arguments")
            if not isinstance(arguments, str):
                written = json.dumps(arguments, ensure_ascii=False)
                call["function"] = {**function, "arguments": written}
        return call


def _joins_arguments(shows: Callable[[str], bool]) -> bool:
    """Whether a template joins arguments to text as they are, whatever their type."""
    if shows(_ARGUMENTS + r"is\s+(?:not\s+)?(?:string|mapping)"):
        return False
    return shows(_ARGUMENTS + r"[+~]") or shows(
        r"[+~]\s*[\w.\[\]'\"]*" + _ARGUMENTS + r"(?:[+~]|-?[%}]\})"
    )


def _short_id(given: str) -> str:
    """Nine letters and digits for an id, always the same ones for the same id."""
    if _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:9]


def _name_ids(messages: _Messages) -> None:
    """Ids as the model writes them, also those of the results."""
    named: dict[Any, str] = {}
    num_calls = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            given, name = call.get("id"), call.get("function", {}).get("name")
            call["id"] = f"functions.{name}:{num_calls}"
            num_calls += 1
            if isinstance(given, str):
                named[given] = call["id"]
        if message.get("role") == "tool" and message.get("tool_call_id") in named:
            message["tool_call_id"] = named[message["tool_call_id"]]


def _is_system_text(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system" and isinstance(message.get("content"), str)


def _one_call_each(messages: _Messages) -> _Messages:
    """Parallel calls as turns that follow each other, each with its own result behind it."""
    found: _Messages = []
    at = 0
    while at < len(messages):
        message, calls = messages[at], messages[at].get("tool_calls") or ()
        at += 1
        if len(calls) < 2:
            found.append(message)
            continue
        results: _Messages = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            role = {"role": message["role"], "content": ""} if number else message
            found.append({**role, "tool_calls": [call]})
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            results = [one for one in results if one not in own]
            found += own
        found += results
    return found
