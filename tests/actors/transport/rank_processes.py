"""Processes for ranks of a test, forked from one that has imported what they all need."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

# Nothing of it starts a thread, which a fork would lack. A module that is not there is left out.
_IMPORTED = ("pytest", "torch.distributed", "tests.actors.stage.greedy_reference",
             "actors.transport.group", "tests.actors.transport.shared_symmetric_memory",
             "triton.language", "actors.stage.runner", "tests.gpu.captures")  # fmt: skip


def rank_processes() -> ForkServerContext:
    """To import torch takes each of them seconds, and the sums of a test none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context
