"""The messages between the processes of one engine, as msgpack (never pickle).

A message is a frozen dataclass or NamedTuple of plain values or other messages, without tensors.
It is encoded as its fields in order: `pack` and `unpack` serve every kind, directed by the declared
types. On the socket between replica and scheduler the message's kind goes before it (`pack_kind`).
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from actors.fleet.snapshot import EngineSnapshot, PrefixUpdate
from actors.scheduling.events import (
    PLAIN_FIELDS,
    DeliveryTook,
    FetchEarly,
    Output,
    OutputRow,
    Refuse,
    TurnedAway,
    plain_output,
)
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request

_Kind = TypeVar("_Kind")

# ---- replica -> scheduler ------------------------------------------------------------------

SlowQuestion = Literal["load_adapter", "kv_saved", "kv_fetched", "next_token", "reset_prefix_cache"]
Question = Literal[
    SlowQuestion, "status", "stage_pids", "try_changes", "reconfigure", "quote", "leave", "stand_by"
]


@dataclass(frozen=True, slots=True)
class Hello:
    """A front's first message. now_s: its clock."""

    now_s: float


@dataclass(frozen=True, slots=True)
class SubmitRequests:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of the method of `Questions` with this name; the `Answer` has the same ticket."""

    ticket: int
    question: Question
    arguments: tuple[Any, ...] = ()


# ---- scheduler -> replica ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`, with public facts of the model.

    number: of the connection, whose requests have the ids from `peers.first_id(number)` on.
    now_s: the engine's clock.
    """

    number: int
    now_s: float
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class IterationOutputs:
    """One message per iteration carries the tokens of all of a replica's streams.

    rows: as in `Emit`. records: rows of `IterationRecord`, some iterations at a time. sent_s: when
    it was sent, on the scheduler's clock."""

    rows: tuple[Any, ...]
    records: tuple[Any, ...] = ()
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """failure: the error that was raised instead of an answer."""

    ticket: int
    value: Any
    failure: str | None = None


class RefusedSetting(NamedTuple):
    """The answer to a `reconfigure` with an impossible value. param: the key of the setting."""

    param: str
    message: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether steps are executed, i.e. the stages are not being rebuilt."""

    is_ready: bool


@dataclass(frozen=True, slots=True)
class StandbyTaken:
    """The scheduler uses the standby of this name for lost stages; to its replica only."""

    name: str


@dataclass(frozen=True, slots=True)
class RequestsStarted:
    """These requests are now being computed: if the scheduler dies, they may be the cause."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVSaved:
    """Blocks of a prompt that will be handed over are saved where peers find them: those that
    follow the last ones told, in order. They may be told after the request's last token."""

    request_id: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Suspects:
    """All suspects of engine losses, sent after a change. losses: (request id, engines lost).
    on_trial: those in flight now, alone. stages_are_lost: losses count that; no step runs."""

    losses: tuple[tuple[int, int], ...]
    on_trial: tuple[int, ...]
    stages_are_lost: bool = False


class IterationRecord(NamedTuple):
    """One iteration, for the timeline, the metrics and the logs.

    stages_s: (start, end) of each, by the scheduler's clock (`StageClocks`). holds_starts: as in
    `interfaces.TokenBudget`."""

    step: int
    submitted_s: float
    done_s: float
    predicted_s: float | None
    num_decode_tokens: int
    num_prefill_tokens: int
    num_requests: int
    stages_s: tuple[tuple[float, float], ...]
    num_decoding: int
    num_prefilling: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int
    num_recoveries: int
    token_budget: int
    holds_starts: bool = False


def output_of(row: OutputRow) -> Output:
    """The `Output` of a row as it arrived."""
    if len(row) == PLAIN_FIELDS:
        return plain_output(row)
    output: Output = _reader(Output)(row)
    return output


# ---- scheduler <-> stages ------------------------------------------------------------------

TICKET = struct.Struct("<Q")  # before a plan, and alone to wake the next stage
STAGE_TIMES = struct.Struct("<QQdd")  # ticket, stage, start and end by its device
# A message between stages: (ticket, packed plan, activations, stage times so far, error).
StageMessage = tuple[int, bytes, Any, tuple[tuple[float, float], ...], str | None]
StageAnswer = tuple[int, bytes, str | None]  # of the last one: (ticket, packed result, error)


