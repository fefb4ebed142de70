"""Shortest expected output first, on stall-free batches (response-length-aware scheduling).

The expectation is the declared `max_tokens` or a learnt mean (see `orders.heap.ShortestFirst`);
waiting time counts, so a long request is not starved.
"""

from __future__ import annotations

from actors.scheduling.policies.sarathi import Sarathi


class ShortestFirst(Sarathi):
    order = "shortest"
