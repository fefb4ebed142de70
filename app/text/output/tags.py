"""Arguments between tags: how they are written, held to a schema, and read by it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from actors.scheduling.request import HeldPart
from app.text.output.json_text import loads, maybe, one_of, valid, words
from app.text.output.pieces import Draft
from app.text.output.source import Broken

_NAME: Final = re.compile(r"[^<>\s]+")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_PYTHON: Final = {"boolean": ("True", "False"), "null": ("None",)}  # as templates write them back
_BRANCHES: Final = ("anyOf", "oneOf", "allOf")
_REMARKS: Final = frozenset({"default", "description", "examples", "title"})
_JOINING: Final = frozenset({"allOf", "anyOf", "else", "if", "not", "oneOf", "then"})
_OF_OBJECTS: Final = frozenset(  # which are kept in JSON, but not between tags
    {"dependencies", "dependentRequired", "dependentSchemas", "maxProperties", "minProperties"}
    | {"const", "enum", "patternProperties", "propertyNames", *_JOINING}
)
_ENDS: Final = re.compile(r"(?<!\\)(\\\\)*\$$")  # a pattern that ends with the text
_MOST_CHARS: Final = 1 << 17  # of all tools' schemas, which are written on the loop of the front
_USUAL_CHARS: Final = 4096  # of a tool's schema
_NO_JSON: Final = HeldPart("no_match", r"[ \t\r\n]*[\[{][\s\S]*")


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around an argument: `begin`, its name, `middle`, its value, `end`. frame: line ends
    around the value that are not of it."""

    begin: str
    middle: str
    end: str
    frame: str = ""

    def written(self, arguments: Mapping[str, Any] | str) -> str:
        """Arguments as a model writes them: strings as they are, other values as JSON."""
        if isinstance(arguments, str):
            return f"{arguments}\n"
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
        return "".join(
            f"{self.begin}{key}{self.middle}{self.frame}{text}{self.frame}{self.end}\n"
            for key, text in texts.items()
        )

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
        whole = _resolved(root, root, set())
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
            argument = [*lines(f"{self.begin}{key}{self.middle}"), *self._value(one, root)]
            num_chars = _bounded(num_chars + sum(part.num_chars for part in argument))
            parts += argument if key in required else [maybe(*argument)]
        others = whole.get("additionalProperties", "properties" not in whole)
        if others is not False:
            first, *rest = lines(self.middle)
            names = [HeldPart("match", _NAME.pattern)]
            if declared:
                names.append(HeldPart("no_match", "|".join(map(re.escape, declared))))
            name = HeldPart("until", first.text, tuple(names))
            argument = [words(self.begin), name, *rest, *self._value(others, root)]
            parts.append(HeldPart("many", parts=tuple(argument)))
        return parts

    def _value(self, schema: Any, root: Mapping[str, Any]) -> list[HeldPart]:
        """A value in its frame, and its end."""
        texts: list[list[HeldPart]] = []
        values: list[HeldPart] = []
        has_brackets, num_chars = False, 0
        for one in _alternatives(schema, root):
            kinds = _types(one, root)
            if (choices := _choices(one)) is not None:
                fit = [value for value in choices if _is_of(value, kinds)]
                values += [words(value) for value in fit if isinstance(value, str)]
                if rest := [value for value in fit if not isinstance(value, str)]:
                    values.append(HeldPart("json", json.dumps({"enum": rest})))
            elif not kinds or "string" in kinds:
                texts.append(self._patterns(one))
            else:
                has_brackets |= not {"array", "object"}.isdisjoint(kinds)
                values.append(HeldPart("json", _alone(one, root)))
                num_chars = _bounded(num_chars + values[-1].num_chars)
                values += [words(word) for word in _PYTHON.get(kinds[0], ()) if len(kinds) == 1]
        ways = []
        for patterns in texts:
            until = (*patterns, _NO_JSON) if has_brackets else tuple(patterns)
            ways.append(HeldPart("until", self.end, until))
        end = words(f"{self.frame}{self.end}")
        if words("") in values:
            ways.append(end)
        if some := [value for value in values if value != words("")]:
            ways.append(HeldPart("all", parts=(one_of(*some), end)))
        if not ways:
            raise ValueError("no value is of one of the schemas")
        return [words(self.frame), one_of(*ways), maybe(words("\n"))]

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


