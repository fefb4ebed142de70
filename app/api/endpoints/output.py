"""How an answer is parsed: its formats, and whether the model reasons first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from actors.scheduling.request import Frame, Grammar, HeldCalls, SamplingParams
from app.api.context import Context
from app.api.endpoints.tool_choice import ToolPlan
from app.api.http.errors import invalid
from app.api.schema.common import ReasoningEffort
from app.text.chat_template import ChatTemplate
from app.text.incremental import TextDelta, TextRules
from app.text.output.interface import ReasoningFormat, ToolFormat
from app.text.output.parser import OutputParser
from app.text.output.pieces import AnswerPiece, Tools
from app.text.output.registry import OutputFormats

EFFORT: Final = "reasoning_effort"  # template variables
SWITCHES: Final = ("enable_thinking", "thinking")
_OFF: Final = ("none", "minimal")
_GRADES: Final = ("low", "medium", "high")
_EFFORTS: Final[tuple[ReasoningEffort, ...]] = get_args(ReasoningEffort)
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
        self, stops: tuple[str, ...], sampling: SamplingParams, skip_special_tokens: bool
    ) -> TextRules:
        """Rules by which tokens become the text that is parsed."""
        shown: frozenset[str] = frozenset()
        if self.formats is not None:
            with_tools = bool(self.tools) and not self.is_forced
            shown = self.formats.special_tokens(with_tools=with_tools)
        return TextRules(
            stops,
            frozenset(sampling.stop_token_ids),
            skip_special_tokens,
            shown,
            by_token=self.formats is not None,
            min_tokens=sampling.min_tokens,
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
        frame = replace(_reasoning(formats.reasoning, prompt), heads=(), tail="")
        frame = replace(frame, held=own, most_calls=tools.most_calls)
        grammar, is_forced = replace(_TEXT, frame=frame), False
    elif grammar is not None:
        frame = Frame()
        if grammar.kind != "ebnf":
            is_alone = is_forced or grammar is _TEXT
            frame = _reasoning(formats.reasoning, prompt, is_alone=is_alone)
            if calls and not is_forced:
                frame = _with_calls(frame, formats.tools, tools, held, grammar is _TEXT)
        if not frame.reasoning and grammar is not _TEXT:
            formats = replace(formats, reasoning=None)
        has_calls = bool(frame.calls or frame.held)
        if not has_calls and grammar is not _TEXT and not is_forced:
            calls = {}
        if frame != Frame():
            grammar = replace(grammar, frame=frame)
    if not calls and formats.reasoning is None:
        return OutputPlan(None, {}, False, False, grammar=grammar)
    begun = formats.reasoning is not None and formats.reasoning.begins_in(prompt)
    return OutputPlan(formats, calls, is_forced, begun, tools.parallel, grammar, tools.custom)


def _reasoning(
    reasoning: type[ReasoningFormat] | None, prompt: str, *, is_alone: bool = False
) -> Frame:
    """What an answer has before it. is_alone: it stands behind nothing but reasoning."""
    marks = () if reasoning is None else reasoning.marks(prompt)
    if reasoning is None or not marks or (is_alone and "" not in reasoning.heads):
        return Frame()
    heads = () if is_alone or reasoning.heads == ("",) else reasoning.heads
    tail = reasoning.tail if heads else ""
    return Frame(marks, reasoning.begins_in(prompt), heads=heads, tail=tail)


def _with_calls(
    frame: Frame,
    format: type[ToolFormat] | None,
    tools: ToolPlan,
    held: tuple[HeldCalls, ...],
    is_text: bool,
) -> Frame:
    """With calls that it may be instead. held: within text. is_text: the answer is any text."""
    if format is None:
        return frame
    if not (is_text or frame.heads or format.openings):  # nothing tells a call from an answer
        return frame
    if frame.heads and not format.openings:  # text and calls are told apart by their heads
        return replace(frame, held=format.forced(tools.schemas()))
    return replace(frame, calls=format.openings, marks=format.special_tokens, held=held)


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
        known = known_efforts(template)
        if effort not in known and effort in _OFF and known[0] in _OFF:
            effort = known[0]
        elif effort not in known:
            always = "always reasons, and " if effort in _OFF else ""
            raise invalid(f"This model {always}supports the efforts {', '.join(known)}.", param)
        return {EFFORT: effort, **variables}
    if switch:
        return {switch: effort not in _OFF, **variables}
    raise invalid(
        f"'{param}' is not supported: this model's chat template has no switch for reasoning.",
        param,
        "unsupported_parameter",
    )


def known_efforts(template: ChatTemplate) -> list[ReasoningEffort]:
    """From the least: those that any template with efforts knows, and what this one names."""
    named = template.beside(EFFORT)
    return [effort for effort in _EFFORTS if effort in _GRADES or effort in named]
