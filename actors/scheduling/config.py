"""Everything the core needs to know at birth, as data. `build.build_core` makes a core of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A setting is unknown or has an impossible value; `key` names it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


@dataclass(frozen=True)  # no slots: what every step asks for is cached
class SchedulerConfig:
    """Frozen settings of one core.

    Memory: `num_blocks` device KV blocks (0 .. num_blocks - 1, all usable) of `block_size`
    tokens, `num_host_blocks` host blocks for swapping; `watermark` is the fraction kept free
    when a new request is admitted.
    Pipeline: `pipeline_depth` steps may be outstanding (None: 2 with one stage, else one per
    stage). With one stage and `lookahead` the plan for step N+1 is made while N runs: the
    stage feeds itself the token that the core does not know yet.
    Shape: `token_budget` is the fixed budget; `max_step_tokens` what the stages' buffers hold;
    `tile` rounds the tokens of a step that a chunk had to be cut for; `max_chunk` caps one
    prompt's share of a step while others wait for prefill.
    With several stages a request is in one outstanding step at most, as its token must come back;
    `overlap_chunks` lets the chunks of a prompt, whose tokens are known, follow one another.
    Names (`policy`, `order`, `budget`, `admission`) come with an options mapping each. Order
    "auto" is the policy's own.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    watermark: float = 0.01
    prefix_cache: bool = True
    allocation: str = "prompt"  # "prompt": whole prompt at admission; "chunk": as it is computed
    swap: str = "auto"  # "never", "always", or "auto": whatever the cost model predicts cheaper

    max_requests: int = 128
    request_slots: int | None = None  # what the stages were built for; None: `max_requests`
    max_model_len: int = 4096
    max_step_tokens: int = 8192

    num_stages: int = 1
    pipeline_depth: int | None = None
    lookahead: bool = True
    micro_batches: str = "greedy"  # "greedy", or "uniform": work spread over the pipeline
    overlap_chunks: bool = False  # chunks of one prompt may follow each other through the stages

    policy: str = "sarathi"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    order: str = "auto"
    order_options: Mapping[str, Any] = field(default_factory=dict)
    budget: str = "fixed"
    budget_options: Mapping[str, Any] = field(default_factory=dict)
    admission: str = "all"
    admission_options: Mapping[str, Any] = field(default_factory=dict)
    cost_model: Mapping[str, Any] | None = None

    token_budget: int = 512
    tile: int = 1
    max_chunk: int | None = None
    tbt_s: float | None = None
    ttft_s: float | None = None

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_running_per_tenant: int | None = None
    max_queued_per_tenant: int | None = None
    queue_timeout_s: float | None = None

    @property
    def most_requests(self) -> int:
        """How far `max_requests` may be raised while running: rows of the stages' tables."""
        return self.max_requests if self.request_slots is None else self.request_slots

    @cached_property
    def depth(self) -> int:
        """Steps that may be outstanding at once."""
        if self.pipeline_depth is not None:
            return self.pipeline_depth
        return self.num_stages if self.num_stages > 1 else (2 if self.lookahead else 1)

    @cached_property
    def steps_per_request(self) -> int:
        """In how many outstanding steps one request may be: two with lookahead, else one."""
        return 2 if self.num_stages == 1 and self.lookahead else 1

    @cached_property
    def chunks_per_request(self) -> int:
        """In how many outstanding steps one unfinished prompt may be."""
        if self.num_stages > 1 and self.overlap_chunks:
            return self.depth
        return self.steps_per_request

    def with_changes(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """A copy with live changes applied; keys as in the YAML (`slo.tbt_ms` and so on).

        Raises ConfigError naming a key that is unknown or cannot change while running.
        """
        updates: dict[str, Any] = {}
        for key, value in changes.items():
            name = key.removeprefix("scheduling.").removeprefix("slo.")
            milliseconds = name in ("tbt_ms", "ttft_ms")
            if milliseconds:
                name = name.removesuffix("ms") + "s"
            if name not in LIVE_KEYS:
                raise ConfigError(key, "unknown, or fixed while the engine runs")
            kind = get_type_hints(SchedulerConfig)[name]
            if not _fits(value, kind):
                raise ConfigError(key, f"must be {_in_words(kind)}, not {value!r}")
            updates[name] = value / 1000.0 if milliseconds and value is not None else value
        for name in ("policy", "order", "budget", "admission"):
            if name in updates:  # options belong to the part they were written for
                updates.setdefault(f"{name}_options", {})
        if "policy" in updates and updates.get("order", self.order) == "auto":
            updates.setdefault("order_options", {})
        updates["request_slots"] = self.most_requests
        changed = dataclasses.replace(self, **updates)
        changed.check()
        return changed

    def differs(self, other: SchedulerConfig, *names: str) -> bool:
        return any(getattr(self, name) != getattr(other, name) for name in names)

    def check(self) -> None:
        """Raise ConfigError naming the first impossible value (names are looked up in `parts`)."""
        for key in ("num_blocks", "block_size", "max_requests", "token_budget", "tile"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(key, f"must be a positive integer, not {value!r}")
        if self.max_requests > self.most_requests:
            message = f"the stages were built for {self.most_requests}, not {self.max_requests}"
            raise ConfigError("max_requests", message)
        if self.max_model_len < 2:
            raise ConfigError("max_model_len", "must hold a prompt token and an output token")
        if self.max_step_tokens < self.max_requests:
            raise ConfigError("max_step_tokens", "must hold one decode of every request")
        if self.num_stages < 1 or self.depth < 1:
            raise ConfigError("pipeline_depth", "must be at least 1")
        if not 0 <= self.watermark < 1:
            raise ConfigError("watermark", f"must lie in [0, 1), not {self.watermark}")
        for key, value, known in (
            ("allocation", self.allocation, ("prompt", "chunk")),
            ("swap", self.swap, ("never", "always", "auto")),
            ("micro_batches", self.micro_batches, ("greedy", "uniform")),
        ):
            if value not in known:
                raise ConfigError(key, f"unknown {value!r}; known: {', '.join(sorted(known))}")
        for key in ("max_chunk", "max_queued_requests", "max_queued_tokens"):
            limit = getattr(self, key)
            if limit is not None and limit < 1:
                raise ConfigError(key, f"must be positive or null, not {limit!r}")
        for key in ("tbt_s", "ttft_s"):
            objective_s = getattr(self, key)
            if objective_s is not None and not objective_s > 0:
                name = key.removesuffix("s") + "ms"
                raise ConfigError(name, f"must be positive or null, not {1000 * objective_s:g}")


def _kinds(declared: Any) -> tuple[Any, ...]:
    return get_args(declared) if isinstance(declared, UnionType) else (declared,)


def _fits(value: Any, declared: Any) -> bool:
    """Whether a value from outside has the type a field is declared with."""
    kinds = [
        int | float if kind is float else get_origin(kind) or kind for kind in _kinds(declared)
    ]
    return not isinstance(value, bool) and isinstance(value, tuple(kinds))


def _in_words(declared: Any) -> str:
    words = {int: "an integer", float: "a number", str: "a name", NoneType: "null"}
    return " or ".join(words.get(kind, "a mapping") for kind in _kinds(declared))


LIVE_KEYS = frozenset(
    {
        "policy",
        "policy_options",
        "order",
        "order_options",
        "budget",
        "budget_options",
        "admission",
        "admission_options",
        "token_budget",
        "tile",
        "max_chunk",
        "max_requests",
        "micro_batches",
        "watermark",
        "tbt_s",
        "ttft_s",
        "max_queued_requests",
        "max_queued_tokens",
        "max_running_per_tenant",
        "max_queued_per_tenant",
        "queue_timeout_s",
    }
)
