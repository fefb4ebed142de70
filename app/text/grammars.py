"""Whether a grammar from the network can be served: compiled off the loop, in bounded time; and
what a JSON schema's does not keep."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from actors.scheduling.request import Grammar
from actors.stage.grammar_kinds import FORMATS
from app.text.worker import (
    KillableWorker,
    WorkerDied,
    WorkerStalled,
    WorkerTimeout,
    WorkerUnavailable,
)

GRAMMAR_LIMIT_S: Final = 1.5
_CACHE_ENTRIES: Final = 4096
_MAX_WAITING: Final = 32  # of one key
_MAX_WAITING_TOGETHER: Final = 256
_DOUBTFUL_S: Final = 30.0  # how long a time-out is held against a grammar

_NAMED_SCHEMAS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTED_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_INNER_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"}
)

# Of a schema with one of these xgrammar reads nothing else; else what belongs to its types.
_WHOLE: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_RANGE: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEPT: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "number": _RANGE | {"multipleOf"},
    "array": frozenset({"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "unevaluatedProperties"}
        | {"patternProperties", "propertyNames", "minProperties", "maxProperties"}
    ),
}
_MAY_BE_EMPTY: Final = frozenset({"uri-reference", "uri-template", "json-pointer"})  # formats
_FAR: Final = 2000  # a `maxLength` that texts of a format do not reach
_NEVER_KEPT: Final = frozenset(
    {"not", "if", "contains", "uniqueItems", "$dynamicRef"}
    | {"dependentRequired", "dependentSchemas", "dependencies"}
)
_KEYWORDS: Final = _NEVER_KEPT.union(*_KEPT.values())
_MAX_STEP: Final = 1024
_CLASS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)", re.DOTALL)  # or an escape
_LOOKAHEAD: Final = re.compile(r"\(\?[=!]")


class GrammarInvalid(Exception):
    """The grammar does not compile, or not in time. The message says why."""


class GrammarBusy(Exception):
    """Too many grammars wait to be compiled, or there is no room to compile one; try again."""


class _Verdict(NamedTuple):
    """complaint: None for a good grammar. until_s: when it is to be tried again."""

    complaint: str | None
    until_s: float = math.inf


class GrammarChecker:
    """Compiles grammars once in a child process and remembers the verdicts.

    Requests with the same grammar wait for one compilation; different ones are compiled in turns
    between API keys, so that one with many slow grammars does not keep the others out. The memory
    holds a bounded number of digests, never a grammar itself.
    """

    def __init__(self, model_path: str, *, limit_s: float = GRAMMAR_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._worker = KillableWorker("app.text.grammar_worker", model_path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # by digest
        self._compiling: dict[bytes, asyncio.Future[_Verdict]] = {}  # or waiting to be, by digest
        # The same by API key, each in the order of arrival. The first of the first key is compiled.
        self._waiting: OrderedDict[str, deque[tuple[Grammar, bytes]]] = OrderedDict()

    def warm(self) -> None:
        """Start the child in the background, so that the first grammar need not wait for it."""
        self._thread.submit(self._worker.start)

    async def check(self, grammar: Grammar, key: str = "") -> None:
        """Raises GrammarInvalid or GrammarBusy unless the grammar compiles in time. key: the name
        of the request's API key."""
        digest = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode()).digest()
        verdict = self._verdicts.get(digest)
        if verdict is not None and time.monotonic() < verdict.until_s:
            self._verdicts.move_to_end(digest)
        else:
            # Not this request's to cancel: others may wait for the same grammar.
            verdict = await asyncio.shield(
                self._compiling.get(digest) or self._enqueue(grammar, digest, key)
            )
        if verdict.complaint is not None:
            raise GrammarInvalid(verdict.complaint)

    def _enqueue(self, grammar: Grammar, digest: bytes, key: str) -> asyncio.Future[_Verdict]:
        waiting = self._waiting.get(key, deque())
        if len(waiting) >= _MAX_WAITING or len(self._compiling) >= _MAX_WAITING_TOGETHER:
            raise GrammarBusy("too many grammars wait to be compiled")
        is_idle = not self._waiting
        self._waiting[key] = waiting
        waiting.append((grammar, digest))
        verdict = self._compiling[digest] = asyncio.get_running_loop().create_future()
        if is_idle:
            self._begin()
        return verdict

    def _begin(self) -> None:
        grammar, _ = next(iter(self._waiting.values()))[0]
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._compile, grammar).add_done_callback(self._end)

    def _end(self, compiled: asyncio.Future[_Verdict]) -> None:
        if not self._waiting:  # closed
            return
        key, waiting = self._waiting.popitem(last=False)
        _, digest = waiting.popleft()
        verdict = self._compiling.pop(digest)
        if (error := compiled.exception()) is not None:
            verdict.set_exception(error)
        else:
            verdict.set_result(compiled.result())
            self._verdicts[digest] = compiled.result()
            while len(self._verdicts) > _CACHE_ENTRIES:
                self._verdicts.popitem(last=False)
        if waiting:
            self._waiting[key] = waiting  # behind the others
        if self._waiting:
            self._begin()

    def close(self) -> None:
        """End the thread and the child process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._waiting.clear()
        for verdict in self._compiling.values():
            verdict.cancel()
        self._worker.close()

    def _compile(self, grammar: Grammar) -> _Verdict:
        job = {"kind": grammar.kind, "text": grammar.text, "limit_s": self._limit_s}
        try:
            answer = self._worker.call(job, self._limit_s)
        except WorkerStalled as stalled:  # the grammar may be fine
            raise GrammarBusy("the compiler of grammars gets no processor") from stalled
        except WorkerUnavailable as unavailable:
            raise GrammarBusy(f"grammars cannot be compiled now: {unavailable}") from unavailable
        except WorkerTimeout:
            return _Verdict(f"does not compile within {self._limit_s:g} s", self._soon())
        except WorkerDied:
            return _Verdict("needs too much memory to compile", self._soon())
        if (error := answer.get("error")) is None:
            return _Verdict(None)
        return _Verdict(str(error), self._soon() if answer.get("is_measured") else math.inf)

    def _soon(self) -> float:
        """Until when a verdict holds that a busy machine may have spoken."""
        return time.monotonic() + _DOUBTFUL_S


def first_not_kept(schema: Any) -> str | None:
    """What xgrammar (0.2.8) leaves out of account in a schema, without an error, so that an answer
    may break it there; None if nothing. Of `oneOf` it counts as kept that one branch matches.
    """
    if not isinstance(schema, dict):
        return None
    whole = next((key for key in _WHOLE if key in schema), None)
    found = _beside(schema, whole) if whole else _of_types(schema)
    return found or next(filter(None, map(first_not_kept, _inner(schema))), None)


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            yield from value.values()
        elif key in _LISTED_SCHEMAS:
            yield from _listed(value)
        elif key == "propertyNames" and isinstance(value, dict):
            yield {"type": "string", **value}
        elif key in _INNER_SCHEMAS:
            yield value


def _beside(schema: dict[str, Any], whole: str) -> str | None:
    """Of a schema of which `whole` alone counts."""
    given = schema[whole]
    if whole == "$ref" and given != "#" and not str(given).startswith("#/"):
        return f"the $ref '{str(given)[:64]}'"
    if whole == "allOf" and len(_listed(given)) > 1:
        return "an 'allOf' of several schemas"
    for key in schema:
        if key != whole and (key in _KEYWORDS or key in _WHOLE):
            return f"'{key}' beside '{whole}'"
    branches = _listed(given) if whole in _LISTED_SCHEMAS else []
    if "type" in schema and not all(_tells_its_type(branch) for branch in branches):
        return f"'type' beside '{whole}'"
    return None


def _tells_its_type(branch: Any) -> bool:
    return isinstance(branch, dict) and not branch.keys().isdisjoint({"type", *_WHOLE})


def _of_types(schema: dict[str, Any]) -> str | None:
    """Of a schema in which keywords count that belong to its types."""
    types = [schema.get("type"), *_listed(schema.get("type"))]
    if "type" not in schema:  # it is told by these
        types += ["object"] if {"properties", "additionalProperties"} & schema.keys() else []
        types += ["array"] if "items" in schema else []
    for key in filter(_KEYWORDS.__contains__, schema):
        is_known = "type" in schema or any(key in _KEPT.get(one, ()) for one in types)
        if (key in _NEVER_KEPT and schema[key]) or not is_known:
            return f"'{key}'" if key in _NEVER_KEPT else f"'{key}' without a 'type'"
    if "string" in types and (found := _of_strings(schema)):
        return found
    if "multipleOf" in schema and ("number" in types or not _is_step(schema)):
        return f"'multipleOf', other than one up to {_MAX_STEP} of an integer without bounds"
    patterns = [schema.get("pattern"), *_keys(schema.get("patternProperties"))]
    if any(isinstance(one, str) and _LOOKAHEAD.search(_CLASS.sub("", one)) for one in patterns):
        return "a pattern's lookahead"
    declared = _keys(schema.get("properties"))
    if "object" in types and not declared.issuperset(map(str, _listed(schema.get("required")))):
        return "'required' of a name that 'properties' lacks"
    if "propertyNames" in schema and (declared or "patternProperties" in schema):
        return "'propertyNames' beside 'properties'"
    return None


def _of_strings(schema: dict[str, Any]) -> str | None:
    forms = ["format"] if str(schema.get("format")) in FORMATS else []
    forms += ["pattern"] if "pattern" in schema else []
    bounds = [key for key in ("minLength", "maxLength") if schema.get(key)]
    if forms == ["format"]:
        bounds = [key for key in bounds if not _is_beside_format(key, schema)]
    found = [*forms, *bounds[:1]]
    return f"'{found[1]}' beside '{found[0]}'" if len(found) > 1 else None


def _is_beside_format(key: str, schema: dict[str, Any]) -> bool:
    """Whether a text of the format keeps this bound, or hardly any does not: pydantic writes both
    beside an address (HttpUrl)."""
    if key == "minLength":
        return bool(schema[key] == 1 and schema["format"] not in _MAY_BE_EMPTY)
    return isinstance(schema[key], int) and schema[key] >= _FAR


def _is_step(schema: dict[str, Any]) -> bool:
    step = schema["multipleOf"]
    return type(step) is int and step <= _MAX_STEP and schema.keys().isdisjoint(_RANGE)


def _keys(value: Any) -> set[str]:
    return set(value) if isinstance(value, dict) else set()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
