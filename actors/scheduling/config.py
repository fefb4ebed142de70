"""The configuration of a core, as data; `build.build_core` makes a core from it.

A setting is declared once, as a field of `SchedulerConfig` with its `Setting`. The YAML's schema
(`app.settings.schema`), the reference, the checks and the list of live settings derive from these.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_type_hints

from actors.scheduling.live_changes import cleared_by, plain
from actors.scheduling.setting import Setting, fits, in_words, setting

DEFAULT_TOKEN_BUDGET = 512
_HAND_OVER: Mapping[str, Any] = {"hands_over": True, "most_saved": 16, "last_chunk": 64}
DEFAULT_MAX_DRAFTS = 8
_MOST_TOKENS = 1 << 20  # of a step: each size is looked at before the first one
DEFAULT_DELIVERY_S = 0.003
_SLO: Mapping[str, Any] = {"section": "slo", "milliseconds": True, "live": True}


class ConfigError(ValueError):
    """A setting is unknown or has an impossible value; `key` names it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


@dataclass(frozen=True)  # no slots, because values used by every step are cached
class SchedulerConfig:
    """Frozen settings of one core.

    Device KV blocks are numbered 0 .. num_blocks - 1, all usable. With one stage and `lookahead`
    the plan for step N+1 is made while N runs: the stage feeds itself the token that the core does
    not know yet. With several stages a request is in one outstanding step at most, because its
    token must come back first; `overlap_chunks` lets the chunks of a prompt, whose tokens are
    known, follow one another. Each name (`policy`, `order`, `budget`, `admission`) has a mapping of
    options.
    """

    num_blocks: int = field(
        metadata={"setting": Setting("Device KV blocks.", hidden=True, at_least=1)}
    )
    block_size: int = setting(
        16, "Tokens per block; flash-attn 2.8 needs 256.", section="kv", at_least=1
    )
    num_host_blocks: int = setting(0, "Host KV blocks, for swapping.", hidden=True, at_least=0)
    tier_ranks: int = setting(0, "Ranks with a second tier; 0: none.", hidden=True, at_least=0)
    tier_shared: bool = setting(False, "Other engines save into it too.", hidden=True)
    hands_over: bool = setting(False, "Streams leave with their first token.", hidden=True)
    most_saved: int = setting(64, "Blocks of one save.", hidden=True, at_least=1)
    last_chunk: int = setting(0, "Most of a lone prompt's last chunk; 0: any.", hidden=True)
    watermark: float = setting(
        0.01, "Share of KV kept free at admission.", live=True, at_least=0, below=1
    )
    prefix_cache: bool = setting(
        True, "Keep blocks of finished requests for prompts that begin alike.", section="kv"
    )
    num_saved_states: int | None = setting(None, "Null: layers keep no states.", hidden=True)
    allocation: str = setting(
        "prompt",
        "Blocks of a prompt: all at admission, or chunk by chunk.",
        choices=("prompt", "chunk"),
    )
    swap: str = setting(
        "auto",
        "Preempt by swapping to host memory (`kv.swap_gib`) or by recomputing; auto takes what "
        "the cost model predicts to be cheaper.",
        choices=("never", "always", "auto"),
    )

    max_requests: int = setting(
        128, "Most requests running at once.", live=True, at_least=1, at_most=1 << 16
    )
    request_slots: int | None = setting(
        None, "What the stages were built for; null: `max_requests`.", hidden=True, at_least=1
    )
    max_model_len: int = setting(
        4096, "Longest prompt plus output, in tokens.", hidden=True, at_least=2
    )
    max_step_tokens: int = setting(
        8192, "Tokens per step that the stages' buffers hold.", at_least=1, at_most=_MOST_TOKENS
    )

    num_stages: int = setting(1, "Pipeline stages.", hidden=True, at_least=1)
    pipeline_depth: int | None = setting(
        None,
        "Steps outstanding at once; null: 2 with one stage, else one per stage.",
        hidden=True,
        at_least=1,
    )
    lookahead: bool = setting(True, "Plan step N+1 while step N runs (one stage).")
    micro_batches: str = setting(
        "greedy",
        "With several stages: each step as full as its budget, or work spread over the pipeline.",
        live=True,
        choices=("greedy", "uniform"),
    )
    overlap_chunks: bool = setting(
        True, "With several stages: chunks of one prompt follow each other through them."
    )

    policy: str = setting(
        "sarathi", "What a step is made of: sarathi, vllm, orca, faster_transformer, ...", live=True
    )
    policy_options: Mapping[str, Any] = setting({}, "Options of that policy.", live=True)
    order: str = setting(
        "auto",
        "Order of the queue: fcfs, priority, shortest, deadline, fair, mlfq; auto is the policy's "
        "own.",
        live=True,
    )
    order_options: Mapping[str, Any] = setting({}, "Options of that order.", live=True)
    budget: str = setting(
        "auto",
        "Tokens per step: fixed, throttled (by KV), profiled or adaptive (both by a cost "
        "model and `slo.tbt_ms`); auto is adaptive, and fixed where `token_budget` is set or "
        "nothing could be measured.",
        live=True,
    )
    budget_options: Mapping[str, Any] = setting({}, "Options of that budget.", live=True)
    admission: str = setting(
        "all", "Requests that may enter: all, predicted_peak or predictive.", live=True
    )
    admission_options: Mapping[str, Any] = setting({}, "Options of that admission.", live=True)
    cost_model: Mapping[str, Any] | None = setting(
        None, "File of a fitted cost model, as `legato profile` writes it.", file=True
    )

    drafter: str = setting(
        "auto",
        "Guesses the next tokens, to be verified in one step: none; lookup, in the request and in "
        "what its tenant was served; model, with a small model; auto, the model if there is one, "
        "else lookup, where a cost model predicts a gain. The default is none where the backend's "
        "rounding depends on the batch: all but cpu.",
        section="speculation",
        choices=("none", "lookup", "model", "auto"),
    )
    draft_model: str | None = setting(
        None,
        "Folder of a small model that drafts: of the same vocabulary, on the CPU.",
        called="model",
        section="speculation",
    )
    max_drafts: int | None = setting(
        None,
        f"Most drafts of one request in a step; null is {DEFAULT_MAX_DRAFTS}.",
        section="speculation",
        at_least=1,
    )

    token_budget: int | None = setting(
        None,
        "Tokens per step of a fixed or throttled budget, decodes included; there null is "
        f"{DEFAULT_TOKEN_BUDGET}.",
        live=True,
        at_least=1,
        at_most=_MOST_TOKENS,
    )
    tile: int = setting(
        1, "Steps with prefill are rounded to multiples of this.", live=True, at_least=1
    )
    max_chunk: int | None = setting(
        None, "Most tokens of a prompt in a step while others wait.", live=True, at_least=1
    )
    tbt_s: float | None = setting(None, "Objective: P99 time between tokens.", above=0, **_SLO)
    tbt_rule: str | None = setting(
        None,
        "Instead of `tbt_ms`: 5 or 25 decode steps of 32 streams at 4096 tokens (`slo: strict`).",
        section="slo",
        choices=("strict", "relaxed"),
    )
    ttft_s: float | None = setting(None, "Objective: time to first token.", above=0, **_SLO)
    min_tbt_s: float | None = setting(
        None,
        "A request's own TBT objective below this is refused; one that a lone decode would miss "
        "is refused anyway.",
        above=0,
        **_SLO,
    )
    delivery_s: float = setting(
        DEFAULT_DELIVERY_S,
        "Left of TBT objectives for the way to clients: a tenth at most, or a quarter if measured.",
        at_least=0,
        **_SLO,
    )

    max_queued_requests: int | None = setting(
        None, "Waiting requests beyond which new ones are refused.", live=True, at_least=1
    )
    max_queued_tokens: int | None = setting(
        None, "Likewise, their prompt tokens.", live=True, at_least=1
    )
    max_running_per_tenant: int | None = setting(
        None, "Most running requests of one tenant.", live=True, at_least=1
    )
    max_queued_per_tenant: int | None = setting(
        None,
        "Most waiting requests of one tenant, those of the background too; more are refused.",
        live=True,
        at_least=1,
    )
    queue_timeout_s: float | None = setting(
        None, "A request that waits longer is refused.", live=True, above=0
    )

    @property
    def most_requests(self) -> int:
        """The most that `max_requests` may become while running: rows of the stages' tables."""
        return self.max_requests if self.request_slots is None else self.request_slots

    @property
    def constant_budget(self) -> int:
        """Tokens per step of budgets that are constant."""
        return self.token_budget or DEFAULT_TOKEN_BUDGET

    @cached_property
    def most_drafts(self) -> int:
        """Most draft tokens of one request in a step."""
        return self.max_drafts or DEFAULT_MAX_DRAFTS

    @cached_property
    def depth(self) -> int:
        """Steps that may be outstanding at once."""
        if self.pipeline_depth is not None:
            return self.pipeline_depth
        return self.num_stages if self.num_stages > 1 else (2 if self.lookahead else 1)

    @cached_property
    def steps_per_request(self) -> int:
        """The most outstanding steps with one request: two with lookahead, else one."""
        return 2 if self.num_stages == 1 and self.lookahead else 1

    @cached_property
    def chunks_per_request(self) -> int:
        """The most outstanding steps with one unfinished prompt."""
        overlap = self.num_stages > 1 and self.overlap_chunks
        return self.depth if overlap else self.steps_per_request

    def with_changes(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """A copy with live changes applied; keys as in the YAML (`slo.tbt_ms` and so on).

        Raises ConfigError naming a key that is unknown or cannot change while running.
        """
        updates: dict[str, Any] = {}
        for key, value in changes.items():
            name = LIVE_KEYS.get(plain(key))
            if name is None:
                raise ConfigError(key, _why_not_live(key.rpartition(".")[2]))
            if not fits(value, KINDS[name]):
                raise ConfigError(key, f"must be {in_words(KINDS[name])}, not {value!r}")
            updates[name] = SETTINGS[name].from_yaml(value)
        updates = cleared_by(updates, updates.get("order", self.order)) | updates
        updates["request_slots"] = self.most_requests
        changed = dataclasses.replace(self, **updates)
        changed.check()
        if (budget := updates.get("token_budget")) is not None and budget > changed.max_step_tokens:
            most = f"{changed.max_step_tokens} tokens (max_step_tokens)"
            raise ConfigError("token_budget", f"a step holds at most {most}, not {budget}")
        return changed

    def without_drafts(self) -> SchedulerConfig:
        return dataclasses.replace(self, drafter="none", draft_model=None, max_drafts=None)

    def handing_over(self) -> SchedulerConfig:
        """Of an engine whose streams leave: the KV of one step is saved beside the next."""
        return dataclasses.replace(self, **_HAND_OVER)

    def differs(self, other: SchedulerConfig, *names: str) -> bool:
        return any(getattr(self, name) != getattr(other, name) for name in names)

    def check(self) -> None:
        """Raise ConfigError naming the first impossible value; the registries check names."""
        for name, declared in SETTINGS.items():
            value = getattr(self, name)
            is_fit, kind = fits(value, KINDS[name]), in_words(KINDS[name])
            problem = declared.problem(value) if is_fit else f"must be {kind}, not {value!r}"
            if problem is not None:
                raise ConfigError(declared.key(name), problem)
        if self.token_budget is not None and self.budget not in ("auto", "fixed", "throttled"):
            raise ConfigError("token_budget", f"has no effect with the budget {self.budget!r}")
        if self.tbt_rule is not None and self.tbt_s is not None:
            raise ConfigError("tbt_rule", "has no effect with `slo.tbt_ms`")
        if self.max_drafts is not None and self.drafter == "none":
            raise ConfigError("max_drafts", "has no effect with `speculation.drafter: none`")
        if self.draft_model is None and self.drafter == "model":
            raise ConfigError("drafter", "model needs a folder, `speculation.model`")
        if self.draft_model is not None and self.drafter not in ("model", "auto"):
            raise ConfigError("model", f"has no effect with `speculation.drafter: {self.drafter}`")
        if self.max_requests > self.most_requests:
            message = f"the stages were built for {self.most_requests}, not {self.max_requests}"
            raise ConfigError("max_requests", message)
        if self.max_step_tokens < self.max_requests:
            raise ConfigError("max_step_tokens", "must hold one decode of every request")


def _why_not_live(key: str) -> str:
    if key in {s.key(name) for name, s in SETTINGS.items()}:
        return "fixed while the engine runs"
    close = difflib.get_close_matches(key, LIVE_KEYS, n=1)
    return "unknown setting" + (f"; did you mean {close[0]!r}?" if close else "")


# Field -> its declared type, and its setting. Key in the YAML -> field, of those that change live.
KINDS: Mapping[str, Any] = get_type_hints(SchedulerConfig)
SETTINGS: Mapping[str, Setting] = {
    f.name: f.metadata["setting"] for f in dataclasses.fields(SchedulerConfig)
}
LIVE_KEYS: Mapping[str, str] = {s.key(name): name for name, s in SETTINGS.items() if s.live}
