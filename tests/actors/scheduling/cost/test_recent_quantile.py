"""The quantile of recent observations: exact, and forgetful."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.cost.online import RecentQuantile


@given(
    st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=60),
    st.integers(1, 20),
    st.floats(0.05, 0.95),
)
def test_it_is_that_of_the_last_values_seeds_included(
    values: list[float], size: int, share: float
) -> None:
    recent = RecentQuantile(share, size, values[:2])
    for value in values[2:]:
        recent.add(value)
    kept = sorted(values[-size:])
    assert len(recent) == len(kept)
    assert recent.value == kept[int(share * (len(kept) - 1))]


def test_impossible_settings_are_refused() -> None:
    for share, size in ((0.0, 5), (1.0, 5), (0.5, 0)):
        with pytest.raises(ValueError, match="share"):
            RecentQuantile(share, size)
