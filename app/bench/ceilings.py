"""The two ceilings of a machine, and the least time that they leave to a piece of work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of memory and multiply-adds on this machine, measured in the same run.

    >>> Ceilings(50.0, 100.0).limit_s(num_bytes=1e9, flops=1e9)
    0.02
    """

    bandwidth_gb_s: float
    peak_gflop_s: float

    def limit_s(self, num_bytes: float, flops: float) -> float:
        """max(bytes / bandwidth, FLOPs / peak), in seconds."""
        return max(num_bytes / self.bandwidth_gb_s, flops / self.peak_gflop_s) / 1e9

    def bound(self, num_bytes: float, flops: float) -> str:
        """Which of the two sets the limit: "memory" or "compute"."""
        memory = num_bytes / self.bandwidth_gb_s > flops / self.peak_gflop_s
        return "memory" if memory else "compute"

    def __str__(self) -> str:
        return f"{self.bandwidth_gb_s:.0f} GB/s, {self.peak_gflop_s:.0f} GFLOP/s"
