"""The interfaces of the core's replaceable parts: budgets, cost models, admissions, drafters.

They compose with any policy. They read live requests through an `EngineView`, so nothing is copied
per step. Implementations are pure: no clock, no I/O, and randomness only from a given seed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from actors.scheduling.events import MayReturn, Refuse
from actors.scheduling.plan import StepPlan, StepShape
from actors.scheduling.request import Objective, Request


class RequestView(Protocol):
    """One live request, read-only. Times are on the clock of `handle`'s `now_s`."""

    @property
    def request(self) -> Request: ...
    @property
    def request_id(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int:
        """Tokens delivered so far, including those before a replay (`Request.output`)."""
        ...

    @property
    def num_tokens(self) -> int: ...  # known: prompt and outputs
    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed or in flight; below `num_tokens` while the (re)prefill is unfinished."""
        ...

    @property
    def step_id(self) -> int:
        """The newest step, in flight or being planned, that holds a slice of it; -1: none yet."""
        ...

    @property
    def max_length(self) -> int:
        """The length at which the request ends at the latest (max_tokens, max_model_len)."""
        ...

    @property
    def first_token_s(self) -> float | None: ...
    @property
    def last_token_s(self) -> float | None: ...


class StepView(Protocol):
    """A step executed and not yet answered."""

    @property
    def plan(self) -> StepPlan: ...
    @property
    def shape(self) -> StepShape: ...
    @property
    def planned_at_s(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def predicted_s(self) -> float | None: ...


class EngineView(Protocol):
    """Read access to the core for budgets and admission; valid during the call only."""

    @property
    def now_s(self) -> float: ...
    @property
    def decoding(self) -> Sequence[RequestView]:
        """Requests whose prompt is planned to its end, best first."""
        ...

    @property
    def prefilling(self) -> Sequence[RequestView]:
        """Admitted requests with prompt (or recomputation) left, best first."""
        ...

    @property
    def is_background(self) -> bool:
        """Whether all its requests are of the background, and some are there."""
        ...

    @property
    def queue(self) -> Sequence[RequestView]: ...  # those that wait, by arrival
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_shared_tokens(self) -> int: ...
    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of all waiting requests (prompts, and outputs to be recomputed), with
        `num_shared_tokens` of prompts that another of their group (n > 1) computes for them."""
        ...

    @property
    def num_arrived(self) -> int: ...  # requests accepted so far

    @property
    def num_adapter_loads(self) -> int:
        """Adapters that the stages are loading."""
        ...

    @property
    def tokens_per_s(self) -> float:
        """Running mean of computed tokens per second; 0.0 before any step."""
        ...

    def found_by(self, priority: int, tenant: str | None = None) -> EngineView:
        """The engine as a new request finds it: background ones delay no live one, and what waits
        for its tenant's cap delays no other tenant."""
        ...

    def knows(self, request_id: int) -> bool:
        """Whether a request of this id is waiting, running or finishing."""
        ...

    def num_waiting_of(self, tenant: str) -> int: ...
    def cap_of(self, tenant: str) -> tuple[int | None, int]: ...  # and how many of its wait
    def num_held_of(self, request_id: int) -> int: ...  # its tokens in blocks of running requests

    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_in_flight(self) -> int: ...  # steps executed and not yet answered
    @property
    def in_flight(self) -> Sequence[StepView]: ...  # oldest first
    @property
    def backlogged(self) -> Collection[tuple[int, StepShape]]:
        """The last answered steps that left prompts pending: their prompt tokens and shapes."""
        ...


class PrefixCache(Protocol):
    """The digests in the prefix cache, which fronts route by."""

    def findable(self) -> list[bytes]:
        """See `BlockManager.findable`."""
        ...

    def pop_changes(self) -> tuple[bool, list[bytes], list[bytes]]:
        """See `BlockManager.pop_changes`."""
        ...


def pending_tokens(engine: EngineView) -> int:
    """Known tokens still to be computed, of waiting requests and unfinished prompts."""
    unfinished = sum([v.num_tokens - v.num_computed_tokens for v in engine.prefilling])
    return engine.num_waiting_tokens + unfinished


class StepTimePredictor(Protocol):
    """Predicts times; may learn from measurements."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds the slowest stage needs for this step."""
        ...

    def latency_s(self, shape: StepShape) -> float:
        """Seconds from the first stage's start to the last one's end, the pipeline being idle."""
        ...

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to move this many KV blocks between device and host, one way."""
        ...

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Report the measured time of a step of this shape (slowest stage)."""
        ...


class Drafter(Protocol):
    """Guesses the next tokens of one request; equal tokens give equal guesses.

    acceptance_rate: of its next guess, estimated from the tokens so far.
    """

    acceptance_rate: float

    @property
    def rest(self) -> int:
        """New tokens after which it may have a guess again; 0: it has one of the next token."""
        ...

    def follow(self, output: Sequence[int]) -> bool:
        """Take in new output tokens; False if more are left than one call may take."""
        ...

    def draft(self, most: int) -> tuple[int, ...]:
        """Up to `most` guessed tokens after the last known one."""
        ...


class TokenBudget(Protocol):
    """Decides how many tokens a step may hold.

    learns: whether `observe` must be called.
    """

    learns: ClassVar[bool]

    @property
    def holds_starts(self) -> bool:
        """Whether, in the last plan, requests waited because one more decode would miss an
        objective."""
        ...

    def may_start(self, engine: EngineView) -> bool:
        """Whether one more request may run. Not called while nothing runs."""
        ...

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        """Most tokens of the step being planned, decodes included.

        `shape` holds what is already in it (the decodes, for decode-first policies). Decodes
        are never dropped: an answer below `shape.num_tokens` means "no prefill".
        """
        ...

    def num_background_decodes(self, live: StepShape, most: int, context: int) -> int:
        """Of `most` background decodes at this context, how many may join a step's live part, which
        is empty while live requests are in other steps. Call it before `room_for_background`."""
        ...

    def room_for_background(self, shape: StepShape) -> int:
        """Most tokens of background prompts that the step may hold in addition.

        Every few steps there is room for either, so that background requests go on."""
        ...

    def room_for_drafts(self, shape: StepShape) -> int:
        """Most drafts that the step may have in addition, once its prefill is planned."""
        ...

    def room_for_adapter_loads_s(self, shape: StepShape) -> float:
        """For how long adapters may be loaded beside the step, once it is planned. Never 0: every
        load ends."""
        ...

    def observe(self, shape: StepShape, duration_s: float, drafting_s: float) -> None:
        """Feedback after every step but those beside a load, whose time is not their shape's."""
        ...

    def delivery_took(self, seconds: float) -> None:
        """As `events.DeliveryTook`."""
        ...


@dataclass(frozen=True, slots=True)
class QuoteRequest:
    """The size of a request that may follow, and what it would ask for.

    priority: below 0 it leaves time to others (see `admission.quote`).
    """

    num_prompt_tokens: int
    max_tokens: int
    objective: Objective = field(default_factory=Objective)
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Quote:
    """The prediction for a request submitted now; reserves nothing. Times in seconds.

    can_serve_now: whether it would be accepted and keep its objectives. None: unknown, because
        there is no cost model; then no time below is known.
    ttft_s: median of the time to its first token. ttft_bound_s: the bound that admission uses.
    tbt_bound_s: bound on the time between its tokens, beside the running requests.
    least_ttft_s, least_tbt_s: on an idle engine.
    retry_after_s: None if it can be served now, if waiting does not help, or if unknown.
    message, param: the reason of a refusal, and the parameter at fault.
    """

    can_serve_now: bool | None
    ttft_s: float | None = None
    ttft_bound_s: float | None = None
    tbt_bound_s: float | None = None
    least_ttft_s: float | None = None
    least_tbt_s: float | None = None
    retry_after_s: float | None = None
    message: str | None = None
    param: str | None = None


class Admission(Protocol):
    """Decides which requests may be queued, and when the head of the queue may start."""

    def on_submit(self, request: Request, engine: EngineView) -> Refuse | None:
        """Called once, before the request is queued (after the core's own limits), and not for
        one that was accepted before (`Request.was_accepted`), or with the first of its group."""
        ...

    def turned_away(self, refused: Sequence[MayReturn], now_s: float) -> None:
        """As `events.TurnedAway`."""
        ...

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        """Called for the head of the queue when a slot and KV blocks are free.

        Not called while nothing runs: then the head always starts, so the engine never hangs.
        """
        ...
