"""The arguments of a call in Python's syntax, `a=1, b=["x", None]`, by their JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

from actors.stage.grammars.json_schema import prepared, resolved
from actors.stage.grammars.patterns import literal

_NAME: Final = re.compile(r"[\w.\-]+")  # of an argument
_OF_STRINGS: Final = ("format", "maxLength", "minLength", "pattern")
_OF_NUMBERS: Final = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_KEPT: Final[Mapping[str, tuple[str, ...]]] = {
    "string": _OF_STRINGS,
    "number": _OF_NUMBERS,  # of which bounds speak where no type is given
    "integer": _OF_NUMBERS,
    "boolean": (),
    "null": (),
    "array": ("items", "maxItems", "minItems"),
    "object": ("additionalProperties", "properties", "required"),
}
_WORDS: Final = frozenset(word for words in _KEPT.values() for word in words)
_REFUSED: Final = frozenset(  # as there are no rules for them
    {"$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired"}
    | {"dependentSchemas", "else", "if", "maxContains", "maxProperties", "minContains"}
    | {"minProperties", "not", "patternProperties", "prefixItems", "propertyNames", "then"}
    | {"unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
)
_ASSERTIONS: Final = frozenset(  # all others are remarks
    {"$ref", "allOf", "anyOf", "const", "enum", "oneOf", "type", *_WORDS, *_REFUSED}
)
_KINDS: Final = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_CODES: Final = r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(0[0-9a-fA-F]|10)[0-9a-fA-F]{4}"
_ESCAPED: Final = rf"\\([abfnrtv\\\x22\x27]|{_CODES})"
_DOUBLE: Final = rf"\x22([^\x22\\\n\r\x00]|{_ESCAPED})*\x22"
_SINGLE: Final = rf"\x27([^\x27\\\n\r\x00]|{_ESCAPED})*\x27"
_HALVES: Final = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which no encoding has
_SHARED: Final = (
    f"PY_STRING: /{_DOUBLE}|{_SINGLE}/",
    r"PY_NUMBER: /-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?/",
    r"PY_COMMA: /,\x20?/",
    r"PY_COLON: /:\x20?/",
    'py_list: "[" (py_any (PY_COMMA py_any)*)? "]"',
    'py_dict: "{" (py_item (PY_COMMA py_item)*)? "}"',
    "py_item: PY_STRING PY_COLON py_any",
    "py_any: PY_STRING | PY_NUMBER | py_constant | py_list | py_dict",
)
_CONSTANTS: Final = {"boolean": '"True" | "False"', "null": '"None"'}
_OF_JSON: Final = {"boolean": '"true" | "false"', "null": '"null"'}


def python_rules(
    name: str, text: str, rule: Callable[[str, str], str], *, takes_json: bool = False
) -> list[str]:
    """The rule `name` of the arguments that keep to the schema `text`, and those that it needs, of
    which some are the same for every schema. rule: gives that of a grammar, by its kind and text.
    takes_json: constants may be JSON's, too.

    Raises ValueError for what cannot be kept.
    """
    try:
        return _Rules(name, prepared(json.loads(text)), rule, takes_json).rules
    except (AttributeError, TypeError):  # such as a list among types
        raise ValueError("the schema is malformed") from None


class _Rules:
    def __init__(
        self, name: str, root: Any, rule: Callable[[str, str], str], takes_json: bool
    ) -> None:
        self._name, self._root, self._rule, self._takes_json = name, root, rule, takes_json
        self._names: dict[str, str] = {}  # of rules, by what they are for
        constants = " | ".join(map(self._constants, _CONSTANTS))
        self.rules: list[str] = [*_SHARED, f"py_constant: {constants}"]
        schema = root
        if isinstance(root, dict) and "$ref" in root:
            _check_keys(_asserted(root), {"$ref", "type"})
            schema = self._referred(root)
        kinds = schema.get("type", "object") if isinstance(schema, dict) else None
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError("the schema is of no object")
        schema = _asserted(schema)
        self._check(schema, "object")
        self.rules.append(f"{name}: {self._members(schema, is_dict=False)}")

    def _constants(self, kind: str) -> str:
        own = _CONSTANTS[kind]
        return f"{own} | {_OF_JSON[kind]}" if self._takes_json else own

    def _new(self, body: str) -> str:
        name = f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _once(self, text: str, body: Callable[[], str]) -> str:
        """The name of the rule for `text`, which its own body may refer to."""
        if text not in self._names:
            self._names[text] = name = f"{self._name}_for_{len(self._names)}"
            self.rules.append(f"{name}: {body()}")
        return self._names[text]

    def _value(self, schema: Any) -> str:
        """The name of the rule of a value."""
        if schema is True:
            return "py_any"
        if not isinstance(schema, dict):
            raise ValueError("a schema that nothing keeps to")
        kept = _asserted(schema)
        if not kept:
            return "py_any"
        return self._once(json.dumps(kept), lambda: self._body(kept))

    def _body(self, schema: dict[str, Any]) -> str:
        if "$ref" in schema:
            _check_keys(schema, {"$ref"})
            return self._value(self._referred(schema))
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list) and branches and (key != "allOf" or len(branches) == 1):
                _check_keys(schema, {key})
                return " | ".join(dict.fromkeys(map(self._value, branches)))
        kinds = schema.get("type")
        if "enum" in schema or "const" in schema:
            _check_keys(schema, {"const", "enum", "type", *_WORDS})
            return self._choices(schema, kinds if isinstance(kinds, list | None) else [kinds])
        if kinds is None:
            kinds = [kind for kind, words in _KEPT.items() if not schema.keys().isdisjoint(words)]
            kinds = kinds[:1] or [None]
        several = kinds if isinstance(kinds, list) else [kinds]
        return " | ".join(self._of_kind(schema, kind) for kind in several)

    def _referred(self, schema: dict[str, Any]) -> Any:
        found = self._root if schema["$ref"] == "#" else resolved(schema, self._root)
        if found is schema or found is None:
            raise ValueError(f"the reference {str(schema['$ref'])[:64]!r}")
        return found

    def _choices(self, schema: dict[str, Any], kinds: list[Any] | None) -> str:
        choices = [schema["const"]] if "const" in schema else schema["enum"]
        texts: dict[str, None] = {}
        bounded: dict[str, list[Any]] = {}  # by kind, what more is said of which
        for choice in choices if isinstance(choices, list) else []:
            own = _KINDS.get(type(choice), ())
            if kinds is None or not {*kinds}.isdisjoint(own):
                if schema.keys().isdisjoint(_KEPT[own[0]]):
                    texts |= dict.fromkeys(_written(choice, as_json=self._takes_json))
                else:
                    bounded.setdefault(own[0], []).append(choice)
        ways = [f"/{literal(text)}/" for text in texts]
        for kind, some in bounded.items():
            if kind in ("array", "object"):
                _check_keys(schema, {"const", "enum", "type", *_OF_STRINGS, *_OF_NUMBERS})
            ways.append(self._json(schema, kind, {"enum": some}))
        if not ways:
            raise ValueError("a schema that nothing keeps to")
        return " | ".join(ways)

    def _of_kind(self, schema: dict[str, Any], kind: Any) -> str:
        self._check(schema, kind)
        match kind:
            case "boolean" | "null":
                return self._constants(kind)
            case "array":
                return f'"[" {self._items(schema)} "]"'
            case "object":
                return f'"{{" {self._members(schema, is_dict=True)} "}}"'
            case "string" if schema.keys().isdisjoint(_OF_STRINGS):
                return "PY_STRING"
            case "number" if schema.keys().isdisjoint(_OF_NUMBERS):  # JSON's may be infinite here
                return "PY_NUMBER"
        return self._json(schema, kind, {})

    def _json(self, schema: dict[str, Any], kind: str, more: dict[str, Any]) -> str:
        """The name of the rule of numbers, or of texts between double quotes, as in JSON."""
        own = {key: schema[key] for key in _KEPT[kind] if key in schema}
        text = json.dumps({"type": kind, **own, **more})
        return self._new(self._rule("strict_json_schema", text))

    def _check(self, schema: dict[str, Any], kind: Any) -> None:
        """That all is kept. What is said of other kinds says nothing of this one."""
        _check_keys(schema, {"type", *_WORDS})
        if kind not in _KEPT:
            raise ValueError(f"the type {str(kind)[:64]!r}")

    def _items(self, schema: dict[str, Any]) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        for key, count in (("minItems", fewest), ("maxItems", 0 if most is None else most)):
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"{key!r} is no count")
        if most == 0:
            return ""
        item = self._value(schema.get("items", True))
        least = max(0, fewest - 1)
        count = f"{{{least},{'' if most is None else most - 1}}}"
        some = item if most == 1 else f"{item} (PY_COMMA {item}){count}"
        return some if fewest else f"({some})?"

    def _members(self, schema: dict[str, Any], *, is_dict: bool) -> str:
        """All arguments, or all items of a dict, in the order of their declaration."""
        required = schema.get("required", [])
        declared = schema.get("properties", {})
        if not isinstance(declared, dict):
            raise ValueError("'properties' are no object")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise ValueError("'required' is no list of names")
        declared = declared | {key: True for key in required if key not in declared}
        for key in () if is_dict else declared:
            if not _NAME.fullmatch(key):
                raise ValueError(f"no argument in Python's syntax can have the name {key!r}")
        others = schema.get("additionalProperties", True)
        following, ways = "", [""]  # what may stand behind one that has been written, and at first
        if others is not False:
            known = "|".join(map(literal, declared))
            names = r"[^\x22\x27\\\n\r\x00]*" if is_dict else "[A-Za-z_][A-Za-z0-9_]*"
            body = f"/{names}/" + (f" & ~/{known}/" if known else "")
            if is_dict:
                body = rf"/\x22/ ({body}) /\x22/ | /\x27/ ({body}) /\x27/"
            terminal = f"{self._name.upper()}_KEY_{len(self.rules)}"
            self.rules.append(f"{terminal}: {body}")
            one = f"{terminal} {'PY_COLON' if is_dict else '/=/'} {self._value(others)}"
            following = self._new(f"(PY_COMMA {one})*")
            ways = [f"{one} {following}", ""]
        for key, value in reversed(declared.items()):
            if value is False:
                continue
            try:
                item = f"{_key(key, is_dict=is_dict)} {self._value(value)} {following}"
            except ValueError as bad:
                raise bad if is_dict else ValueError(f"{bad}, in {key!r}") from None
            if key in required:
                following, ways = self._new(f"PY_COMMA {item}"), [item]
            else:
                rest = f" | {following}" if following else ""
                following = self._new(f"PY_COMMA {item}{rest}" if rest else f"(PY_COMMA {item})?")
                ways = [item, *ways]
        some = " | ".join(way for way in ways if way)
        return f"({some}){'' if '' not in ways else '?'}" if some else ""


def _key(key: str, *, is_dict: bool) -> str:
    if not is_dict:
        return f"/{literal(key)}=/"
    ways = "|".join(literal(text) for text in dict.fromkeys(_written(key)))
    return f"/{ways}/ PY_COLON"


def _written(choice: Any, *, as_json: bool = False) -> list[str]:
    """The ways to write a value: texts between double quotes, too. as_json: also others."""
    ways = [repr(choice)]
    if isinstance(choice, str) or as_json:
        text = json.dumps(choice, ensure_ascii=False)
        ways.append(json.dumps(choice) if _HALVES.search(text) else text)
    return ways


def _asserted(schema: dict[str, Any]) -> dict[str, Any]:
    """Without what llguidance, too, takes for remarks."""
    return {key: value for key, value in schema.items() if key in _ASSERTIONS}


def _check_keys(schema: Mapping[str, Any], kept: Set[str]) -> None:
    for key in sorted(schema.keys() - kept):
        raise ValueError(f"calls in Python's syntax cannot be held to {key!r} here")
