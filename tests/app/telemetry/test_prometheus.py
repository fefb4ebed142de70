"""The quick histogram says what prometheus_client's own says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from actors.transport.messages import IterationRecord
from app.telemetry.causes import Cause
from app.telemetry.prometheus import HttpErrors, Metrics, QuickHistogram

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


def test_an_iteration_s_time_is_what_its_stages_took_whatever_their_clocks() -> None:
    metrics, stages_s = Metrics("m"), ((10.0, 10.1), (7e6, 7e6 + 0.25))
    record = IterationRecord(1, 10.0, 10.5, None, 1, 0, 1, stages_s, 1, 0, 0, 9, 0, 0, 64)
    metrics.iterations([record], num_blocks=10)
    total = metrics.registry.get_sample_value("legato_iteration_seconds_sum", {"model_name": "m"})
    assert total is not None
    assert abs(total - 0.35) < 1e-6


def test_http_errors_are_counted_by_status_and_code_from_the_start() -> None:
    counts: dict[tuple[int, str], int] = {}
    errors = HttpErrors(counts)
    name, overloaded = "legato_http_errors_total", {"status": "429", "code": "overloaded"}
    assert errors.registry.get_sample_value(name, overloaded) == 0
    counts |= {(429, "overloaded"): 2, (400, "invalid_value"): 1}
    assert errors.registry.get_sample_value(name, overloaded) == 2
    other = {"status": "400", "code": "invalid_value"}
    assert errors.registry.get_sample_value(name, other) == 1


def test_counts_of_known_labels_begin_at_zero() -> None:
    """Prometheus sees no increase in a series that appears with its first count."""
    shown = generate_latest(Metrics("m").registry).decode()
    for cause in Cause:
        assert f'legato_tbt_objective_missed_total{{cause="{cause}",model_name="m"}} 0.0' in shown
    for reason in ("stop", "length"):
        series = f'legato_request_success_total{{finished_reason="{reason}",model_name="m"}}'
        assert f"{series} 0.0" in shown
