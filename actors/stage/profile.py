"""How much of a GPU is left for the KV cache, found by running what will run beside it.

Weights are not all that stays: graphs keep memory, libraries make workspaces at their first call,
and communicators of the ranks appear with the first collective. So the largest step is run and
every size captured over a cache of one block; what is free then, less what such a step takes for
itself, is the cache's. The graphs are captured again over the real cache: they hold its addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from actors.scheduling.plan import RequestStart, Slice, StepPlan
from actors.scheduling.request import SamplingParams
from actors.stage.spec import StageSpec

_PRODUCT_SIZES = (16, 32, 64)  # tokens, see kernels.triton.linear


class DeviceMemory(Protocol):
    """What a device says of its memory."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most that the work had allocated at once, beside what was there before it."""
        ...

    def free_bytes(self) -> int:
        """Free now, with everything given back that is not held."""
        ...


class GpuMemory:
    """The current GPU's, by torch."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


def cache_bytes(
    memory: DeviceMemory, step: Callable[[], object], capture: Callable[[], None]
) -> int:
    """What a cache may take. step: the largest there is, launch by launch; capture: all graphs."""
    peak = memory.peak_bytes(step)
    capture()
    return max(0, memory.free_bytes() - peak)


def plans_to_measure(spec: StageSpec, max_model_len: int) -> list[StepPlan]:
    """The largest step, on a GPU behind one for each size that quantised products have a kernel
    for: what they compile is compiled before the first request."""
    sizes = () if spec.device == "cpu" else _PRODUCT_SIZES
    tokens = [n for n in sizes if n < spec.max_step_tokens] + [spec.max_step_tokens]
    return [
        replace(largest_plan(replace(spec, max_step_tokens=n), max_model_len), step_id=2 * i)
        for i, n in enumerate(tokens)
    ]


def ending(plan: StepPlan) -> StepPlan:
    """The step after it, which forgets its requests."""
    return StepPlan(plan.step_id + 1, (), released=tuple(s.request_id for s in plan.slices))


def largest_plan(spec: StageSpec, max_model_len: int) -> StepPlan:
    """A step of as many tokens and requests as there may be: decodes, and chunks that hold the
    rest. All of it lies in block 0."""
    num_requests = min(spec.max_requests, spec.max_step_tokens)
    lengths, left = [1] * num_requests, spec.max_step_tokens - num_requests
    for i in reversed(range(num_requests)):
        lengths[i] += min(left, max_model_len - 1)
        left -= lengths[i] - 1
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    return StepPlan(
        0,
        tuple(Slice(i, 0, length, True) for i, length in enumerate(lengths)),
        started=tuple(
            RequestStart(i, (0,) * n, n, (0,) * -(-n // spec.block_size), sampling)
            for i, n in enumerate(lengths)
        ),
    )
