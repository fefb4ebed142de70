"""All calls of a core as rows of plain data: recording and replay.

A row is one call of `handle`: {"now_s", "kind", "event", "instructions"}, where `event` and
`instructions` are JSON text, so that rows fit a flat table. The first row has kind "Config". The
core is deterministic, so replaying the events must give the recorded instructions exactly.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from actors.scheduling import events
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.events import Emit, Event, Instruction, Output

Row = dict[str, Any]

# Fields in logs of earlier versions, and now
_RENAMED = {"further": "extra_tokens", "load_s": "adapter_load_s"}
# Defaults that were others when logs left them out: of settings that such a log does not name.
_FORMER_DEFAULTS = {"drafter": "none", "delivery_s": 0.0}
_EVENTS = {kind.__name__: kind for kind in get_args(events.Event)}
_INSTRUCTIONS = {kind.__name__: kind for kind in get_args(events.Instruction)}


class ReplayMismatch(Exception):
    """The core's answer to a recorded event differs; `row` counts from 0."""

    def __init__(self, row: int, recorded: str, replayed: str) -> None:
        super().__init__(f"row {row}: recorded {recorded[:500]} but got {replayed[:500]}")
        self.row = row


# ---- values to plain data and back, directed by the declared types -----------------------


def encode(value: Any) -> Any:
    """JSON-able form of the values in events and instructions.

    Dataclasses become objects without their default fields, NamedTuples and tuples arrays.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Emit):
        return {"outputs": encode(value.outputs)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default  # MISSING equals nothing


def decode(kind: Any, data: Any) -> Any:
    """The value of declared type `kind` that `encode` made `data` from."""
    return _decoder(kind)(data)


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if len(inner) != 1:
            raise TypeError(f"only `X | None` can be decoded, not {kind}")
        decoder = _decoder(inner[0])
        return lambda data: None if data is None else decoder(data)
    if origin is tuple and arguments[-1] is Ellipsis:
        # Looked up late, as a kind may hold others of its own.
        return lambda data: tuple(map(_decoder(arguments[0]), data))
    if origin is tuple:
        decoders = [_decoder(argument) for argument in arguments]
        return lambda data: tuple([d(item) for d, item in zip(decoders, data, strict=True)])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if kind is bytes:
        return bytes.fromhex
    if kind is Emit:
        decoder = _decoder(tuple[Output, ...])
        return lambda data: Emit(decoder(data["outputs"]))
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        hints = get_type_hints(kind)
        decoders = [_decoder(hints[name]) for name in kind._fields]  # type: ignore[attr-defined]
        return lambda data: kind(*[d(item) for d, item in zip(decoders, data, strict=True)])
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        by_name = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(kind)}
        by_name |= {old: by_name[new] for old, new in _RENAMED.items() if new in by_name}
        return lambda data: kind(
            **{
                _RENAMED.get(name, name): _known(by_name, name, kind.__name__)(item)
                for name, item in data.items()
            }
        )
    return lambda data: data


def _known(of_name: Mapping[str, Any], name: str, place: str) -> Any:
    try:
        return of_name[name]
    except KeyError:
        message = f"the log is of another version: unknown {name!r} in {place}"
        raise ValueError(message) from None


# ---- rows ---------------------------------------------------------------------------------


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def config_row(config: SchedulerConfig) -> Row:
    """The first row of a log, with all fields: another version may have other defaults."""
    fields = {f.name: encode(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return {
        "now_s": 0.0,
        "kind": "Config",
        "event": _dump(fields),
        "instructions": "[]",
    }


def to_row(now_s: float, event: Event, instructions: Iterable[Instruction]) -> Row:
    """One call of `handle` and what it returned."""
    return {
        "now_s": now_s,
        "kind": type(event).__name__,
        "event": _dump(encode(event)),
        "instructions": _dump([[type(i).__name__, encode(i)] for i in instructions]),
    }


def from_row(row: Row) -> tuple[float, Event, list[Instruction]]:
    """The inverse of `to_row`. Raises ValueError for what this version does not know."""
    event: Event = decode(_known(_EVENTS, row["kind"], "events"), json.loads(row["event"]))
    instructions: list[Instruction] = [
        decode(_known(_INSTRUCTIONS, name, "instructions"), data)
        for name, data in json.loads(row["instructions"])
    ]
    return row["now_s"], event, instructions


def config_of(row: Row) -> SchedulerConfig:
    """The configuration in the first row of a log. Raises ValueError as `from_row` does."""
    if (kind := row.get("kind", "what is no event")) != "Config":
        raise ValueError(f"a log begins with its configuration, not with {kind}")
    settings = {**_FORMER_DEFAULTS, **json.loads(row["event"])}
    config: SchedulerConfig = decode(SchedulerConfig, settings)
    return config


class Recorder:
    """Passes every call to a core, and its row to `write`."""

    def __init__(self, core: Core, write: Callable[[Row], object]) -> None:
        self.core = core
        self._write = write
        write(config_row(core.config))

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        instructions = self.core.handle(event, now_s)
        self._write(to_row(now_s, event, instructions))
        return instructions


def replay(rows: Iterable[Row], core: Core | None = None) -> Iterator[Row]:
    """Feed a log's events to a fresh core (that of its first row) and yield the rows it gives."""
    iterator = iter(rows)
    if (first := next(iterator, None)) is None:
        raise ValueError("the log is empty")
    core = core or build_core(config_of(first))
    yield config_row(core.config)
    for row in iterator:
        now_s, event, _ = from_row(row)
        yield to_row(now_s, event, core.handle(event, now_s))


def check_replay(rows: Iterable[Row], core: Core | None = None) -> int:
    """Replay a log; returns its number of rows, raises ReplayMismatch at the first difference."""
    recorded = list(rows)
    for number, (old, new) in enumerate(zip(recorded, replay(recorded, core), strict=True)):
        differs = old["instructions"] != new["instructions"]
        if differs and _as_named_now(old) != new["instructions"]:
            raise ReplayMismatch(number, old["instructions"], new["instructions"])
    return len(recorded)


def _as_named_now(row: Row) -> str:
    """Its instructions; an earlier version may have named their fields otherwise."""
    instructions: str = to_row(*from_row(row))["instructions"]
    return instructions