def add_argument(draft: Draft, key: str, text: str) -> None:
    """The argument that stands between tags, by the type that the tool declares."""
    schema = _resolved(draft.schema, draft.schema, set())
    if isinstance(schema, Mapping):
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        schema = properties.get(key, others) if isinstance(properties, Mapping) else others
    draft.argument(key, typed(schema, text, draft.schema))


def typed(schema: Any, text: str, root: Any = None) -> str:
    """A value's JSON text by the type its schema declares; what is of no such type is a string.

    Without a declared type, valid JSON is taken as JSON. root: the schema that it is in."""
    types = _types(schema, root) or [*_TYPES, "string"]
    for kind in types:
        if kind in _TYPES and _is(kind, text):
            return valid(text.strip())
        if kind == "boolean" and text.strip().lower() in ("true", "false"):  # True, as in Python
            return text.strip().lower()
        if kind == "null" and text.strip() == "None" and "None" not in _listed(schema, root, set()):
            return "null"
    return json.dumps(text)


def _types(schema: Any, root: Any, seen: set[str] | None = None) -> list[str]:
    """The declared types; none where the schema, which is the client's, is no proper one."""
    seen = set() if seen is None else seen
    schema = _resolved(schema, root, seen)
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, list):
        return [kind for kind in declared if isinstance(kind, str)]
    if (choices := _choices(schema)) is not None:
        return list(dict.fromkeys(map(_type_of, choices)))
    branches = next((schema[key] for key in _BRANCHES if key in schema), None)
    if not isinstance(branches, list):
        return []
    return [kind for one in branches for kind in _types(one, root, seen)]


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of which it has to be one."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else None


def _listed(schema: Any, root: Any, seen: set[str]) -> list[Any]:
    """The values that it and its branches list."""
    schema = _resolved(schema, root, seen)
    if not isinstance(schema, Mapping):
        return []
    parts = [schema[key] for key in _BRANCHES if isinstance(schema.get(key), list)]
    inner = [value for part in parts for one in part for value in _listed(one, root, seen)]
    return [*(_choices(schema) or ()), *inner]


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "string")


def _is_of(value: Any, kinds: list[str]) -> bool:
    kind = _type_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _alternatives(
    schema: Any, root: Any, seen: set[str] | None = None
) -> Iterator[Mapping[str, Any]]:
    """The schemas of which a value has to be of one, each of one type."""
    seen = set() if seen is None else seen
    schema = _resolved(schema, root, seen)
    if schema is None:  # it refers to itself
        return
    if not isinstance(schema, Mapping):
        schema = {}
    for key in _BRANCHES:
        branches = schema.get(key)
        if schema.keys() - _REMARKS != {key} or not isinstance(branches, list):
            continue
        if key != "allOf" or len(branches) == 1:
            for one in branches:
                yield from _alternatives(one, root, seen)
            return
    kinds = schema.get("type")
    if kinds is None:
        kinds = "object" if "properties" in schema else "array" if "items" in schema else None
    for kind in kinds if isinstance(kinds, list) and _choices(schema) is None else [kinds]:
        yield schema if kind is None else {**schema, "type": kind}


def _resolved(schema: Any, root: Any, seen: set[str]) -> Any:
    """What a schema refers to within the whole one, if it does; None where this is nothing, or was
    seen before."""
    while isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        if reference in seen:
            return None
        seen.add(reference)
        found = root
        for name in reference.split("/")[1:]:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        beside = {key: schema[key] for key in schema if key != "$ref"}
        schema = {**found, **beside} if isinstance(found, Mapping) else found
    return schema


def _alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """A schema's JSON without the one that it is in; what it refers to is moved into it."""
    if '"$ref"' not in json.dumps(schema):
        return json.dumps(schema)
    return json.dumps({**_moved(schema), "$defs": {"root": _moved(root)}})


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/root{reference[1:]}"
    return moved


def _is(kind: str, text: str) -> bool:
    try:
        value = loads(text)
    except Broken:
        return False
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
