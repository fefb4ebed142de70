"""A grammar that holds for the answer alone: behind the reasoning, and unless it calls tools; and
one that holds for the calls alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from actors.scheduling.request import Frame, HeldCall, HeldCalls, HeldPart
from actors.stage.grammars.patterns import literal
from actors.stage.grammars.python_literals import python_rules
from actors.stage.grammars.spelling import any_of, around_token, has_token, spelled

_BLANKS: Final = r"/[ \n\r\t]{1,4}/"
_SOME_BLANKS: Final = r"[ \n\r\t]*"
_ANY: Final = "/(?s:.+)/"


def rules_of(
    answer: str | None,
    frame: Frame,
    token_ids: Mapping[str, int],
    rule: Callable[[str, str], str],
) -> tuple[str, str]:
    """The rule of a framed answer, and those that it needs (in Lark's form, as llguidance has it).

    answer: its own rule; None: any text. token_ids: of special tokens, by name. rule: gives
    that of a grammar, by its kind and text.
    """
    rules = [f"blanks: {_BLANKS}", f"ANY: {_ANY}"]
    start = "answer"
    held = _HeldRules(frame, token_ids, rule)
    if frame.most_calls:
        start = "calls"
        rules += held.alone()
    elif answer is not None:
        heads = " | ".join(spelled(head, token_ids) for head in frame.heads if head)
        tail = f"({spelled(frame.tail, token_ids)})?" if frame.tail else ""
        ways = [f"({heads}) plain {tail}"] if heads else []
        ways += ["plain"] if not heads or "" in frame.heads else []
        rules += [f"plain: {answer}", f"answer: {' | '.join(ways)}"]
        calls = held.in_place_of_text() if frame.held else _free_calls(frame, token_ids)
        if calls:
            start = "(answer | calls)"
            rules += calls
    else:
        rules += held.within_text(frame.reasoning[:1])
    if frame.reasoning:
        opening, closing = frame.reasoning
        head = "begun"
        if frame.is_begun:  # some models write the prompt's mark once more
            head = "begun?" if has_token(opening, token_ids) else ""
            start = f"reasoning {start}"
        else:
            start = f"reasoning? {start}"
        if has_token(opening, token_ids):
            rules.append(f"begun: blanks? {spelled(opening, token_ids)}")
        else:  # at once, so that it is no text of an answer
            rules.append(f"begun[lazy]: /[ \\n\\r\\t]{{0,4}}{literal(opening)}/")
        rules.append(f"reasoning: {head} thoughts blanks?")
        if has_token(closing, token_ids):
            rules.append(f"thoughts: {_ANY}? {spelled(closing, token_ids)}")
        else:  # up to the first one
            rules.append(f"thoughts[lazy]: {_up_to(closing)}")
    return start, "\n".join(rules)


def _free_calls(frame: Frame, token_ids: Mapping[str, int]) -> list[str]:
    if not frame.calls:
        return []
    marks = {token_ids[mark] for mark in (*frame.calls, *frame.marks) if mark in token_ids}
    rest = " | ".join([_ANY, *any_of(marks)])
    calls = " | ".join(f"({spelled(mark, token_ids)})" for mark in frame.calls)
    return [f"calls: ({calls}) rest", f"rest: ({rest})*"]


class _HeldRules:
    """Rules of calls that are held to schemas."""

    def __init__(
        self,
        frame: Frame,
        token_ids: Mapping[str, int],
        rule: Callable[[str, str], str],
    ) -> None:
        self._token_ids, self._rule = token_ids, rule
        self._most_calls = frame.most_calls
        self._rules: list[str] = []
        self._of_python: set[str] = set()  # rules, of which some are the same for all
        self._names: dict[HeldPart, str] = {}  # of their rules
        self._begun: dict[tuple[tuple[HeldCall, ...], str, str | None], str] = {}  # the same
        kept = (self._kept(held) for held in frame.held)
        self._every = [held for held in kept if held.calls]
        for number, held in enumerate(self._every):
            self._add_calls(number, held)

    def alone(self) -> list[str]:
        ways = [self._way(number) for number in range(len(self._every))]
        return [*self._rules, f"calls: {' | '.join(ways)}"]

    def in_place_of_text(self) -> list[str]:
        """None where no call has an opening mark."""
        last = [n for n, held in enumerate(self._every) if held.may_end]
        ways = [self._way(number) for number in last]
        if marked := [n for n, held in enumerate(self._every) if held.opening and n not in last]:
            self._rules.append(f"block: {' | '.join(map(self._way, marked))}")
            ways.append("block (blanks? block)*")
        return [*self._rules, f"calls: {' | '.join(ways)}"] if ways else []

    def _way(self, number: int) -> str:
        held = self._every[number]
        calls = f"(held{number} | open{number})" if held.may_end else f"held{number}"
        return f"{self._spelled(held.opening)} {calls}"

    def within_text(self, reserved: Sequence[str]) -> list[str]:
        """Whatever stands between calls, where each opening begins one, as a token and spelled.
        reserved: other marks that are no text.
        """
        ways: dict[str, list[int]] = {}
        for number, held in enumerate(self._every):
            ways.setdefault(held.opening, []).append(number)
        no_text, segments = {*ways, *reserved}, []
        firsts, blocks, lasts, wholes = [], [], [], []
        for number, (opening, numbers) in enumerate(ways.items()):
            held = self._every[numbers[0]]
            calls = f"({' | '.join(f'held{n}' for n in numbers)})"
            open_calls = [f"open{n}" for n in numbers if self._every[n].may_end]
            if not opening:
                firsts.append(calls)
                continue
            calls += "?" if held.may_be_text else ""
            begins = [f"spelled{number}", *self._tokens([opening])]
            _, mark, rest = around_token(opening, self._token_ids)
            if mark and mark != opening:  # what precedes the mark is of the text before
                no_text.add(mark)
                begins.append(f"{self._spelled(mark)} {self._spelled(rest)}")
            if held.behind:
                heads = self._tokens(held.behind)
                self._add_header_rules(number, held)
                no_text.update(held.behind)
                segments += [f"{head} HEAD{number}?" for head in heads]
                begins = [f"spelled{number}", *(f"{head} opened{number}" for head in heads)]
                firsts.append(f"first{number} {calls}")
                wholes += [f"first{number} {one}" for one in open_calls]
            else:
                self._rules.append(f"spelled{number}[lazy]: {_up_to(opening)}")
            self._rules.append(f"begin{number}: {' | '.join(begins)}")
            blocks.append(f"begin{number} {calls}")
            lasts += [f"begin{number} {one}" for one in open_calls]
        segments += [f"{token} ANY?" for token in self._tokens(self._token_ids.keys() - no_text)]
        rest = f"(text ({' | '.join(blocks)}))* text{_maybe(lasts)}" if blocks else "text"
        return [
            *self._rules,
            f"text: ANY? ({' | '.join(segments)})*" if segments else "text: ANY?",
            f"answer: {' | '.join([f'{_maybe(firsts)} {rest}', *wholes])}",
        ]

    def _add_header_rules(self, number: int, held: HeldCalls) -> None:
        """first: the opening as the answer begins. opened: in a header, behind its mark. spelled:
        with its mark. HEAD: a header's text without the opening.
        """
        opening, before = literal(held.opening), literal(held.before)
        marks = "|".join(map(literal, held.behind))
        self._rules += [
            f"OPENED{number}: (/(?s:.*)/ & ~/(?s:.*){before}(?s:.*)/) /{opening}/",
            f"HEAD{number}: {_ANY} & ~(OPENED{number} /(?s:.*)/)",
            f"first{number}[lazy]: /{_SOME_BLANKS}{opening}/",
            f"opened{number}[lazy]: OPENED{number}",
            f"spelled{number}[lazy]: /(?s:.*)({marks})/ OPENED{number}",
        ]

    def _kept(self, held: HeldCalls) -> HeldCalls:
        """Without calls that it may lack."""
        if not held.may_lack:
            return held
        calls = []
        for call in held.calls:
            with suppress(ValueError):
                self._sequence(call.parts)
                calls.append(call)
        return replace(held, calls=tuple(calls))

    def _add_calls(self, number: int, held: HeldCalls) -> None:
        """The rules of what stands behind an opening. open: without the tail."""
        if held.may_be_text:
            count = "" if held.tail else "+"
            self._rules.append(f"held{number}: {self._begun_calls(held)}{count}")
            return
        head, tail = self._edge(held.head), self._edge(held.tail)
        calls = " | ".join(self._sequence(call.parts) for call in held.calls)
        following = ""
        if held.separator is not None and self._most_calls != 1:
            count = f"{{0,{self._most_calls - 1}}}" if self._most_calls else "*"
            following = f"({self._spelled(held.separator)} call{number}){count}"
        self._rules += [
            f"call{number}: {calls}",
            f"open{number}: {head} call{number} {following}",
            f"held{number}: open{number} {tail}",
        ]

    def _begun_calls(self, held: HeldCalls) -> str:
        """The name of the rule of a call that may as well be text until its arguments begin."""
        key = (held.calls, held.head, held.separator)
        if key not in self._begun:
            name = self._begun[key] = f"begun_call{len(self._begun)}"
            separator = literal((held.separator or "").strip())
            head = literal(held.head).replace(literal(" "), _SOME_BLANKS)
            ways, more = [], []
            for number, call in enumerate(held.calls):
                first, *rest = call.parts
                texts = [literal(one.text) for one in first.parts or (first,)]
                begin = "|".join(texts).replace(literal(" "), _SOME_BLANKS)
                before = f"{_SOME_BLANKS}({separator}{_SOME_BLANKS})?{head}"
                self._rules.append(f"{name}_{number}[lazy]: /{before}({begin})/")
                ways.append(f"{name}_{number} {self._sequence(rest)}")
                more.append(f"/({begin})/ {self._sequence(rest)}")
            begun = " | ".join(ways)
            if held.tail:
                following = f"(blanks? /{separator}/ blanks? ({' | '.join(more)}))* blanks?"
                begun = f"({begun}) {following} {self._spelled(held.tail)}"
            self._rules.append(f"{name}: {begun}")
        return self._begun[key]

    def _sequence(self, parts: Iterable[HeldPart]) -> str:
        return " ".join(map(self._part, parts))

    def _part(self, part: HeldPart) -> str:
        match part.kind:
            case "text":
                return self._spelled(part.text)
            case "json" | "python" | "python_or_json" | "until":
                return self._named(part)
            case "one":
                return f"({' | '.join(map(self._part, part.parts))})"
            case "all":
                return f"({self._sequence(part.parts)})"
            case "maybe":
                return f"({self._sequence(part.parts)})?"
            case "many":
                return f"({self._sequence(part.parts)})*"
        raise ValueError(f"part {part.kind!r} of a call is unknown")

    def _named(self, part: HeldPart) -> str:
        """The name of the rule of such parts."""
        if part not in self._names:
            name = f"{part.kind}{len(self._names)}"
            if part.kind == "json":
                kind = "json_schema" if self._most_calls else "strict_json_schema"
                self._rules.append(f"{name}: {self._rule(kind, part.text)}")
            elif part.kind != "until":
                takes_json = part.kind == "python_or_json"
                rules = python_rules(name, part.text, self._rule, takes_json=takes_json)
                self._rules += [one for one in rules if one not in self._of_python]
                self._of_python.update(rules)
            else:
                self._add_until(name, part)
            self._names[part] = name
        return self._names[part]

    def _add_until(self, name: str, part: HeldPart) -> None:
        text, body = "ANY?", "/(?s:.*)/"
        before, mark, rest = around_token(part.text, self._token_ids)
        if part.parts:
            text, end = name.upper(), literal(part.text)
            body += f" & ~/(?s:.*){end}(?s:.*)/"
            for one in part.parts:
                body += f" & {'~' if one.kind == 'no_match' else ''}{self._rule('regex', one.text)}"
            self._rules += [f"{text}: {body}", f"spelled_{name}[lazy]: {text} /{end}/"]
            ways = [f"spelled_{name}"]
        else:  # with more than it takes: masks of any text are found at once
            self._rules.append(f"spelled_{name}[lazy]: {_up_to(part.text)}")
            ways = [f"ANY? spelled_{name}"]
        if mark and before:  # one lexeme with the text, as lexemes are as long as can be
            whole = f"{name.upper()}_{text.rstrip('?')}"
            self._rules.append(f"{whole}: {text if part.parts else body} /{literal(before)}/")
            text = whole
        if mark:
            ways.append(f"{text} {self._spelled(mark)} {self._spelled(rest)}")
        self._rules.append(f"{name}: {' | '.join(ways)}")

    def _spelled(self, text: str) -> str:
        return spelled(text, self._token_ids)

    def _edge(self, text: str) -> str:
        """The same without the blanks that it begins with, too."""
        rest = text.lstrip()
        blanks = text[: len(text) - len(rest)]
        return f"{f'/{literal(blanks)}/?' if blanks else ''} {self._spelled(rest)}"

    def _tokens(self, names: Iterable[str]) -> list[str]:
        """A rule of these special tokens; none where there are none."""
        return any_of({self._token_ids[name] for name in names if name in self._token_ids})


def _maybe(ways: Sequence[str]) -> str:
    return f" ({' | '.join(ways)})?" if ways else ""


def _up_to(mark: str) -> str:
    return f"/(?s:.*){literal(mark)}/"
