"""The core's interface: events go in, instructions come out.

`core.handle(event, now_s) -> list[Instruction]` is the only call that changes anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from actors.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from actors.scheduling.request import FinishReason, Request

# ---- events ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The caller has left. Unknown and finished ids are ignored, since the request may just have
    ended.
    """

    request_id: int


@dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The stages raised an error in this step but keep running; its work must be planned again."""

    step_id: int
    message: str


@dataclass(frozen=True, slots=True)
class PipelineLost:
    """The stages were rebuilt: steps in flight get no answer, and all KV is lost.

    Running requests are replayed. Late answers to earlier steps must not be passed on.
    tier: as `TierHolds.ranks`, if there is a second tier.
    steps_are_suspect: False where steps that had failed before, or a move of KV that hung beside
    steps that went on, made the engine give the stages up: those in flight have not lost them.
    first_dropped: id of the first step that no stage got, planned while they were being rebuilt.
    """

    tier: tuple[tuple[bytes, ...], ...] = ()
    steps_are_suspect: bool = True
    first_dropped: int | None = None


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Live change of scheduling settings (keys as in the YAML's `scheduling` and `slo`)."""

    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached KV, in the second tier too: no request finds what was computed before."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed (requested by WakeAt)."""


@dataclass(frozen=True, slots=True)
class TierHolds:
    """Once, before any request: the digests in each rank's second tier of the prefix cache."""

    ranks: tuple[tuple[bytes, ...], ...]


class TierChange(NamedTuple):
    """Digests added to and removed from one rank's store since the last answer, and how many blocks
    came from another device without passing it."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    num_direct: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """The answer to a `KVMove`; one that failed is answered too.

    num_blocks: of a fetch, how many of its blocks, from the first, are there on every rank; of a
        save, how many the stores have kept.
    changes: one per rank.
    """

    move_id: int
    num_blocks: int
    changes: tuple[TierChange, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchEarly:
    """Peers have saved these blocks, in a chain's order, of a stream that is expected here.
    Ignored without a second tier that they share.

    is_last: the stream comes once these are here, so they go before what others will lack."""

    digests: tuple[bytes, ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class SaveNow:
    """A peer waits for the blocks that are completed by now: they are saved without waiting for
    more. Ignored without a second tier.

    first: it waits only for these of them, the last blocks of a stream that is about to move. They
        go before all others.
    """

    first: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DeliveryTook:
    """From time to time: by how many seconds tokens reached their readers later than those of the
    step before, beyond the time between the steps, at a high quantile."""

    seconds: float


PeerEvent = FetchEarly | SaveNow
TierEvent = TierHolds | Moved | PeerEvent


class MayReturn(NamedTuple):
    """A refused request. key: see `key_of`. work_s: by how much its work delays others.
    retry_after_s: as it was told, from now."""

    key: int
    work_s: float
    retry_after_s: float
    tenant: str = ""
    priority: int = 0

    @staticmethod
    def key_of(tenant: str, prompt: Sequence[int]) -> int:
        """What a request is known by when it returns; the same in every process."""
        return hash((zlib.crc32(tenant.encode()), tuple(prompt)))

    @property
    def expected_s(self) -> tuple[float, float]:
        """From when until when it may return, from now: a quarter of its wait early or late, and
        later by a second, as Retry-After is in whole ones."""
        return 0.75 * self.retry_after_s, 1.25 * self.retry_after_s + 1.25


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A replica has refused requests by itself, by earlier refusals (`Refuse.closed_s`)."""

    refused: tuple[MayReturn, ...]


@dataclass(frozen=True, slots=True)
class AdapterLoads:
    """How many adapters the stages are loading from now on, beside the steps."""

    number: int


Told = Reconfigure | ResetPrefixCache | DeliveryTook | TurnedAway | AdapterLoads
Event = Submit | Abort | StepDone | StepFailed | PipelineLost | Told | Tick | TierEvent


# ---- instructions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Execute:
    """Run this plan; at most `pipeline depth` are outstanding, answered in order.

    predicted_s: the cost model's estimate of the step, when there is one.
    """

    plan: StepPlan
    predicted_s: float | None = None


class Output(NamedTuple):
    """New tokens of one request. `index`: position of the first one among the request's outputs.

    num_cached_tokens: prompt tokens whose KV came from the prefix cache or from the group,
        on the first output of a request's life. An aborted request gets one last output
        with finish_reason ABORT, an erroneous one with ERROR and the message in `error`, which
        comes after the tokens.
    queued_s: arrival to its first plan, on the first output of a request's life.
    """

    request_id: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    pooled: tuple[float, ...] = ()
    error: str | None = None
    queued_s: float = 0.0

    @classmethod
    def failed(cls, request_id: int, index: int, message: str) -> Output:
        """The last output of an erroneous request that has had `index` of them."""
        return cls(request_id, index, (), FinishReason.ERROR, error=message)


# What is emitted: an `Output`, or (request_id, index, token) where it has one token and nothing
# else. A plain tuple for the reason that `plan` gives.
OutputRow = tuple[Any, ...]
PLAIN_FIELDS = 3


def plain_output(row: OutputRow) -> Output:
    """The `Output` of a row that has `PLAIN_FIELDS`."""
    request_id, index, token = row
    return Output(request_id, index, (token,))


@dataclass(frozen=True, slots=True)
class Emit:
    """All outputs of one step, to be sent as one message."""

    rows: tuple[OutputRow, ...]

    @classmethod
    def of(cls, rows: Sequence[OutputRow]) -> Sequence[Emit]:
        """The instruction for these rows; none without any."""
        return [cls(tuple(rows))] if rows else []

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple([row if isinstance(row, Output) else plain_output(row) for row in self.rows])


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is not served: over a limit (retry_after_s None), or overload (set).

    closed_s: for how long other requests are taken to be refused too: of the same tenant, no higher
        priority, no shorter prompt and no looser objective of the first token. In a simulation 7 %
        of them would have been accepted. each_s: by how much each of them delays later retries.
    has_waited: it waited for `queue_timeout_s`, so that it is to wait at no other engine.
    """

    request_id: int
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    closed_s: float = 0.0
    each_s: float = 0.0
    has_waited: bool = False


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at this time, when a waiting request will have waited too long."""

    time_s: float


@dataclass(frozen=True, slots=True)
class Save:
    """Copy these device blocks, (block, digest), into the second tier of every rank. They are not
    written or given to another request until Moved comes."""

    move_id: int
    blocks: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fill these device blocks, (block, digest), from the second tier, in order; it stops after
    limit_s. No step uses them until Moved comes, and nothing writes them afterwards."""

    move_id: int
    blocks: tuple[tuple[int, bytes], ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class ClearTier:
    """Delete all blocks of every rank's second tier, behind the moves before this one."""

    move_id: int


KVMove = Save | Fetch | ClearTier
Instruction = Execute | Emit | Refuse | WakeAt | KVMove
