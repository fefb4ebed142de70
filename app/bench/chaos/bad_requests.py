"""Bad requests by the thousand, drawn from the server's own schema: `/openapi.json`.

A request is a good one with one thing wrong: a value of another type or out of its range, a
number that is none, a missing or an unknown parameter, depth, length, bytes that are no text.
What is drawn may by chance still be acceptable; so good ones ask for few tokens, and of the others
`tokens_asked` tells how many an answer may have.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JSON = "application/json"
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRequest:
    """One request. kind: what is wrong with it."""

    kind: str
    path: str
    content: bytes
    content_type: str = JSON
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class RawJson:
    """A value written as these bytes, which no JSON encoder produces."""

    text: bytes


# The least that is accepted, by path.
_GOOD: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [300, 301]},
    "/v1/slo/quote": {"prompt_tokens": 10, "max_tokens": 2},
}
_GENERATES = re.compile("completions|responses")
_TOKENS_ASKED = re.compile(rb'"max_(?:completion_|output_)?tokens": ?(\d+)')
_NUMBERS = (
    -1, 0, -(2**31), 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.5, 1e308, 5e-324,
)  # fmt: skip
_NOT_NUMBERS = tuple(
    map(RawJson, (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"01", b"0x10", b"1_000",
                  b"+1", b".5", b"1.", b"9" * 400))
)  # fmt: skip
_NOT_TEXTS = tuple(
    map(RawJson, (b'"\xff"', b'"\xc3"', b'"\\ud800"', b'"\\x41"', b'"\n"', b'"\x00"',
                  b'"\xed\xa0\x80"', b"'a'", b'"\\u12"', b'"abc', b"undefined", b"True", b"None"))
)  # fmt: skip
_TEXTS = (
    "",
    " ",
    "\x00",
    "x" * 3000,
    "x" * 70_000,
    "\U0001f3b5" * 500,
    "\u202e",
    "${jndi:x}",
    "../../etc",
)
_ANY: tuple[Any, ...] = (None, True, False, 1, 1.5, "5", [], {}, [[]], [None], {"a": 1}, [1], ["a"])


def bad_requests(document: Schema, seed: int, model: str) -> Iterator[BadRequest]:
    """An endless stream, determined by seed and document."""
    draw = RequestSpoiler(document, random.Random(seed), model)
    while True:
        yield draw.one()


class RequestSpoiler:
    """Draws bad requests."""

    def __init__(self, document: Schema, chance: random.Random, model: str) -> None:
        self._chance = chance
        self._model = model
        self._definitions = document["components"]["schemas"]
        self._schemas = {
            path: self._resolved(
                operations["post"]["requestBody"]["content"][JSON]["schema"]
            )["properties"]
            for path, operations in document["paths"].items()
            if path in _GOOD and "post" in operations
        }  # fmt: skip
        self._paths = list(self._schemas)
        self._makers: list[Callable[[str, dict[str, Any]], BadRequest]] = [
            *[self._wrong_value] * 8, *[self._several_wrong] * 2, self._missing, self._extra,
            self._twice, self._deep, self._cut, self._noise, self._flipped, self._no_object,
            self._other_type, self._other_method,
        ]  # fmt: skip

    def one(self) -> BadRequest:
        path = self._chance.choice(self._paths)
        return self._chance.choice(self._makers)(path, {"model": self._model, **_GOOD[path]})

    # ---- by the schema ------------------------------------------------------------------------

    def _wrong_value(self, path: str, body: dict[str, Any]) -> BadRequest:
        name = self._chance.choice(list(self._schemas[path]))
        body[name] = self._wrong(self._schemas[path][name], 3)
        return BadRequest("wrong value", path, dump(body))

    def _several_wrong(self, path: str, body: dict[str, Any]) -> BadRequest:
        names = list(self._schemas[path])
        for name in self._chance.sample(names, min(len(names), self._chance.randint(2, 6))):
            body[name] = self._wrong(self._schemas[path][name], 3)
        return BadRequest("several wrong", path, dump(body))

    def _wrong(self, schema: Schema, depth: int) -> Any:
        """A value that this schema most likely refuses, at the top level or nested."""
        chance = self._chance
        schema = self._resolved(schema)
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches:
            return self._wrong(chance.choice(branches), depth)
        kind = schema.get("type")
        if depth > 0 and chance.random() < 0.6:
            if kind == "object" and schema.get("properties"):
                return self._wrong_object(schema, depth)
            if kind == "array":
                count = chance.choice([1, 2, 3, 300])
                inside = [self._wrong(schema.get("items", {}), depth - 1)]
                return [1, "a"][: count - 1] + inside * chance.choice([1, count])
        pools: list[tuple[Any, ...]] = [_ANY, _NUMBERS, _NOT_NUMBERS, _NOT_TEXTS, _TEXTS]
        if kind in ("integer", "number"):
            pools += [_NUMBERS, _NUMBERS, _NOT_NUMBERS, _bounds(schema)]
        if kind == "string":
            pools += [_TEXTS, _TEXTS, _NOT_TEXTS]
        return chance.choice(chance.choice([pool for pool in pools if pool]))

    def _wrong_object(self, schema: Schema, depth: int) -> dict[str, Any]:
        chance, properties = self._chance, schema["properties"]
        names = chance.sample(list(properties), chance.randint(1, len(properties)))
        found = {name: self._wrong(properties[name], depth - 1) for name in names}
        if chance.random() < 0.3:
            found[self._name()] = chance.choice(_ANY)
        return found

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        return schema

    # ---- by its form --------------------------------------------------------------------------

    def _missing(self, path: str, body: dict[str, Any]) -> BadRequest:
        required = [key for key in body if key not in ("max_tokens", "max_output_tokens")]
        del body[self._chance.choice(required)]
        return BadRequest("missing", path, dump(body))

    def _extra(self, path: str, body: dict[str, Any]) -> BadRequest:
        return BadRequest("extra", path, dump({**body, self._name(): self._chance.choice(_ANY)}))

    def _name(self) -> str:
        return (
            "".join(self._chance.choices('abc_.$é猫\x01\n"\\', k=self._chance.randint(1, 60)))
            + "_no"
        )

    def _twice(self, path: str, body: dict[str, Any]) -> BadRequest:
        text = dump(body)
        name = self._chance.choice(list(self._schemas[path]))
        again = json.dumps(name).encode() + b":" + dump(self._chance.choice(_ANY))
        return BadRequest("twice", path, text[:-1] + b"," + again + b"}")

    def _deep(self, path: str, body: dict[str, Any]) -> BadRequest:
        chance = self._chance
        opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
        depth = chance.choice([100, 198, 199, 200, 201, 1000, 50_000])
        inner = chance.choice([b"1", b""])
        closed = closing * depth if chance.random() < 0.5 else b""
        body[chance.choice(list(self._schemas[path]))] = RawJson(opening * depth + inner + closed)
        return BadRequest("deep", path, dump(body))

    def _cut(self, path: str, body: dict[str, Any]) -> BadRequest:
        text = dump(body)
        return BadRequest("cut", path, text[: self._chance.randrange(len(text))])

    def _noise(self, path: str, body: dict[str, Any]) -> BadRequest:
        return BadRequest("noise", path, self._chance.randbytes(self._chance.randrange(400)))

    def _flipped(self, path: str, body: dict[str, Any]) -> BadRequest:
        text = bytearray(dump(body))
        for _ in range(self._chance.randint(1, 4)):
            text[self._chance.randrange(len(text))] = self._chance.randrange(256)
        return BadRequest("flipped", path, bytes(text))

    def _no_object(self, path: str, body: dict[str, Any]) -> BadRequest:
        values = (*_ANY, *_NUMBERS, *_NOT_NUMBERS, *_NOT_TEXTS, [body])
        chosen = self._chance.choice([value for value in values if value != {}])
        return BadRequest("no object", path, dump(chosen))

    def _other_type(self, path: str, body: dict[str, Any]) -> BadRequest:
        kind = self._chance.choice(
            ["text/plain", "multipart/form-data", "nonsense", "", "application/jsonx"]
        )
        return BadRequest("content type", path, dump(body), kind)

    def _other_method(self, path: str, body: dict[str, Any]) -> BadRequest:
        method = self._chance.choice(["GET", "PUT", "DELETE", "PATCH", "TRACE", "FOO"])
        where = self._chance.choice(
            [path, path + "/", path + "/x", "/" + path, path + "?a=b", "/%00", "/%ff"]
        )
        if where in (path, path + "?a=b") and method == "POST":
            method = "PUT"
        return BadRequest("method or path", where, dump(body), method=method)


def tokens_asked(bad: BadRequest, context: int) -> int:
    """The most tokens that an answer may have: a number of any size is a good one, and means what
    the context leaves, as no number does. context: of the model."""
    if not _GENERATES.search(bad.path):
        return 0
    asked = [int(digits[:18]) for digits in _TOKENS_ASKED.findall(bad.content)]
    return min(context, max(asked, default=context))


def _bounds(schema: Schema) -> tuple[Any, ...]:
    """Values just outside the range that the schema allows."""
    found: list[Any] = []
    for key, step in (
        ("minimum", -1),
        ("maximum", 1),
        ("exclusiveMinimum", 0),
        ("exclusiveMaximum", 0),
    ):
        if key in schema:
            found.append(schema[key] + step)
    return tuple(found)


def dump(value: Any) -> bytes:
    """JSON text, with the bytes of `RawJson` verbatim."""
    if isinstance(value, RawJson):
        return value.text
    if isinstance(value, Mapping):
        members = (json.dumps(key).encode() + b":" + dump(item) for key, item in value.items())
        return b"{" + b",".join(members) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(dump, value)) + b"]"
    return json.dumps(value).encode()
