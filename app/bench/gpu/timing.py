"""Timing device work, and the two ceilings that every time is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from app.bench.ceilings import Ceilings


def median_s(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of the device's own time, after a run to warm up (and compile)."""
    work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    torch.cuda.synchronize()
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        for _ in range(repeats)
    ]
    for begin_event, end_event in events:
        begin_event.record()
        work()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1000


def measure_ceilings(
    device: torch.device, copy_bytes: int = 1 << 31, matrix: int = 8192
) -> Ceilings:
    """Copying memory (bytes read plus written) and multiplying bf16 matrices on this device.

    On random data: products of zeros run faster than products of anything else.
    """
    copy_s = _copy_s(device, copy_bytes)
    left = torch.randn(matrix, matrix, dtype=torch.bfloat16, device=device)
    right = torch.randn(matrix, matrix, dtype=torch.bfloat16, device=device)
    matmul_s = median_s(lambda: left @ right, device)
    return Ceilings(2 * copy_bytes / copy_s / 1e9, 2 * matrix**3 / matmul_s / 1e9)


def _copy_s(device: torch.device, num_bytes: int) -> float:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return median_s(lambda: target.copy_(source), device)
