"""The peak of KV tokens to come, counted right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.admission.peak import peak_kv_tokens


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=8))
def test_peak_equals_a_walk_step_by_step(requests: list[tuple[int, int]]) -> None:
    peak, step = 0, 0
    while True:
        held = [now + step for now, left in requests if left >= step]
        if not held:
            break
        peak = max(peak, sum(held))
        step += 1
    assert peak_kv_tokens(requests) == peak
