"""Memory of a GPU that is free for the KV cache, found by running steps.

Beside weights, memory is held by CUDA graphs, by library workspaces allocated at the first call,
and by the ranks' communicator, allocated at the first collective. The largest step is therefore
run and all graphs captured with a cache of one block. The cache gets the memory then free, minus
the temporary memory of the largest step. The graphs are captured again with the real cache, as
they contain its addresses.

Communicators between stages (activations from GPU to GPU) are made after the cache, so
they are not measured: their memory comes from what `kv.memory_fraction` leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from actors.scheduling.plan import RequestStart, Slice, StepPlan
from actors.scheduling.request import SamplingParams
from actors.stage.spec import StageSpec

_PRODUCT_SIZES = (16, 32, 64, 128)  # tokens, see `packed_tile` in kernels.triton.tiles


class Room(NamedTuple):
    """As in `StageInfo`. own_bytes are torch's, without the context and the code of kernels."""

    available_bytes: int
    device_bytes: int = 0
    own_bytes: int = 0

    def without(self, freed_bytes: int) -> Room:
        """After so much of its own has been freed."""
        return Room(
            self.available_bytes + freed_bytes, self.device_bytes, self.own_bytes - freed_bytes
        )


class DeviceMemory(Protocol):
    """A device's memory readings."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Peak memory allocated by `work`, beyond the memory allocated before it."""
        ...

    def free_bytes(self) -> tuple[int, int]:
        """Free memory and all memory, after unused cached memory is returned to the device."""
        ...

    def held_bytes(self) -> int:
        """Memory that tensors and graphs of this process hold."""
        ...


class GpuMemory:
    """Memory of the current GPU, read through torch."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    def free_bytes(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_reserved())


def measure(memory: DeviceMemory, step: Callable[[], object], capture: Callable[[], None]) -> Room:
    """Memory for the cache. step: runs the largest step without graphs; capture: all graphs."""
    peak_bytes = memory.peak_bytes(step)
    capture()
    free_bytes, device_bytes = memory.free_bytes()
    own_bytes = memory.held_bytes() + peak_bytes
    return Room(max(0, free_bytes - peak_bytes), device_bytes, own_bytes)


def plans_to_measure(spec: StageSpec, max_model_len: int) -> list[StepPlan]:
    """The largest step; on a GPU preceded by one step per token count for which quantized products
    have a kernel, so that all kernels are compiled before the first request."""
    sizes = () if spec.device == "cpu" else _PRODUCT_SIZES
    tokens = [n for n in sizes if n < spec.max_step_tokens] + [spec.max_step_tokens]
    return [
        replace(largest_plan(replace(spec, max_step_tokens=n), max_model_len), step_id=2 * i)
        for i, n in enumerate(tokens)
    ]


def ending(plan: StepPlan) -> StepPlan:
    """The following step, which releases the plan's requests."""
    return StepPlan(
        plan.step_id + 1, (), released=tuple(part.request_id for part in plan.named_slices)
    )


def largest_plan(spec: StageSpec, max_model_len: int) -> StepPlan:
    """A step of the most tokens and requests allowed: decodes, and chunks with the remaining
    tokens. All of its KV lies in block 0. The second request is greedy, which ranks draw from their
    shards of the vocabulary: kernels of that are compiled as well as those of whole rows."""
    num_requests = min(spec.max_requests, spec.max_step_tokens)
    lengths, left = [1] * num_requests, spec.max_step_tokens - num_requests
    for i in reversed(range(num_requests)):
        lengths[i] += min(left, max_model_len - 1)
        left -= lengths[i] - 1
    greedy = SamplingParams(max_tokens=1)
    nucleus = replace(greedy, temperature=1.0, top_p=0.9)
    return StepPlan(
        0,
        tuple(Slice(i, 0, length, True) for i, length in enumerate(lengths)),
        started=tuple(
            RequestStart(
                i, (0,) * n, n, (0,) * -(-n // spec.block_size), greedy if i == 1 else nucleus
            )
            for i, n in enumerate(lengths)
        ),
    )
