"""Arguments between tags: how they are written, held to a schema, and read by it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from actors.scheduling.request import HeldPart
from app.text.output.json_text import maybe, one_of, valid, words
from app.text.output.pieces import MOST_MISREAD, Draft
from app.text.output.schema_types import (
    alone,
    alternatives,
    choices_of,
    is_of,
    properties_of,
    resolved,
    types_of,
)
from app.text.output.source import Broken, Reading, Source
from app.text.output.values import CONSTANTS, is_json, typed

_NAME: Final = re.compile(r"[^<>\s](?:[^<>\r\n]*[^<>\s])?")  # as all of these formats read it
_JOINING: Final = frozenset({"allOf", "anyOf", "else", "if", "not", "oneOf", "then"})
_OF_OBJECTS: Final = frozenset(  # which are kept in JSON, but not between tags
    {"dependencies", "dependentRequired", "dependentSchemas", "maxProperties", "minProperties"}
    | {"const", "enum", "patternProperties", "propertyNames", *_JOINING}
)
_ENDS: Final = re.compile(r"(?<!\\)(\\\\)*\$$")  # a pattern that ends with the text
_MOST_CHARS: Final = 1 << 17  # of all tools' schemas, which are written on the loop of the front
_USUAL_CHARS: Final = 4096  # of a tool's schema
_NESTED: Final = frozenset({"array", "object"})
_NO_TEXTS: Final = ["array", "boolean", "null", "number", "object"]
_OF_NESTED: Final = _OF_OBJECTS | {"additionalProperties", "contains", "maxItems", "minItems"} | {
    *("prefixItems", "required", "unevaluatedItems", "unevaluatedProperties", "uniqueItems")
}  # fmt: skip
_QUOTE: Final = re.compile(r'\\.|"', re.DOTALL)  # or what is escaped
_NO_JSON: Final = HeldPart("no_match", r"[ \t\r\n]*[\[{][\s\S]*")


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around an argument: `begin`, its name, `middle`, its value, `end`. frame: line ends
    around the value that are not of it. kinds: what follows `middle` before a text, and, in one of
    these ways, before any other value, where these are told apart."""

    begin: str
    middle: str
    end: str
    frame: str = ""
    kinds: tuple[str, ...] | None = None

    def written(self, arguments: Mapping[str, Any] | str) -> str:
        """Arguments as a model writes them: strings as they are, other values as JSON."""
        if isinstance(arguments, str):
            return f"{arguments}\n"
        written = ""
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            text = self.written_text(value) if is_text else json.dumps(value, ensure_ascii=False)
            begin = f"{self.begin}{self.written_key(key)}{self.middle}{self.kind_of(value)}"
            written += f"{begin}{self.frame}{text}{self.frame}{self.end}\n"
        return written

    def written_text(self, text: str) -> str:
        return text

    def written_key(self, key: str) -> str:
        return key

    def kind_of(self, value: Any) -> str:
        return "" if self.kinds is None else self.kinds[0 if isinstance(value, str) else 1]

    def can_hold(self, text: str) -> bool:
        """Whether a value can be this text."""
        return self.end not in text

    def held(self, schemas: Mapping[str, str]) -> dict[str, tuple[HeldPart, ...]]:
        """Arguments of each tool that keep to the schema of their object. Raises ValueError where
        they cannot be held to it. The length and the `format` of texts are left out of account:
        masks of a counted text that may hold most tokens are slow."""
        arguments: dict[str, tuple[HeldPart, ...]] = {}
        num_chars = 0
        for name, schema in schemas.items():
            try:
                is_usual = len(schema) <= _USUAL_CHARS
                arguments[name] = (_known if is_usual else _written)(self, schema)
                num_chars = _bounded(num_chars + sum(part.num_chars for part in arguments[name]))
            except ValueError as bad:
                raise ValueError(f"{bad}, in the parameters of '{name}'") from None
        return arguments

    def arguments(self, root: Any) -> list[HeldPart]:
        """All arguments of one tool, by the schema of their object."""
        whole = resolved(root, root, set())
        if not isinstance(whole, Mapping):
            raise ValueError("the schema is no object")
        for key in sorted(_OF_OBJECTS & whole.keys()):
            raise ValueError(f"calls between tags cannot be held to '{key}' of all parameters")
        properties, required = whole.get("properties", {}), whole.get("required", [])
        if not (isinstance(properties, Mapping) and isinstance(required, list)):
            raise ValueError("'properties' is no object, or 'required' no list")
        undeclared = [str(key) for key in required if str(key) not in properties]
        declared = {**properties, **dict.fromkeys(undeclared, True)}
        parts: list[HeldPart] = []
        num_chars = 0
        for key, one in declared.items():
            if one is False:
                continue
            if not _NAME.fullmatch(key):
                raise ValueError(f"no tag can have the name of the parameter {key!r}")
            try:
                value = self._value(one, root)
            except ValueError as bad:
                raise ValueError(f"{bad}, in {key!r}") from None
            argument = [*lines(f"{self.begin}{self.written_key(key)}{self.middle}"), *value]
            num_chars = _bounded(num_chars + sum(part.num_chars for part in argument))
            parts += argument if key in required else [maybe(*argument)]
        others = whole.get("additionalProperties", "properties" not in whole)
        if others is not False:
            first, *rest = lines(self.middle)
            names = [HeldPart("match", _NAME.pattern)]
            if keys := [self.written_key(key) for key in declared]:
                names.append(HeldPart("no_match", "|".join(map(re.escape, keys))))
            name = HeldPart("until", first.text, tuple(names))
            argument = [words(self.begin), name, *rest, *self._value(others, root)]
            parts.append(HeldPart("many", parts=tuple(argument)))
        return parts

    def read(
        self, source: Source, draft: Draft, key: str, *, is_text: bool | None = None
    ) -> Reading[None]:
        """Read a value and its end as an argument. An end within a string of JSON is of it.
        is_text: None where the schema tells."""
        schema = _of_argument(draft.schema, key)
        start, num_end = source.at, len(self.end)
        yield from self.read_to_end(source, draft)
        begin = source.text[start : source.at - num_end].lstrip()[:1]
        if is_text is None:
            reads_json = begin in ("[", "{") and any(
                _is_nested(one, types_of(one, draft.schema))
                for one in alternatives(schema, draft.schema)
            )
        else:
            reads_json = begin in ("[", "{", '"') and not is_text
        if reads_json and draft.num_overread < MOST_MISREAD:
            draft.overread((yield from self._whole_json(source, start)))
        value = source.text[start : source.at - num_end]
        value = self.unwrapped(value.removeprefix(self.frame).removesuffix(self.frame))
        if is_text:
            draft.argument(key, json.dumps(value))
            return
        written = typed(schema, value, draft.schema)
        if is_text is False:
            with suppress(Broken):
                written = valid(value.strip())
        draft.argument(key, written)

    def read_to_end(self, source: Source, draft: Draft) -> Reading[None]:
        """Read a value and its first end."""
        yield from source.until(self.end)

    def unwrapped(self, value: str) -> str:
        """Without what some models write around a value."""
        return value

    def _whole_json(self, source: Source, start: int) -> Reading[int]:
        """Go on from the first end of a value to the one that is in no string of it. Returns the
        number of characters read in vain: up to the end of the text, for each value that has none.
        """
        first, at, num_quotes = source.at, start, 0
        while True:
            end = source.at - len(self.end)
            num_quotes += _QUOTE.findall(source.text, at, end).count('"')
            if not num_quotes % 2:
                break
            at = end
            try:
                yield from source.until(self.end)
            except Broken:  # the string has no end either
                source.at = first
                return len(source.text) - first
        num_beyond = source.at - first
        if not num_beyond or is_json(source.text[start:end]):
            return 0
        source.at = first
        return num_beyond

    def _value(self, schema: Any, root: Mapping[str, Any]) -> list[HeldPart]:
        """What follows `middle`: a value in its frame, and its end."""
        patterns: list[list[HeldPart]] = []
        chosen: list[HeldPart] = []  # texts
        values: list[HeldPart] = []
        has_brackets, num_chars = False, 0
        for one in alternatives(schema, root):
            kinds = types_of(one, root)
            if (choices := choices_of(one)) is not None:
                fit = [value for value in choices if is_of(value, kinds)]
                listed_texts = [value for value in fit if isinstance(value, str)]
                chosen += [
                    words(self.written_text(text)) for text in listed_texts if self.can_hold(text)
                ]
                if rest := [value for value in fit if not isinstance(value, str)]:
                    has_brackets |= any(isinstance(value, list | dict) for value in rest)
                    values.append(HeldPart("json", json.dumps({"enum": rest})))
                continue
            if not kinds or "string" in kinds:
                patterns.append(self._patterns(one))
            has_brackets |= _is_nested(one, kinds)
            if not kinds and self.kinds is None:
                if not _is_nested(one, kinds):  # any text, which may be JSON
                    continue
                one, kinds = {**one, "type": _NO_TEXTS}, _NO_TEXTS
            if "string" not in kinds:
                values.append(HeldPart("json", alone(one, root)))
                num_chars = _bounded(num_chars + values[-1].num_chars)
            if len(kinds) == 1 or kinds is _NO_TEXTS:
                values += [words(word) for kind in kinds for word in CONSTANTS.get(kind, ())]
        texts = []
        for some in [[]] if [] in patterns else patterns:  # any text is of no pattern
            until = (*some, _NO_JSON) if has_brackets and self.kinds is None else tuple(some)
            texts += self.until_end(until)
        end = words(f"{self.frame}{self.end}")
        if words("") in chosen:
            texts.append(end)
        if some := [text for text in chosen if text != words("")]:
            texts.append(HeldPart("all", parts=(one_of(*some), end)))
        others = [HeldPart("all", parts=(one_of(*values), end))] if values else []
        if not texts and not others:
            raise ValueError("no value is of one of the schemas")
        frame, line_end = words(self.frame), maybe(words("\n"))
        if self.kinds is None:
            return [frame, one_of(*texts, *others), line_end]
        ways = [
            HeldPart("all", parts=(one_of(*(words(kind) for kind in kinds)), frame, one_of(*some)))
            for kinds, some in ((self.kinds[:1], texts), (self.kinds[1:], others))
            if some
        ]
        return [one_of(*ways), line_end]

    def until_end(self, tests: tuple[HeldPart, ...]) -> list[HeldPart]:
        """The ways to write a text of which these tests hold, and its end."""
        return [HeldPart("until", self.end, tests)]

    def _patterns(self, schema: Mapping[str, Any]) -> list[HeldPart]:
        """That the text of a string matches."""
        for key in sorted(_JOINING & schema.keys()):
            raise ValueError(f"texts between tags cannot be held to '{key}'")
        pattern = schema.get("pattern")
        if not isinstance(pattern, str):
            return []
        begin = "" if pattern.startswith("^") else r"[\s\S]*"
        end = "" if _ENDS.search(pattern) else r"[\s\S]*"
        inner = pattern.removeprefix("^")
        inner = inner if end else inner[:-1]
        return [HeldPart("match", f"{begin}(?:{inner}){end}{self.frame}")]


