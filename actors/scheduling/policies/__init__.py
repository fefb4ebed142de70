"""Which slices a step holds.

A policy is a class that takes `(config, **options)`, and one row of `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.base import Policy
from actors.scheduling.policies.baselines import (
    ChunkedOnly,
    FasterTransformer,
    HybridOnly,
    Orca,
    PrefillFirst,
)
from actors.scheduling.policies.mlfq import FeedbackQueue
from actors.scheduling.policies.sarathi import Deadline, Fair, Sarathi, ShortestFirst
from actors.scheduling.registry import build_part

__all__ = ["POLICIES", "Policy", "build_policy", "order_name"]

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
    return build_part("policy", config.policy, POLICIES, config.policy_options, config)


def order_name(config: SchedulerConfig, policy: Policy) -> str:
    """The waiting order in force: the configured one, or else the policy's own."""
    return policy.order if config.order == "auto" else config.order
