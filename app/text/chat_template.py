"""A conversation to the prompt text of this model, by the template in its folder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from app.text.message_form import MessageForm
from app.text.output.hermes import Hermes
from app.text.output.json_text import Calls
from app.text.tool_turns import ToolTurns
from app.text.worker import (
    KillableWorker,
    WorkerDied,
    WorkerStalled,
    WorkerTimeout,
    WorkerUnavailable,
)

TEMPLATE_LIMIT_S: Final = 1.0
_START_LIMIT_S: Final = 15.0  # of the child, which imports little: one that needs longer is hung

_CODE: Final = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_SET: Final = ("messages", "tools", "documents", "add_generation_prompt")
_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
_WORD: Final = re.compile(r"(?<![.\w])\w+")  # not the fields of a message: x.thinking


class TemplateError(Exception):
    """Base of what rendering may raise.

    TemplateError
     ├── TemplateMissing   the model folder has no chat template
     ├── TemplateHostile   it overran its limits or tried to leave the sandbox
     ├── TemplateBroken    it does not compile
     └── ConversationInvalid  the template cannot render, or objects to, these messages
    """


class TemplateMissing(TemplateError):
    pass


class TemplateHostile(TemplateError):
    pass


class TemplateBroken(TemplateError):
    pass


class ConversationInvalid(TemplateError):
    pass


class TemplateBusy(Exception):
    """There is no room to render in; template and messages may be fine. Try again."""


class ChatTemplate:
    """Renders conversations in a sandboxed, killable child process; blocks up to `limit_s`.

    templates: by name, as Hugging Face folders hold them ("default", "tool_use"). write_calls:
    writes calls as the model does, where a template leaves them out.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        limit_s: float = TEMPLATE_LIMIT_S,
        write_calls: Callable[[Calls], str] = Hermes.written,
    ) -> None:
        self._templates = dict(templates)
        self._words = {word for text in self._templates.values() for word in _words(text)}
        self._beside: dict[str, frozenset[str]] = {}  # by variable
        self._forms = {name: MessageForm.of(text) for name, text in self._templates.items()}
        self._write_calls = write_calls
        self._turns: dict[tuple[str, bool], ToolTurns] = {}  # by template, with tools or without
        self._special_tokens = dict(special_tokens)
        self._limit_s = limit_s
        self._worker = KillableWorker("app.text.template_worker", start_limit_s=_START_LIMIT_S)

    def __bool__(self) -> bool:
        return bool(self._templates)

    def reads(self, variable: str) -> bool:
        """Whether a template mentions this variable: one that none mentions changes nothing."""
        return variable in self._words

    def beside(self, variable: str) -> frozenset[str]:
        """The texts between quotation marks next to a variable, such as the values that it is
        compared with."""
        if variable not in self._beside:
            codes = [code for text in self._templates.values() for code in _CODE.findall(text)]
            near = [code for code in codes if variable in _WORD.findall(_QUOTED.sub("", code))]
            texts = frozenset(text[1:-1] for code in near for text in _QUOTED.findall(code))
            self._beside[variable] = texts
        return self._beside[variable]

    def sets(self, variable: str) -> bool:
        """Whether every chat sets this variable, and no request."""
        return variable in _SET or variable in self._special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        variables: further template variables (such as `enable_thinking`); they never shadow the
        standard ones. Raises TemplateError subclasses, TemplateBusy.
        """
        name = self._pick(bool(tools))
        if tools or any(m.get("role") == "tool" or m.get("tool_calls") for m in messages):
            turns = self._tool_turns(name, bool(tools))
            messages, tools = turns.messages(messages, tools), turns.tools(tools)
        return self._render(name, messages, tools, add_generation_prompt, variables or {})

    def _tool_turns(self, name: str, with_tools: bool) -> ToolTurns:
        turns = self._turns.get((name, with_tools))
        if turns is None:

            def shown(
                messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
            ) -> str:
                with contextlib.suppress(ConversationInvalid):
                    return self._render(name, messages, tools, True, {})
                return ""

            turns = ToolTurns.of(shown, self._write_calls, with_tools=with_tools)
            self._turns[name, with_tools] = turns
        return turns

    def _render(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        form = self._forms[name]
        job = {
            "template": self._templates[name],
            "limit_s": self._limit_s,
            "variables": {
                **variables,
                **self._special_tokens,
                "messages": form.messages(messages, tools),
                "tools": form.tools(tools),
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        }
        try:
            answer = self._worker.call(job, self._limit_s)
        except WorkerStalled as stalled:  # the template may be fine
            raise TemplateBusy("the renderer of chats gets no processor") from stalled
        except WorkerTimeout:
            raise TemplateHostile(
                f"the chat template did not finish within {self._limit_s:g} s"
            ) from None
        except WorkerDied:
            raise TemplateHostile("the chat template used up its memory or time") from None
        except WorkerUnavailable as unavailable:
            raise TemplateBusy(f"chats cannot be rendered now: {unavailable}") from unavailable
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise ConversationInvalid(str(answer["refused"]))
        if "broken" in answer:
            raise TemplateBroken(f"the chat template ({name}) does not compile: {answer['broken']}")
        message = str(answer["error"])
        if message.startswith("SecurityError"):
            raise TemplateHostile(f"the chat template tried to leave its sandbox: {message}")
        raise ConversationInvalid(f"the chat template cannot render these messages: {message}")

    def check(self) -> None:
        """Try every template once; raises TemplateHostile for one that must not be served, and
        TemplateBroken."""
        for name in self._templates:
            with contextlib.suppress(ConversationInvalid):  # it may want other messages than these
                self.render([{"role": "user", "content": "Hello"}], tools=_SAMPLE_TOOLS.get(name))

    def close(self) -> None:
        """End the child process."""
        self._worker.close()

    def _pick(self, has_tools: bool) -> str:
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._templates:
                return name
        raise TemplateMissing(
            "this model has no chat template: set model.chat_template, or use /v1/completions"
        )


def _words(template: str) -> Iterator[str]:
    """Every word of a template's code but fields, its variables among them."""
    for code in _CODE.findall(template):
        yield from _WORD.findall(_QUOTED.sub("", code))


_SAMPLE_TOOLS: Final[dict[str, list[dict[str, Any]]]] = {
    "tool_use": [
        {
            "type": "function",
            "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
        }
    ]
}
