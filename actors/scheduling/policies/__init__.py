"""Scheduling policies by name; each is imported when it is first asked for.

A policy decides which slices a step holds and nothing else. `order` names the waiting order it
was described with, `reserve` says that KV for the maximum length is taken before a request starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from actors.scheduling.policies.base import Policy

if TYPE_CHECKING:
    from actors.scheduling.config import SchedulerConfig

__all__ = ["POLICIES", "Policy", "build_policy"]

POLICIES = {
    "sarathi": "sarathi:Sarathi",
    "vllm": "vllm:PrefillFirst",
    "orca": "orca:Orca",
    "faster_transformer": "faster_transformer:FasterTransformer",
    "chunked_only": "chunked_only:ChunkedOnly",
    "hybrid_only": "hybrid_only:HybridOnly",
    "mlfq": "mlfq:FeedbackQueue",
    "fair": "fair:Fair",
    "deadline": "deadline:Deadline",
    "shortest_first": "shortest_first:ShortestFirst",
}


def build_policy(config: SchedulerConfig) -> Policy:
    """The policy `config` names; raises ConfigError for a bad option."""
    from actors.scheduling.config import ConfigError

    module, _, attribute = POLICIES[config.policy].partition(":")
    policy_class = getattr(import_module(f"{__name__}.{module}"), attribute)
    try:
        policy: Policy = policy_class(config, **config.policy_options)
    except TypeError as error:
        raise ConfigError("policy_options", str(error)) from error
    return policy