def _written(tags: Tags, schema: str) -> tuple[HeldPart, ...]:
    return tuple(tags.arguments(json.loads(schema)))


_known: Final = lru_cache(maxsize=128)(_written)  # an agent's tools come back at every turn


def _bounded(num_chars: int) -> int:
    if num_chars > _MOST_CHARS:
        raise ValueError("they are too long, each with all that it refers to")
    return num_chars


def lines(text: str) -> list[HeldPart]:
    """This text, whose line ends may be missing."""
    parts = (part for part in re.split("(\n)", text) if part)
    return [maybe(words(part)) if part == "\n" else words(part) for part in parts]


def _is_nested(schema: Mapping[str, Any], kinds: list[str]) -> bool:
    """Whether a value of these types may be a list or an object that is told from any text. One of
    no type may, if the schema tells texts, or lists and objects, from others."""
    if kinds:
        return not _NESTED.isdisjoint(kinds)
    return isinstance(schema.get("pattern"), str) or not _OF_NESTED.isdisjoint(schema)


def _of_argument(root: Mapping[str, Any], key: str) -> Any:
    """The schema that the tool declares for an argument."""
    schema = resolved(root, root, set())
    others = schema.get("additionalProperties") if isinstance(schema, Mapping) else schema
    return properties_of(root).get(key, others)
