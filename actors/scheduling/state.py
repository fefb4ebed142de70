"""The core's mutable records: a live request, and a step in flight.

Also the digests that name KV content: a hash chain over full blocks of tokens, in which equal
digests mean equal KV. They are the same in every process, so a router can compare engines.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

from actors.scheduling.interfaces import Drafter
from actors.scheduling.plan import (
    DEAD_END,
    NOT_FINITE,
    SLOW_GRAMMAR,
    RequestStart,
    StepPlan,
    StepShape,
    TokenLogprobs,
)
from actors.scheduling.request import Request

NEVER = 1 << 62  # a length no sequence reaches
DIGEST_BYTES = 16


class RequestStatus(enum.Enum):
    """
    WAITING ──start──> RUNNING ──finish, abort──> ENDED
       ^                  │ preempted, failed, finished or aborted while a step is in flight
       └──── drained ── FINISHING ──drained──> ENDED
    """

    WAITING = "waiting"  # in the queue, in a group or to be tried; holds no device blocks
    RUNNING = "running"  # holds device blocks; in `prefilling` or in `decoding`
    FINISHING = "finishing"  # not planned; holds its blocks until no step in flight uses them
    ENDED = "ended"


class Fate(enum.Enum):
    """Next state of a FINISHING request once no step in flight uses it."""

    QUEUE = "queue"
    END = "end"


@dataclass(slots=True)
class Suspicion:
    """State of a request that was in a failed or lost step: it runs only beside other suspects.

    A successful slice clears it if it begins and ends at or after the last suspect slice.
    """

    begin: int = 0
    end: int = 0
    num_failures: int = 0  # of steps with only this request, by stages that had worked until then
    num_losses: int = 0  # pipelines lost while it was computed


class RequestState:
    """The only record of a request's progress.

    Budgets, orders and admission read the attributes of `RequestView`.
    """

    __slots__ = (
        "_block_hashes",
        "admitted",
        "awaited_digest",
        "block_table",
        "cacheable",
        "capacity",
        "decode_limit",
        "discard",
        "drafter",
        "end",
        "fate",
        "first_planned_s",
        "first_token_s",
        "host_blocks",
        "in_flight",
        "is_background",
        "is_private",
        "last_token_s",
        "level",
        "max_length",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_drafts",
        "num_first_stage_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "on_stages",
        "order_key",
        "output_token_ids",
        "prompt_logprobs",
        "refused_version",
        "request",
        "request_id",
        "sequence_number",
        "served",
        "slow_path_at",
        "state_row",
        "status",
        "step_id",
        "stops",
        "suspicion",
        "tier_asked",
        "was_trimmed",
    )  # fmt: skip

    def __init__(self, request: Request, sequence_number: int, max_model_len: int) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.is_background = request.priority < 0
        self.sequence_number = sequence_number  # order of submission
        self.status = RequestStatus.WAITING
        self.fate = Fate.QUEUE
        self.order_key: tuple[float, int] = (0.0, 0)  # smaller is better; set by the queue's order
        self.num_prompt_tokens = len(request.prompt)
        self.output_token_ids = list(request.output)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        self.max_length = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        if request.pooling is not None:
            self.max_length = self.num_prompt_tokens
        self.end = self.max_length - 1  # positions at and after it are never computed to decode
        self.stops = frozenset((*sampling.stop_token_ids, NOT_FINITE, DEAD_END, SLOW_GRAMMAR))

        # Progress in the stages
        self.num_computed_tokens = 0  # tokens computed or in flight in this life
        self.in_flight = 0  # outstanding steps that hold a slice of it
        self.step_id = -1  # the newest step that holds a slice of it
        self.discard = False  # results in flight are discarded (a step before them failed)
        self.on_stages = False  # the stages hold a copy of its state
        self.drafter: Drafter | None = None  # from its first decode on, with speculation
        self.num_drafts = 0  # in flight
        self.num_first_stage_tokens = 0  # tokens the first stage knows (several stages only)
        self.suspicion: Suspicion | None = None  # while set, it is in one of the trials

        # Memory
        self.block_table: list[int] = []  # device KV blocks, in order
        self.capacity = 0  # len(block_table) * block_size
        self.decode_limit = 0  # min(capacity, end): decodes before it need no check
        self.was_trimmed = False  # its table on the stages still has blocks that were freed
        self.host_blocks: list[int] = []  # KV of [0, num_computed_tokens) while swapped out
        self.cacheable = False  # may start from cached blocks
        self.is_private = False  # others do not find its KV: the prefix cache was reset since
        self.state_row: int | None = None  # of the saved state that it has started from
        self.tier_asked = False  # the second tier has been searched during this wait
        self.num_committed_blocks = 0  # full blocks offered to the prefix cache
        self._block_hashes: list[bytes] = [chain_root(request.cache_salt)]
        self.refused_version = -1  # memory version at the last refusal
        self.awaited_digest: bytes | None = None  # block that was missing in the prefix cache then

        # Outputs and statistics
        self.slow_path_at = 0  # length from which a new token takes the slow path
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_cached_tokens = 0  # at its first start
        self.num_preemptions = 0
        self.first_planned_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

        # Kept by orders
        self.admitted = False  # has been started once, so that it is not charged again
        self.level = 0  # multi-level feedback queue
        self.served = 0  # tokens served at that level

    def __repr__(self) -> str:
        return (
            f"<{self.request_id} {self.status.value}: {self.num_computed_tokens} of "
            f"{self.num_tokens} (max {self.max_length}) in flight {self.in_flight}>"
        )

    def use_blocks(self, block_table: list[int], block_size: int) -> None:
        """Replace the table; also after it was changed in place."""
        self.block_table = block_table
        self.capacity = len(block_table) * block_size
        self.decode_limit = min(self.capacity, self.end)

    def go_back(self, num_tokens: int) -> None:
        """The state behind the last slice is of drafts that do not stand: what is known of its
        tokens is computed again, from the state before, by the next decode, which needs a check."""
        self.num_computed_tokens -= num_tokens
        self.decode_limit = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def remaining(self) -> int:
        """Known tokens not yet planned."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def decode_length(self) -> int:
        """Tokens of its next decode."""
        return max(1, self.num_tokens - self.num_computed_tokens)

    def introduce(self) -> RequestStart:
        """The message with which it enters the stages."""
        request = self.request
        return RequestStart(
            request_id=self.request_id,
            tokens=(*request.prompt, *self.output_token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            block_ids=tuple(self.block_table),
            sampling=request.sampling,
            pooling=request.pooling,
            adapter=request.adapter,
            state_row=self.state_row,
        )

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Content names of the first `num_blocks` full blocks; computed once, grown as needed."""
        if num_blocks > 0:
            self.block_hash(num_blocks - 1, block_size)
        return self._block_hashes[1 : num_blocks + 1]

    def block_hash(self, index: int, block_size: int) -> bytes:
        """The content name of one full block."""
        chain = self._block_hashes
        while len(chain) < index + 2:
            start = (len(chain) - 1) * block_size
            chain.append(chain_next(chain[-1], self._known_tokens(start, start + block_size)))
        return chain[index + 1]

    def _known_tokens(self, start: int, stop: int) -> Sequence[int]:
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        num_output = max(0, stop - num_prompt)
        return (*self.request.prompt[start:stop], *self.output_token_ids[:num_output])


@dataclass(frozen=True, slots=True)
class Drafted:
    """A decode of several tokens: before its last known one those computed again (`go_back`), and
    behind it drafts. num_blocks: of its table, before blocks for them were added."""

    state: RequestState
    num_drafts: int
    num_blocks: int
    num_redone: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_redone + 1 + self.num_drafts


@dataclass(slots=True)
class InFlight:
    """An executed plan, with the data to apply its answer."""

    plan: StepPlan
    sampled: list[RequestState]  # in slice order: each gets a token
    partial: list[tuple[RequestState, int]]  # prefill slices that sample nothing, and their ends
    shape: StepShape
    num_tokens: int
    num_decode_tokens: int  # of slices that continue a generation, all of them
    pinned: list[int]  # device blocks that the plan copies from
    host_blocks: Sequence[int]  # host blocks that the plan copies from
    swapped_out: Sequence[RequestState]  # whose KV the plan copies to the host
    planned_at_s: float
    drafted: Sequence[Drafted] = ()  # members of `sampled`
    predicted_s: float | None = None  # by the cost model, where there is one

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens

    def members(self) -> list[RequestState]:
        return [*self.sampled, *(state for state, _ in self.partial)]


def chain_root(salt: str) -> bytes:
    """The start of a chain. Different salts never share a block (no timing leak)."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"legato-kv").digest()


def chain_next(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full block whose predecessor in the sequence has digest `parent`."""
    return blake2b(parent + _packer(len(tokens))(*tokens), digest_size=DIGEST_BYTES).digest()


@lru_cache(maxsize=8)
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """Packs tokens as `array("q")` does, in a third of its time for one block."""
    return Struct(f"={num_tokens}q").pack


def prefix_digests(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Digests of all full blocks of `tokens`, in order.

    >>> a = prefix_digests([1, 2, 3, 4, 5], 2)
    >>> len(a), a == prefix_digests([1, 2, 3, 4], 2), a[0] == prefix_digests([1, 2], 2, "x")[0]
    (2, True, False)
    """
    digests: list[bytes] = []
    digest = chain_root(salt)
    data, step = array("q", tokens).tobytes(), 8 * block_size
    for end in range(step, len(data) + 1, step):
        digest = blake2b(digest + data[end - step : end], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests
