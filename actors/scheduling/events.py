"""The core's two languages: events go in, instructions come out.

`core.handle(event, now_s) -> list[Instruction]` is the only way anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """The caller has gone. Unknown and finished ids are ignored: races are normal."""

    request_id: int


@dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The stages raised on this step but live on; its work must be planned again.

    culprit: the request known to be at fault, which is then ended with an error.
    """

    step_id: int
    message: str
    culprit: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineLost:
    """Stages were rebuilt: nothing in flight will answer and all KV is gone. Replay.

    What is in flight when this arrives is forgotten; later answers to it must not be passed on.
    tier: as `TierHolds.ranks`, where there is a second tier.
    """

    tier: tuple[tuple[bytes, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Live change of scheduling settings (keys as in the YAML's `scheduling` and `slo`)."""

    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tick:
    """Only time has passed (asked for by WakeAt)."""


@dataclass(frozen=True, slots=True)
class TierHolds:
    """Once, before any request: the digests in each rank's second tier of the prefix cache."""

    ranks: tuple[tuple[bytes, ...], ...]


class TierChange(NamedTuple):
    """What one rank's store holds now that it did not when it was last asked, and the reverse."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved:
    """The answer to a Save or a Fetch; a move that failed is answered too.

    num_blocks: how many of its blocks, from the first, are done on every rank.
    changes: one a rank.
    """

    move_id: int
    num_blocks: int
    changes: tuple[TierChange, ...] = ()


Event = (
    Submit | Abort | StepDone | StepFailed | PipelineLost | Reconfigure | Tick | TierHolds | Moved
)


# ---- instructions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Execute:
    """Run this plan; at most `pipeline depth` are outstanding, answered in order.

    predicted_s: the cost model's estimate of the step, when there is one.
    """

    plan: StepPlan
    predicted_s: float | None = None


class Output(NamedTuple):
    """What is new of one request. `index` numbers its first token among the request's outputs.

    num_cached_tokens: prompt tokens whose KV came from the prefix cache or from the group,
        on the first output of a request's life. An aborted request gets one last output
        with finish_reason ABORT, an erroneous one with ERROR and the message in `error`.
    queued_s: arrival to its first plan, on the first output of a request's life.
    """

    request_id: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    pooled: tuple[float, ...] = ()
    error: str | None = None
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Emit:
    """All outputs of one iteration, to be sent as one message."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request will not be served: over a limit (retry_after_s None) or overload (set)."""

    request_id: int
    message: str
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at this time: something (ageing, admission) may become possible then."""

    time_s: float


@dataclass(frozen=True, slots=True)
class Save:
    """Copy these device blocks, (block, digest), into the second tier of every rank. No step writes
    them, and none is given them, until Moved comes."""

    move_id: int
    blocks: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fill these device blocks, (block, digest), from the second tier, in order; those not filled
    within limit_s are left. No step touches them until Moved comes, nothing writes them after."""

    move_id: int
    blocks: tuple[tuple[int, bytes], ...]
    limit_s: float


KVMove = Save | Fetch
Instruction = Execute | Emit | Refuse | WakeAt | KVMove
