"""Scheduling policies by name.

A policy decides which slices a step holds and nothing else. `order` names the waiting order it
was described with, `reserve` says that KV for the maximum length is taken before a request starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.policies.base import Policy
from actors.scheduling.policies.chunked_only import ChunkedOnly
from actors.scheduling.policies.deadline import Deadline
from actors.scheduling.policies.fair import Fair
from actors.scheduling.policies.faster_transformer import FasterTransformer
from actors.scheduling.policies.hybrid_only import HybridOnly
from actors.scheduling.policies.mlfq import FeedbackQueue
from actors.scheduling.policies.orca import Orca
from actors.scheduling.policies.sarathi import Sarathi
from actors.scheduling.policies.shortest_first import ShortestFirst
from actors.scheduling.policies.vllm import PrefillFirst

__all__ = ["POLICIES", "Policy", "build_policy"]

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "sarathi": Sarathi,
    "vllm": PrefillFirst,
    "orca": Orca,
    "faster_transformer": FasterTransformer,
    "chunked_only": ChunkedOnly,
    "hybrid_only": HybridOnly,
    "mlfq": FeedbackQueue,
    "fair": Fair,
    "deadline": Deadline,
    "shortest_first": ShortestFirst,
}


def build_policy(config: SchedulerConfig) -> Policy:
    """The policy `config` names; raises ConfigError for an unknown name or a bad option."""
    if config.policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError("policy", f"unknown {config.policy!r}; known: {known}")
    try:
        return POLICIES[config.policy](config, **config.policy_options)
    except TypeError as error:
        raise ConfigError("policy_options", str(error)) from error
