"""How an answer is parsed: its formats, and whether the model reasons first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from actors.scheduling.request import Frame, Grammar, HeldCalls
from app.api.context import Context
from app.api.endpoints.tool_choice import ToolPlan
from app.api.http.errors import invalid
from app.api.schema.common import ReasoningEffort
from app.text.incremental import TextDelta, TextRules
from app.text.output.interface import ReasoningFormat
from app.text.output.parser import OutputParser
from app.text.output.pieces import AnswerPiece, Tools
from app.text.output.registry import OutputFormats

EFFORT: Final = "reasoning_effort"  # template variables
SWITCHES: Final = ("enable_thinking", "thinking")
_OFF: Final = ("none", "minimal")
_GRADES: Final = ("low", "medium", "high")
_TEXT: Final = Grammar("text", "")


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """formats: None where all is text. in_reasoning: the prompt ends within the reasoning.
    parallel: an answer may hold several calls. grammar: with what may stand before the answer, or
    in its place. custom: names of tools that take text.
    """

    formats: OutputFormats | None
    tools: Tools
    is_forced: bool
    in_reasoning: bool
    parallel: bool = True
    grammar: Grammar | None = None
    custom: frozenset[str] = frozenset()

    def parsers(self, count: int, *, stream: bool) -> list[OutputParser]:
        """One for each continuation; none where all is text."""
        if self.formats is None:
            return []
        return [
            self.formats.parser(
                self.tools,
                is_forced=self.is_forced,
                by_argument=stream,
                in_reasoning=self.in_reasoning,
                parallel=self.parallel,
                custom=self.custom,
            )
            for _ in range(count)
        ]

    def rules(
        self, stops: tuple[str, ...], stop_token_ids: frozenset[int], skip_special_tokens: bool
    ) -> TextRules:
        """Rules by which tokens become the text that is parsed."""
        shown: frozenset[str] = frozenset()
        if self.formats is not None:
            with_tools = bool(self.tools) and not self.is_forced
            shown = self.formats.special_tokens(with_tools=with_tools)
        return TextRules(
            stops, stop_token_ids, skip_special_tokens, shown, by_token=self.formats is not None
        )


def plan_output(
    context: Context, tools: ToolPlan, grammar: Grammar | None, prompt: str
) -> OutputPlan:
    """grammar: of the request."""
    formats, calls = context.text.formats, tools.tools
    held: tuple[HeldCalls, ...] = ()
    if tools.strict and formats.tools is not None:
        try:
            held = formats.tools.held(tools.schemas())
        except ValueError as bad:
            raise invalid(f"Invalid 'tools': {bad}.", "tools", "invalid_grammar") from None
    if grammar is None and held:
        grammar = _TEXT
    is_forced = tools.grammar is not None
    own: tuple[HeldCalls, ...] = ()
    if is_forced and formats.tools is not None:
        own = formats.tools.forced(tools.chosen_schemas())
    if own:
        marks, is_begun = _reasoning_marks(formats.reasoning, prompt, is_forced=True)
        frame = Frame(marks, is_begun, held=own, most_calls=tools.most_calls)
        grammar, is_forced = replace(_TEXT, frame=frame), False
    elif grammar is not None:
        frame = Frame()
        if grammar.kind != "ebnf":
            frame = _frame(formats, bool(calls), is_forced, prompt, held)
        if not frame.reasoning and grammar is not _TEXT:
            formats = replace(formats, reasoning=None)
        if not frame.calls and grammar is not _TEXT and not is_forced:
            calls = {}
        if frame != Frame():
            grammar = replace(grammar, frame=frame)
    if not calls and formats.reasoning is None:
        return OutputPlan(None, {}, False, False, grammar=grammar)
    begun = formats.reasoning is not None and formats.reasoning.begins_in(prompt)
    return OutputPlan(formats, calls, is_forced, begun, tools.parallel, grammar, tools.custom)


def _frame(
    formats: OutputFormats,
    with_tools: bool,
    is_forced: bool,
    prompt: str,
    held: tuple[HeldCalls, ...],
) -> Frame:
    """What a constrained answer may have before it or in its place."""
    marks, is_begun = _reasoning_marks(formats.reasoning, prompt, is_forced=is_forced)
    if not with_tools or is_forced or formats.tools is None:
        return Frame(marks, is_begun)
    return Frame(marks, is_begun, formats.tools.openings, formats.tools.special_tokens, held)


def _reasoning_marks(
    reasoning: type[ReasoningFormat] | None, prompt: str, *, is_forced: bool
) -> tuple[tuple[str, ...], bool]:
    """The marks around the reasoning, if the answer may have one, and whether it has begun."""
    if reasoning is None or not (is_forced or reasoning.precedes_the_answer):
        return (), False
    marks = reasoning.marks(prompt)
    return marks, bool(marks) and reasoning.begins_in(prompt)


def read_delta(parser: OutputParser, delta: TextDelta) -> list[AnswerPiece]:
    """The parts of one delta's text."""
    found = parser.push((delta.text,) if delta.pieces is None else delta.pieces)
    return found if delta.finish_reason is None else [*found, *parser.finish(delta.rest)]


def template_variables(
    context: Context,
    given: Mapping[str, Any] | None,
    effort: ReasoningEffort | None,
    param: str = "reasoning_effort",
) -> dict[str, Any]:
    """Variables for the chat template: the request's own, and the effort as the template takes it.

    Raises 400 for variables that this model's template does not read or the request cannot set.
    """
    template = context.text.template
    variables = dict(given or {})
    for name in variables if template else ():
        shown = name[:64]
        if template.sets(name):
            why = f"'{shown}' is set by the conversation and the model, not by a request."
        elif not template.reads(name):
            why = f"This model's chat template reads no variable '{shown}'."
        else:
            continue
        raise invalid(why, f"chat_template_kwargs.{shown}", "unsupported_parameter")
    if effort is None:
        return variables
    switch = next((name for name in SWITCHES if template.reads(name)), None)
    if template.reads(EFFORT) and not (switch and effort in _OFF):
        if effort not in _GRADES:
            always = "always reasons, and " if effort in _OFF else ""
            raise invalid(f"This model {always}supports the efforts {', '.join(_GRADES)}.", param)
        return {EFFORT: effort, **variables}
    if switch:
        return {switch: effort not in _OFF, **variables}
    raise invalid(
        f"'{param}' is not supported: this model's chat template has no switch for reasoning.",
        param,
        "unsupported_parameter",
    )
