"""GPU time of a kernel, without the host's launch overhead.

A launch from Python costs about ten microseconds, more than many kernels. So launches are captured
in a CUDA graph and the graph is timed. Inputs rotate, because small ones would stay in the L2
cache, where a serving step, which has read all weights in between, does not find them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

_LAUNCHES = 32  # in one graph, at least


def graph_time_s(works: Sequence[Callable[[], object]], repeats: int = 10) -> float:
    """Median device time per call, in seconds. works: the same operation on different inputs,
    called in turn; none may synchronize with the device."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for work in works:  # warm-up: compilation, one-time allocations
            work()
    torch.cuda.current_stream().wait_stream(side)
    rounds = -(-_LAUNCHES // len(works))
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog, Ray) may call the driver meanwhile.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(rounds):
            for work in works:
                work()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times) / (rounds * len(works))