@dataclass(frozen=True, slots=True)
class StepError:
    """A stage raised an error in a step; the graph continues."""

    step_id: int
    message: str


def read_answer(step_id: int, packed: bytes, error: str | None) -> StepResult | StepError:
    """The answer to step `step_id` out of a `StageAnswer`."""
    if error is not None:
        return StepError(step_id, error)
    result = unpack(StepResult, packed)
    if result.step_id != step_id:
        return StepError(step_id, f"step {step_id} was answered with step {result.step_id}")
    return result


# ---- one way to pack -----------------------------------------------------------------------

_KINDS: tuple[type, ...] = (
    SubmitRequests, AbortRequests, Ask, IterationOutputs, Refuse, Answer, Readiness,
    StandbyTaken, RequestsStarted, Suspects, Hello, Welcome, EngineSnapshot, PrefixUpdate,
    KVSaved, FetchEarly, DeliveryTook, TurnedAway,
)  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def pack(message: Any) -> bytes:
    """A message as its fields in order; tuples (and so NamedTuples) are packed as they are."""
    return msgpack.packb(message, default=_fields_of)


def unpack(kind: type[_Kind], data: bytes) -> _Kind:
    """The message of declared type `kind` that `pack` made `data` from."""
    return read_value(kind, msgpack.unpackb(data, use_list=False))


def read_value(kind: type[_Kind], value: Any) -> _Kind:
    """The message of type `kind` that came in a field declared `Any`: of `Ask` or `Answer`."""
    read: Callable[[Any], _Kind] = _reader(kind)  # type: ignore[arg-type]  # types are hashable
    return read(value)


def pack_kind(message: Any) -> bytes:
    return pack((_NUMBERS[type(message)], message))


def unpack_kind(frame: bytes) -> Any:
    number, row = msgpack.unpackb(frame, use_list=False)
    return _reader(_KINDS[number])(row)


@cache
def _getter(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(kind)]
    if len(names) == 1:
        return lambda message: (getattr(message, names[0]),)
    return attrgetter(*names)


def _fields_of(message: Any) -> tuple[Any, ...]:
    return _getter(type(message))(message)  # type: ignore[arg-type]  # types are hashable


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """A function that converts a value read by msgpack to the declared type `kind`.

    `_as_read` if no conversion is needed.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        (inner,) = (_reader(a) for a in arguments if a is not types.NoneType)
        return inner if inner is _as_read else _optional(inner)
    if origin is tuple and arguments[-1] is Ellipsis:
        inner = _reader(arguments[0])
        return inner if inner is _as_read else lambda row: tuple([inner(item) for item in row])
    if origin is tuple:
        return _row_reader(tuple(map(_reader, arguments)), tuple)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if isinstance(kind, type) and (issubclass(kind, tuple) or is_dataclass(kind)):
        hints, own = get_type_hints(kind), tuple[kind, ...]
        names = [f.name for f in fields(kind)] if is_dataclass(kind) else list(hints)
        readers = tuple(_own_reader(kind) if hints[n] == own else _reader(hints[n]) for n in names)
        make = (lambda row: kind(*row)) if is_dataclass(kind) else partial(tuple.__new__, kind)
        return _row_reader(readers, make)
    return _as_read


def _own_reader(kind: Any) -> Callable[[Any], Any]:  # of what a value of this kind holds of it
    return lambda row: tuple(map(_reader(kind), row))


def _as_read(value: Any) -> Any:
    return value


def _optional(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else inner(value)


def _row_reader(
    readers: tuple[Callable[[Any], Any], ...], make: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Reads the columns that need it and hands the row to `make`."""
    columns = [(number, read) for number, read in enumerate(readers) if read is not _as_read]
    if not columns:
        return _as_read if make is tuple else make

    def read_row(row: tuple[Any, ...]) -> Any:
        values = list(row)
        for number, read in columns:
            values[number] = read(values[number])
        return make(values)

    return read_row
