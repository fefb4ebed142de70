"""What a JSON schema says of the types of a value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
BRANCHES: Final = ("anyOf", "oneOf", "allOf")
_REMARKS: Final = frozenset({"default", "description", "examples", "title"})


def types_of(schema: Any, root: Any, seen: set[str] | None = None) -> list[str]:
    """The types as declared or implied; none where the client's schema is no proper one."""
    seen = set() if seen is None else seen
    schema = resolved(schema, root, seen)
    if not isinstance(schema, Mapping):
        return []
    if kinds := kinds_of(schema):
        return kinds
    if (choices := choices_of(schema)) is not None:
        return list(dict.fromkeys(map(_type_of, choices)))
    branches = next((schema[key] for key in BRANCHES if key in schema), None)
    if not isinstance(branches, list):
        return []
    return [kind for one in branches for kind in types_of(one, root, seen)]


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """The types as declared, or that of which alone its keywords speak; none: any."""
    kinds = schema.get("type")
    if kinds is None and choices_of(schema) is None:
        kinds = "object" if "properties" in schema else "array" if "items" in schema else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return [kind for kind in kinds if isinstance(kind, str)]


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of which it has to be one."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else None


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((kind for kind, types in TYPES.items() if isinstance(value, types)), "string")


def is_of(value: Any, kinds: list[str]) -> bool:
    kind = _type_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def alternatives(
    schema: Any, root: Any, seen: set[str] | None = None
) -> Iterator[Mapping[str, Any]]:
    """The schemas of which a value has to be of one, each of one type."""
    seen = set() if seen is None else seen
    schema = resolved(schema, root, seen)
    if schema is None:  # it refers to itself
        return
    if not isinstance(schema, Mapping):
        schema = {}
    for key in BRANCHES:
        branches = schema.get(key)
        if schema.keys() - _REMARKS != {key} or not isinstance(branches, list):
            continue
        if key != "allOf" or len(branches) == 1:
            for one in branches:
                yield from alternatives(one, root, seen)
            return
    kinds = kinds_of(schema) if choices_of(schema) is None else []
    yield from ({**schema, "type": kind} for kind in kinds)
    if not kinds:
        yield schema


def resolved(schema: Any, root: Any, seen: set[str]) -> Any:
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


def properties_of(root: Any) -> Mapping[str, Any]:
    """The schemas of an object's properties; none where the client's schema is no proper one."""
    schema = resolved(root, root, set())
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """A schema's JSON without the one that it is in; what it refers to is moved into it."""
    if '"$ref"' not in json.dumps(schema):
        return json.dumps(schema)
    return json.dumps({**_moved(schema), "$defs": {"whole": _moved(root)}})


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/whole{reference[1:]}"
    return moved
