"""For how long adapters may be loaded beside a step: a load is work under the budget, too."""

from __future__ import annotations

# Of a step where no objective bounds it or nothing predicts its time.
UNPROMISED_LOAD_S = 0.005
LEAST = 0.05  # of the tightest objective: prefill leaves it to loads, which therefore end
SHARE = 0.5  # of what a step leaves of its limit; the rest is for the caches that a load takes


def least_load_s(tbt_s: float) -> float:
    """Beside a step whose tightest objective this is."""
    return LEAST * tbt_s


def load_s(tbt_s: float, left_s: float) -> float:
    """left_s: of the step's limit, that without `least_load_s`."""
    return least_load_s(tbt_s) + SHARE * max(0.0, left_s)
