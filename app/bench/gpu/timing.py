"""Device timing, and the two ceilings (roofline) that times are compared with."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from app.bench.ceilings import Ceilings
from kernels.device_time import graph_time_s

_MOST_COPIES = 32


def device_s(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median seconds of the device's own time per call; works: the same on inputs that differ."""
    if device.type == "cuda":
        return graph_time_s(works)
    return statistics.median(_host_times_s(works))


def host_s(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median seconds of the host's time to launch a call, once warm."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    times = _host_times_s(works)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return statistics.median(times)


def _host_times_s(works: Sequence[Callable[[], object]], calls: int = 20) -> list[float]:
    for work in works:
        work()
    times = []
    for call in range(calls):
        begin = time.perf_counter()
        works[call % len(works)]()
        times.append(time.perf_counter() - begin)
    return times


def num_rotating(num_bytes: float, device: torch.device) -> int:
    """Copies of an input of this size that together are twice the L2 cache."""
    if device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(_MOST_COPIES, math.ceil(2 * cache_bytes / num_bytes)))


def measure_ceilings(
    device: torch.device, copy_bytes: int = 1 << 31, matrix: int = 8192
) -> Ceilings:
    """Copying memory (bytes read plus written) and multiplying bf16 matrices on this device.

    On random data: products of zeros run faster.
    """
    copy_s = _copy_s(device, copy_bytes)
    left = torch.randn(matrix, matrix, dtype=torch.bfloat16, device=device)
    right = torch.randn(matrix, matrix, dtype=torch.bfloat16, device=device)
    matmul_s = device_s([lambda: left @ right], device)
    return Ceilings(2 * copy_bytes / copy_s / 1e9, 2 * matrix**3 / matmul_s / 1e9)


def _copy_s(device: torch.device, num_bytes: int) -> float:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_s([lambda: target.copy_(source)], device)
