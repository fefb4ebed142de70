"""Seconds that collectives and sends take, from published timings or a stated assumption."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.simulate.hardware.operators import read_operators

# Commodity Ethernet was not profiled: 100 Gb/s at 80 % and a latency typical of TCP transports.
ETHERNET_BYTES_PER_S, ETHERNET_LATENCY_S = 10e9, 100e-6


def all_reduce_s(network: str, ranks: int, num_bytes: Sequence[float]) -> list[float]:
    """Seconds of one all-reduce of each size. "ethernet:K": K ranks a node, nodes by Ethernet."""
    if ranks == 1:
        return [0.0 for _ in num_bytes]
    if network.startswith("ethernet:"):
        per_node = int(network.split(":")[1])
        inside = all_reduce_s("a100-pairwise-nvlink", per_node, num_bytes)
        ring = 2.0 * (ranks - 1) / ranks
        return [
            s + 2 * ETHERNET_LATENCY_S + ring * b / ETHERNET_BYTES_PER_S
            for s, b in zip(inside, num_bytes, strict=True)
        ]
    table = read_operators("networks")[network].get("all_reduce", {}).get(f"{ranks}/{ranks}")
    if table is None:
        raise ValueError(f"no published all-reduce of {ranks} ranks over {network}")
    return [_interpolate(table, b) for b in num_bytes]


def send_s(network: str, num_bytes: float) -> float:
    """Seconds to send one message between stages."""
    if network == "ethernet":
        return ETHERNET_LATENCY_S + num_bytes / ETHERNET_BYTES_PER_S
    return _interpolate(read_operators("networks")[network]["send_recv"]["2/2"], num_bytes)


def _interpolate(table: dict[str, list[float]], num_bytes: float) -> float:
    """Linear between the measured sizes, and beyond them at the last slope."""
    sizes, ms = table["bytes"], table["ms"]
    if num_bytes > sizes[-1]:
        slope = (ms[-1] - ms[-4]) / (sizes[-1] - sizes[-4])
        return (ms[-1] + slope * (num_bytes - sizes[-1])) / 1e3
    return float(np.interp(num_bytes, sizes, ms)) / 1e3
