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
    device: torch.device, num_bytes: int = 1 << 31, matrix: int = 8192
) -> Ceilings:
    """The higher rate of copying memory (bytes read plus written) and reading it, and that of two
    bf16 products, of squares and of a chunk with a layer's weights: a long product draws more
    power, which lowers the clock.

    On random data: products of zeros run faster.
    """
    shapes = ((matrix, matrix, matrix), (matrix // 4, matrix // 2, 3 * matrix))
    peak = max(2 * M * K * N / _matmul_s(device, M, K, N) for M, K, N in shapes)
    return Ceilings(_bandwidth(device, num_bytes) / 1e9, peak / 1e9)


def _matmul_s(device: torch.device, M: int, K: int, N: int) -> float:
    left_MK = torch.randn(M, K, dtype=torch.bfloat16, device=device)
    right_NK = torch.randn(N, K, dtype=torch.bfloat16, device=device)
    return device_s([lambda: left_MK @ right_NK.T], device)


def _bandwidth(device: torch.device, num_bytes: int) -> float:
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = device_s([lambda: target.copy_(source)], device)
    read_s = device_s([source.sum], device)
    return max(2 * num_bytes / copy_s, num_bytes / read_s)
