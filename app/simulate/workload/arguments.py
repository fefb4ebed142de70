"""Bounds of the arguments that describe a workload: beyond them nothing useful can be drawn."""

from __future__ import annotations

_SMALLEST, _LARGEST = 1e-6, 1e12
MOST_TOKENS = 10_000_000  # of one request


def positive(name: str, value: float) -> float:
    return within(name, value, _SMALLEST, _LARGEST)


def within(name: str, value: float, low: float, high: float) -> float:
    """The value; raises ValueError naming it if it lies outside, or is no number."""
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value:g}")
    return value


def num_tokens(name: str, value: float) -> int:
    return int(within(name, value, 1, MOST_TOKENS))
