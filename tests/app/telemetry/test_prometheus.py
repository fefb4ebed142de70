"""The quick histogram says what prometheus_client's own says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from app.telemetry.prometheus import QuickHistogram

BOUNDS = (0.005, 0.01, 0.5, 1, 10)


def _lines(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    # Sums differ by their order of addition.
    return sorted(line for line in lines if "_sum" not in line)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 20)), max_size=30))
def test_it_equals_the_library_s_own(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram("x_seconds", "Some time", {"model_name": "m"}, BOUNDS, ours)
    quick.observe_all(values[:10])
    quick.observe_all(values[10:])
    slow = Histogram("x_seconds", "Some time", ["model_name"], registry=theirs, buckets=BOUNDS)
    labeled = slow.labels(model_name="m")
    for value in values:
        labeled.observe(value)
    assert _lines(ours) == _lines(theirs)
    total = ours.get_sample_value("x_seconds_sum", {"model_name": "m"})
    assert total is not None
    assert abs(total - sum(values)) < 1e-9
