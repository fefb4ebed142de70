"""One live request inside the core: the only mutable record of its progress."""

from __future__ import annotations

import enum

from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.prefix import chain_next, chain_root
from actors.scheduling.request import Request

NEVER = 1 << 62  # a length no sequence reaches


class Status(enum.Enum):
    """
    WAITING ──start──> RUNNING ──finish, abort──> ENDED
       ^                  │ preempted, failed, finished or aborted while a step is in flight
       └──── drained ── LEAVING ──drained──> ENDED
    """

    WAITING = "waiting"  # in the queue, in a group or isolated; holds no device blocks
    RUNNING = "running"  # holds device blocks; in `prefilling` or in `decoding`
    LEAVING = "leaving"  # planned no more, blocks held until no in-flight step touches them
    ENDED = "ended"


class Fate(enum.Enum):
    """What becomes of a LEAVING request once nothing in flight touches it."""

    QUEUE = "queue"
    ISOLATE = "isolate"
    END = "end"


class RequestState:
    """See `RequestView` for the attributes that budgets, orders and admission read."""

    __slots__ = (
        "_digests",
        "admitted",
        "attend_at",
        "blocks",
        "cacheable",
        "capacity",
        "discard",
        "end",
        "fate",
        "first_planned_s",
        "first_token_s",
        "host_blocks",
        "in_flight",
        "is_leader",
        "last_token_s",
        "length",
        "level",
        "lonely_failures",
        "max_length",
        "mirrored",
        "mirrored_length",
        "num_cached_tokens",
        "num_committed",
        "num_preemptions",
        "num_prompt_tokens",
        "outputs",
        "planned",
        "prompt_logprobs",
        "rank",
        "refused_version",
        "request",
        "request_id",
        "sequence_number",
        "served",
        "status",
        "step_id",
        "stops",
    )  # fmt: skip

    def __init__(self, request: Request, sequence_number: int, limit: int) -> None:
        """limit: longest sequence the engine holds (max_model_len)."""
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.sequence_number = sequence_number  # order of submission
        self.status = Status.WAITING
        self.fate = Fate.QUEUE
        self.rank: tuple[float, int] = (0.0, 0)  # smaller is better; set by the queue's order
        self.num_prompt_tokens = len(request.prompt)
        self.outputs = list(request.output)
        self.length = self.num_prompt_tokens + len(self.outputs)
        self.max_length = min(self.num_prompt_tokens + sampling.max_tokens, limit)
        if request.pooling is not None:
            self.max_length = self.num_prompt_tokens
        self.end = self.max_length - 1  # positions at and after it are never computed to decode
        self.stops = frozenset(sampling.stop_token_ids)

        # Progress in the stages
        self.planned = 0  # tokens computed or in flight in this life
        self.in_flight = 0  # outstanding steps that hold a slice of it
        self.step_id = -1  # the newest step that holds a slice of it
        self.discard = False  # results still in flight are worthless (a step before them failed)
        self.mirrored = False  # the stages know it
        self.mirrored_length = 0  # tokens the first stage knows (several stages only)
        self.lonely_failures = 0  # consecutive failed steps that held nothing else

        # Memory
        self.blocks: list[int] = []  # device block table
        self.capacity = 0  # len(blocks) * block_size
        self.host_blocks: list[int] = []  # KV of [0, planned) while swapped out
        self.cacheable = False  # may start from cached blocks
        self.num_committed = 0  # full blocks offered to the prefix cache
        self._digests: list[bytes] = [chain_root(request.cache_salt)]
        self.refused_version = -1  # memory version at the last refusal

        # News and statistics
        self.attend_at = 0  # length from which a new token needs more than bookkeeping
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_cached_tokens = 0  # of the first life
        self.num_preemptions = 0
        self.first_planned_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

        # What orders and policies remember of it
        self.admitted = False  # has been started once: it is not charged again
        self.is_leader = False  # computes its group's prompt
        self.level = 0  # multi-level feedback queue
        self.served = 0  # tokens served at that level

    def __repr__(self) -> str:
        return (
            f"<{self.request_id} {self.status.value} planned {self.planned} of {self.length} "
            f"(max {self.max_length}) in flight {self.in_flight}>"
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.outputs)

    @property
    def remaining(self) -> int:
        """Known tokens not yet planned."""
        return self.length - self.planned

    def known_tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.outputs)

    def token(self, position: int) -> int:
        if position < self.num_prompt_tokens:
            return self.request.prompt[position]
        return self.outputs[position - self.num_prompt_tokens]

    def digests(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Content names of the first `num_blocks` full blocks; computed once, grown as needed."""
        chain = self._digests
        prompt, num_prompt = self.request.prompt, self.num_prompt_tokens
        for index in range(len(chain) - 1, num_blocks):
            start, stop = index * block_size, (index + 1) * block_size
            tokens = prompt[start:stop]
            if stop > num_prompt:
                outputs = self.outputs[max(0, start - num_prompt) : stop - num_prompt]
                tokens = (*tokens, *outputs)
            chain.append(chain_next(chain[-1], tokens))
        return chain[1 : num_blocks + 1]
