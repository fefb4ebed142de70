"""How long a GPU computes, without the time that the host takes to launch it.

A launch from Python costs some ten microseconds: more than many a kernel. So launches are captured
in a graph and the graph is timed. Inputs rotate, or small ones would be read from the L2 cache,
where a serving step, which has read all weights and other layers since, does not find them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

_LAUNCHES = 32  # in one graph, at least


def graph_time_s(works: Sequence[Callable[[], object]], repeats: int = 10) -> float:
    """Median seconds of the device's own time per call. works: the same on inputs that differ,
    called in turn; no call may wait for the device."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for work in works:  # compiles, and allocates what is allocated once
            work()
    torch.cuda.current_stream().wait_stream(side)
    rounds = -(-_LAUNCHES // len(works))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
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
